"""`logits_filters.py`: the same results as transformers' logits processors."""

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine_service.logits_filters import (
    apply_count_penalties,
    apply_repetition_penalty,
    keep_min_p,
    keep_top_k,
    keep_top_p,
)

VOCAB_SIZE = 3000
NO_TOKENS = torch.zeros((1, 0), dtype=torch.int64)


def build_scores(spread: float, num_rows: int = 6) -> torch.Tensor:
    """Random scores; the larger `spread`, the fewer tokens matter."""
    generator = torch.Generator().manual_seed(int(spread * 10))
    return torch.randn((num_rows, VOCAB_SIZE), generator=generator) * spread


@pytest.mark.parametrize("spread", [0.3, 1.0, 5.0])
def test_top_k_keeps_what_transformers_keeps(spread: float) -> None:
    """Each row its own number, 0 and more than there are included."""
    scores = build_scores(spread)
    top_k = [1, 7, 0, 50, VOCAB_SIZE + 5, 2999]
    kept = keep_top_k(scores, top_k)
    for row, count in enumerate(top_k):
        one = scores[row : row + 1]
        assert torch.equal(kept[row : row + 1], TopKLogitsWarper(count)(NO_TOKENS, one) if count else one)


def test_top_k_keeps_ties_with_the_last_that_is_kept() -> None:
    """As transformers does."""
    scores = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    expected = TopKLogitsWarper(2)(NO_TOKENS, scores)
    assert torch.equal(keep_top_k(scores, [2]), expected)
    assert torch.isfinite(expected).sum() == 3


@pytest.mark.parametrize("spread", [0.01, 0.3, 1.0, 5.0])
def test_top_p_keeps_what_transformers_keeps(spread: float) -> None:
    """For flat distributions, where most of the vocabulary is kept, and for sharp ones."""
    scores = build_scores(spread)
    top_p = [0.1, 0.5, 0.9, 0.99, 1.0, 1e-6]
    kept = keep_top_p(scores, torch.tensor(top_p).unsqueeze(1))
    for row, share in enumerate(top_p):
        one = scores[row : row + 1]
        expected = TopPLogitsWarper(share)(NO_TOKENS, one) if share < 1 else one
        # Sums in another order may differ in their last digit, and so in one token at the border.
        assert int((torch.isfinite(kept[row]) != torch.isfinite(expected[0])).sum()) <= (1 if spread < 0.1 else 0)


@pytest.mark.parametrize("spread", [0.3, 1.0, 5.0])
def test_min_p_keeps_what_transformers_keeps(spread: float) -> None:
    """0 keeps all, 1 the likeliest alone."""
    scores = build_scores(spread)
    min_p = [0.0, 0.01, 0.1, 0.5, 0.9, 1.0]
    kept = keep_min_p(scores, torch.tensor(min_p).unsqueeze(1))
    for row, share in enumerate(min_p):
        one = scores[row : row + 1]
        assert torch.equal(kept[row : row + 1], MinPLogitsWarper(share)(NO_TOKENS, one))


def test_repetition_penalty_changes_what_transformers_changes() -> None:
    """Positive logits are divided, negative ones multiplied, those of unseen tokens left alone."""
    scores = build_scores(2.0, num_rows=3)
    seen_ids, penalties = [[1, 5, 5, 2999], [0], [7, 8]], [1.3, 0.5, 1.0]
    seen = torch.zeros((3, VOCAB_SIZE), dtype=torch.bool)
    for row, token_ids in enumerate(seen_ids):
        seen[row, token_ids] = True
    penalized = apply_repetition_penalty(scores, seen, torch.tensor(penalties).unsqueeze(1))
    for row, (token_ids, penalty) in enumerate(zip(seen_ids, penalties, strict=True)):
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([token_ids]), scores[row : row + 1].clone())
        assert torch.equal(penalized[row : row + 1], expected)


def test_filters_leave_what_they_are_given_alone() -> None:
    """The model's own logits are still needed for log-probabilities."""
    scores = build_scores(1.0)
    before = scores.clone()
    column = torch.full((6, 1), 0.5)
    keep_top_k(scores, [3] * 6)
    keep_top_p(scores, column)
    keep_min_p(scores, column)
    apply_repetition_penalty(scores, torch.ones_like(scores, dtype=torch.bool), column)
    assert torch.equal(scores, before)


def test_count_penalties_follow_the_formula_of_the_openai_api() -> None:
    """`mu[j] -= c[j] * frequency + float(c[j] > 0) * presence`, each row with its own figures."""
    logits = build_scores(1.0, num_rows=3)
    counts = torch.zeros_like(logits)
    counts[0, 4], counts[1, 4], counts[1, 9], counts[2, 0] = 1, 3, 1, 2
    presence, frequency = [0.5, -2.0, 0.0], [0.25, 2.0, -1.5]
    found = apply_count_penalties(
        logits, counts, torch.tensor(presence).unsqueeze(1), torch.tensor(frequency).unsqueeze(1)
    )
    expected = logits.tolist()
    for row, values in enumerate(expected):
        for token_id in range(VOCAB_SIZE):
            count = int(counts[row, token_id])
            values[token_id] -= count * frequency[row] + float(count > 0) * presence[row]
    assert torch.allclose(found, torch.tensor(expected), atol=1e-6)
