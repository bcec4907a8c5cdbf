"""Chooses the next token of every row of a batch from the model's logits."""

from collections.abc import Sequence

import torch

from engine_service.logits_filters import (
    apply_count_penalties,
    apply_repetition_penalty,
    keep_min_p,
    keep_top_k,
    keep_top_p,
)
from engine_service.logprobs import build_logprobs
from engine_service.sampling_params import SampledToken, SamplingParams, TokenLogprob
from engine_service.sampling_state import SamplingState

__all__ = ["SampledToken", "Sampler", "SamplingParams", "SamplingState", "TokenLogprob"]


class Sampler:
    """Samples batches; it holds nothing, all that lasts is in the states.

    A row's choice depends on its logits and its state alone, not on the other rows: filters, cumulative sums and
    random numbers are the row's own.
    """

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
        """Chooses one token a row, and moves the states on.

        Args:
            logits: float32 [num_rows, vocab_size], the model's own; not changed.
            states: one a row; no state twice.

        Returns:
            One choice a row.
        """
        if not states:
            return []
        scores = _adjust(logits, states)
        # A copy to the host that waits for the device: everything after it is bookkeeping on the host.
        chosen = scores.argmax(dim=-1)
        sampled_rows = [row for row, state in enumerate(states) if not state.params.is_greedy]
        if sampled_rows:
            index = torch.tensor(sampled_rows, device=logits.device)
            picks = _sample_rows(scores[index], [states[row] for row in sampled_rows])
            chosen[index] = picks
        token_ids: list[int] = chosen.tolist()
        for state, token_id in zip(states, token_ids, strict=True):
            state.append(token_id)
        return _attach_logprobs(logits, states, token_ids)


def _adjust(logits: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
    """Returns what tokens are chosen by: the logits with their biases, penalties and bans."""
    # transformers' order, with the penalties it does not have beside the one it has.
    scores = _add_biases(logits, states)
    scores = _penalize_seen(scores, states)
    scores = _penalize_counts(scores, states)
    return _ban(scores, states)


def _add_biases(scores: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
    biases = [(row, *pair) for row, state in enumerate(states) for pair in state.params.logit_bias]
    if not biases:
        return scores
    rows, ids, values = zip(*biases, strict=True)
    device = scores.device
    places = (torch.tensor(rows, device=device), torch.tensor(ids, device=device))
    return scores.index_put(places, torch.tensor(values, dtype=scores.dtype, device=device), accumulate=True)


def _penalize_seen(scores: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
    rows = [row for row, state in enumerate(states) if state.seen is not None]
    if not rows:
        return scores
    device = scores.device
    index = torch.tensor(rows, device=device)
    seen = torch.stack([seen for state in states if (seen := state.seen) is not None]).to(device)
    penalties = _column([states[row].params.repetition_penalty for row in rows], device)
    penalized = apply_repetition_penalty(scores[index], seen, penalties)
    # A tiny penalty makes logits infinite, from which no probabilities follow.
    limits = torch.finfo(scores.dtype)
    return scores.index_copy(0, index, penalized.clamp_(limits.min, limits.max))


def _penalize_counts(scores: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
    rows = [row for row, state in enumerate(states) if state.counts is not None]
    if not rows:
        return scores
    device = scores.device
    index = torch.tensor(rows, device=device)
    counts = torch.stack([counts for state in states if (counts := state.counts) is not None]).to(device)
    presence = _column([states[row].params.presence_penalty for row in rows], device)
    frequency = _column([states[row].params.frequency_penalty for row in rows], device)
    return scores.index_copy(0, index, apply_count_penalties(scores[index], counts, presence, frequency))


def _ban(scores: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
    bans = [(row, token_id) for row, state in enumerate(states) for token_id in state.banned_token_ids]
    if not bans:
        return scores
    rows, ids = zip(*bans, strict=True)
    places = (torch.tensor(rows, device=scores.device), torch.tensor(ids, device=scores.device))
    return scores.index_put(places, torch.tensor(-torch.inf, dtype=scores.dtype, device=scores.device))


def _sample_rows(scores: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
    device = scores.device
    params = [state.params for state in states]
    # Relative to the likeliest: a tiny temperature would make it infinite, and every probability NaN.
    temperatures = _column([one.temperature for one in params], device)
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / temperatures.clamp_(min=torch.finfo(torch.float32).tiny)
    # In the order of transformers' processors: each filter sees what the ones before it left.
    if any(one.top_k for one in params):
        scores = keep_top_k(scores, [one.top_k for one in params])
    if any(one.top_p < 1.0 for one in params):
        scores = keep_top_p(scores, _column([one.top_p for one in params], device))
    if any(one.min_p > 0.0 for one in params):
        scores = keep_min_p(scores, _column([one.min_p for one in params], device))
    draws = _column([state.draw() for state in states], device, torch.float64)
    return _pick_by_cumulative_sum(scores, draws)


def _pick_by_cumulative_sum(scores: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Returns for each row the first token whose cumulative probability passes the row's draw."""
    cumulative = torch.softmax(scores, dim=-1).to(torch.float64).cumsum(dim=-1)
    targets = draws * cumulative[:, -1:]
    picks = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    # A draw that rounds up to the whole sum lands one past the end: the last token that has a probability takes it.
    last_possible = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous()).squeeze(1)
    return torch.minimum(picks, last_possible).clamp_(0, scores.shape[-1] - 1)


def _column(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)


def _attach_logprobs(
    logits: torch.Tensor, states: Sequence[SamplingState], token_ids: Sequence[int]
) -> list[SampledToken]:
    results = [SampledToken(token_id) for token_id in token_ids]
    rows = [row for row, state in enumerate(states) if state.num_logprobs is not None]
    if rows:
        wanted = logits[torch.tensor(rows, device=logits.device)]
        num_top = [states[row].num_logprobs or 0 for row in rows]
        for row, token in zip(rows, build_logprobs(wanted, [token_ids[row] for row in rows], num_top), strict=True):
            results[row] = token
    return results
