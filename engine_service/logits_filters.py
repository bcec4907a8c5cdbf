"""Filters on logits, row by row, with the results of transformers' logits processors."""

from collections.abc import Sequence

import torch

# Enough for the likeliest tokens of nearly every distribution: a full sort of the vocabulary costs many times more.
_NUM_CANDIDATES = 1_024


def apply_repetition_penalty(logits: torch.Tensor, seen: torch.Tensor, penalties: torch.Tensor) -> torch.Tensor:
    """Makes tokens that were seen less likely (more, for a penalty below 1).

    Args:
        logits: float [num_rows, vocab_size].
        seen: bool [num_rows, vocab_size].
        penalties: float [num_rows, 1].

    Returns:
        New logits: those of seen tokens divided by the penalty where positive, multiplied by it where negative.

    Source:
        Keskar et al., "CTRL", section 4.1, as transformers' RepetitionPenaltyLogitsProcessor has it.
    """
    penalized = torch.where(logits < 0, logits * penalties, logits / penalties)
    return torch.where(seen, penalized, logits)


def apply_count_penalties(
    logits: torch.Tensor, counts: torch.Tensor, presence: torch.Tensor, frequency: torch.Tensor
) -> torch.Tensor:
    """Makes tokens that the answer already has less likely (more, for penalties below 0).

    Args:
        logits: float [num_rows, vocab_size].
        counts: float [num_rows, vocab_size], how often the answer has each token.
        presence: float [num_rows, 1].
        frequency: float [num_rows, 1].

    Returns:
        New logits: `logits - counts * frequency - (counts > 0) * presence`.

    Source:
        The OpenAI API's description of frequency and presence penalties.
    """
    return logits - counts * frequency - (counts > 0) * presence


def keep_top_k(scores: torch.Tensor, top_k: Sequence[int]) -> torch.Tensor:
    """Leaves each row its `top_k` largest scores, and those equal to the smallest of them; 0 leaves all.

    Args:
        scores: float [num_rows, vocab_size].
        top_k: one a row.

    Returns:
        New scores, -inf where taken out.
    """
    vocab_size = scores.shape[-1]
    counts = [min(count, vocab_size) if count else vocab_size for count in top_k]
    limited = [count for count in counts if count < vocab_size]
    if not limited:
        return scores
    largest = scores.topk(max(limited), dim=-1).values
    places = torch.tensor([min(count, max(limited)) - 1 for count in counts], device=scores.device)
    thresholds = largest.gather(1, places.unsqueeze(1))
    unlimited = torch.tensor([count == vocab_size for count in counts], device=scores.device).unsqueeze(1)
    return scores.masked_fill((scores < thresholds) & ~unlimited, -torch.inf)


def keep_top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Leaves each row the smallest set of its likeliest tokens whose probabilities sum to `top_p` or more.

    Args:
        scores: float [num_rows, vocab_size].
        top_p: float [num_rows, 1]; 1 leaves all.

    Returns:
        New scores, -inf where taken out.
    """
    probabilities = torch.softmax(scores, dim=-1)
    vocab_size = scores.shape[-1]
    kept = torch.empty(0)
    for num_candidates in (_NUM_CANDIDATES, vocab_size):
        values, ids = probabilities.topk(min(num_candidates, vocab_size), dim=-1)
        likelier = values.cumsum(dim=-1) - values
        kept = likelier < top_p
        # Where even the last candidate is kept, more of the vocabulary could be.
        if num_candidates >= vocab_size or not bool((kept[:, -1:] & (top_p < 1)).any()):
            break
    removed = torch.ones_like(scores, dtype=torch.bool).scatter(1, ids, ~kept)
    return scores.masked_fill(removed & (top_p < 1), -torch.inf)


def keep_min_p(scores: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Leaves each row the tokens at least `min_p` times as likely as its likeliest.

    Args:
        scores: float [num_rows, vocab_size].
        min_p: float [num_rows, 1]; 0 leaves all.

    Returns:
        New scores, -inf where taken out.
    """
    probabilities = torch.softmax(scores, dim=-1)
    smallest = probabilities.amax(dim=-1, keepdim=True) * min_p
    return scores.masked_fill(probabilities < smallest, -torch.inf)
