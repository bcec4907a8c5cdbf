"""Chooses the next token of every row of a batch from the model's logits."""

from collections.abc import Sequence

import numpy as np
import torch

from engine_service.logits_filters import apply_repetition_penalty, keep_min_p, keep_top_k, keep_top_p
from engine_service.sampling_params import SampledToken, SamplingParams, TokenLogprob

__all__ = ["SampledToken", "Sampler", "SamplingParams", "SamplingState", "TokenLogprob"]


class SamplingState:
    """What sampling one request needs from token to token. It survives preemption: it is not rebuilt on recomputation.

    Args:
        params: how the request wants its tokens chosen.
        prompt_token_ids: the prompt, which the repetition penalty counts as seen.
        vocab_size: number of logits of a row.
        num_logprobs: None for no log-probabilities, 0 for the chosen token's only, else so many of the likeliest too.
    """

    __slots__ = ("_generator", "num_logprobs", "params", "seen")

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        vocab_size: int,
        num_logprobs: int | None = None,
    ) -> None:
        self.params = params
        self.num_logprobs = num_logprobs
        # numpy's, as torch's takes only the lower half of a 64-bit seed.
        self._generator = None if params.is_greedy else np.random.Generator(np.random.PCG64(params.seed))
        self.seen: torch.Tensor | None = None
        if params.repetition_penalty != 1.0:
            self.seen = torch.zeros(vocab_size, dtype=torch.bool)
            self.seen[torch.tensor(list(prompt_token_ids), dtype=torch.int64)] = True

    def draw(self) -> float:
        """Returns the request's next random number, in [0, 1)."""
        assert self._generator is not None, "a greedy request draws no numbers"
        return self._generator.random()


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
        scores = _penalize(logits, states)
        # A copy to the host that waits for the device: everything after it is bookkeeping on the host.
        chosen = scores.argmax(dim=-1)
        sampled_rows = [row for row, state in enumerate(states) if not state.params.is_greedy]
        if sampled_rows:
            index = torch.tensor(sampled_rows, device=logits.device)
            picks = _sample_rows(scores[index], [states[row] for row in sampled_rows])
            chosen[index] = picks
        token_ids: list[int] = chosen.tolist()
        for state, token_id in zip(states, token_ids, strict=True):
            if state.seen is not None:
                state.seen[token_id] = True
        return _attach_logprobs(logits, states, token_ids)


def _penalize(logits: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
    rows = [row for row, state in enumerate(states) if state.seen is not None]
    if not rows:
        return logits
    device = logits.device
    index = torch.tensor(rows, device=device)
    seen = torch.stack([seen for state in states if (seen := state.seen) is not None]).to(device)
    penalties = _column([states[row].params.repetition_penalty for row in rows], device)
    return logits.index_copy(0, index, apply_repetition_penalty(logits[index], seen, penalties))


def _sample_rows(scores: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
    device = scores.device
    params = [state.params for state in states]
    scores = scores / _column([one.temperature for one in params], device)
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
    if not rows:
        return results
    logprobs = torch.log_softmax(logits[torch.tensor(rows, device=logits.device)].float(), dim=-1)
    chosen_ids = torch.tensor([token_ids[row] for row in rows], device=logits.device).unsqueeze(1)
    chosen = logprobs.gather(1, chosen_ids).squeeze(1).tolist()
    num_top = min(max(states[row].num_logprobs or 0 for row in rows), logprobs.shape[-1])
    top_values, top_ids = (part.tolist() for part in logprobs.topk(num_top, dim=-1))
    for place, row in enumerate(rows):
        num_wanted = states[row].num_logprobs or 0
        pairs = zip(top_ids[place][:num_wanted], top_values[place][:num_wanted], strict=True)
        top = tuple(TokenLogprob(token_id, logprob) for token_id, logprob in pairs)
        results[row] = SampledToken(token_ids[row], chosen[place], top)
    return results
