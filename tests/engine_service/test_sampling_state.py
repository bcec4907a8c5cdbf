"""`sampling_state.py`: what a request's next choice depends on."""

import pytest
import torch

from engine_service.sampling_params import SamplingParams
from engine_service.sampling_state import SamplingState


def test_only_what_is_needed_is_kept() -> None:
    """A request without penalties costs no memory of the vocabulary's size."""
    state = SamplingState(SamplingParams(temperature=1.0, top_k=3, logit_bias=((1, 2.0),)), (1, 2), vocab_size=9)
    state.append(3)
    assert (state.seen, state.counts) == (None, None)


def test_prompt_counts_as_seen_and_not_as_answered() -> None:
    """The repetition penalty looks at both, the other two at the answer."""
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=1.0)
    state = SamplingState(params, (1, 2, 2), vocab_size=5)
    for token_id in (2, 4, 4):
        state.append(token_id)
    assert state.seen is not None
    assert state.counts is not None
    assert state.seen.tolist() == [False, True, True, False, True]
    assert state.counts.tolist() == [0, 0, 1, 0, 2]


@pytest.mark.parametrize("min_tokens", [0, 1, 3])
def test_tokens_are_banned_until_enough_are_chosen(min_tokens: int) -> None:
    """So that an answer has so many tokens before the one that ends it."""
    state = SamplingState(SamplingParams(), (1,), vocab_size=9, min_tokens=min_tokens, end_token_ids=[4, 7])
    banned = []
    for _ in range(5):
        banned.append(state.banned_token_ids)
        state.append(0)
    assert banned == [(4, 7)] * min_tokens + [()] * (5 - min_tokens)


def test_seed_decides_the_draws() -> None:
    """Equal seeds draw equal numbers in [0, 1), on and on; a greedy request draws none."""
    first, second, other = (
        SamplingState(SamplingParams(temperature=1.0, seed=seed), (), vocab_size=9) for seed in (5, 5, 6)
    )
    draws = [first.draw() for _ in range(10)]
    assert [second.draw() for _ in range(10)] == draws
    assert [other.draw() for _ in range(10)] != draws
    assert all(0 <= draw < 1 for draw in draws)
    assert torch.tensor(draws).unique().numel() == 10
