"""Runs one planned step on the model and chooses the next tokens."""

from collections.abc import Hashable, Sequence
from typing import Protocol

import torch

from engine_service.guidance import guide
from engine_service.labels import GUIDANCE_LABELS
from engine_service.prompt_logprobs import add_prompt_logprobs, find_prompt_parts
from engine_service.request import Request
from engine_service.sampling import Sampler, SamplingState
from engine_service.sampling_params import SampledToken
from engine_service.scheduler import ScheduledRow
from planner_service.client import Plan


class Forward(Protocol):
    """A model over a paged KV cache."""

    def forward(self, token_ids: dict[str, torch.Tensor], plan: Plan) -> dict[str, torch.Tensor]:
        """Runs a step: int64 [num_tokens] for each plan label in, float32 [num_rows, vocab_size] out."""

    def forward_with_places(
        self, token_ids: dict[str, torch.Tensor], plan: Plan, places: Sequence[tuple[str, Sequence[int]]]
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Runs a step, and returns the logits at further places among the tokens of plan labels too."""


class ModelExecutor:
    """Runs steps on a model, and keeps what sampling needs of each request.

    Args:
        runner: the model.
        vocab_size: number of logits of a row.
        eos_token_ids: tokens with which the model ends an answer.
    """

    def __init__(self, runner: Forward, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._sampler = Sampler()
        self._states: dict[int, SamplingState] = {}

    def run(self, rows: Sequence[ScheduledRow], plan: Plan) -> list[SampledToken | None]:
        """Runs a step.

        Args:
            rows: its rows.
            plan: their plan.

        Returns:
            For each row the token that was chosen, or None where the prompt goes on.
        """
        token_ids = _build_token_ids(rows, plan)
        parts = find_prompt_parts(rows, plan)
        if parts:
            logits, further = self._runner.forward_with_places(
                token_ids, plan, [(part.plan_label, part.places) for part in parts]
            )
            add_prompt_logprobs(parts, further)
        else:
            logits = self._runner.forward(token_ids, plan)
        places = [place for place, row in enumerate(rows) if row.is_sampled]
        sampled = [rows[place].request for place in places]
        tokens = self._sampler.sample(_choose_logits(logits, sampled, plan), [self._find_state(one) for one in sampled])
        results: list[SampledToken | None] = [None] * len(rows)
        for place, token in zip(places, tokens, strict=True):
            results[place] = token
        return results

    def forget(self, request: Request) -> None:
        """Lets go of what was kept for a request that has ended."""
        self._states.pop(request.arrival, None)

    def _find_state(self, request: Request) -> SamplingState:
        state = self._states.get(request.arrival)
        if state is None:
            spec = request.spec
            eos_token_ids = () if spec.stopping.ignore_eos else self._eos_token_ids
            state = self._states[request.arrival] = SamplingState(
                spec.sampling,
                spec.prompt_token_ids,
                vocab_size=self._vocab_size,
                num_logprobs=spec.num_logprobs,
                min_tokens=spec.stopping.min_tokens,
                end_token_ids=(*eos_token_ids, *spec.stopping.stop_token_ids),
            )
        return state


def _build_token_ids(rows: Sequence[ScheduledRow], plan: Plan) -> dict[str, torch.Tensor]:
    """Returns the tokens of each plan label, in the order of its rows."""
    tokens_by_key: dict[tuple[Hashable, str], list[int]] = {
        (row.request.arrival, stream.label): row.read_tokens(place)
        for row in rows
        for place, stream in enumerate(row.request.streams)
    }
    token_ids = {}
    for name, arrays in plan.labels.items():
        tokens: list[int] = []
        for key, end in zip(arrays.rows, arrays.qo_indptr[1:].tolist(), strict=True):
            # Whatever tokens a padding row has: nobody reads what becomes of them.
            tokens += [0] * (end - len(tokens)) if key is None else tokens_by_key[key]
        token_ids[name] = torch.tensor(tokens, dtype=torch.int64)
    return token_ids


def _choose_logits(logits: dict[str, torch.Tensor], requests: Sequence[Request], plan: Plan) -> torch.Tensor:
    """Returns what the next token of each request is chosen from, float32 [len(requests), vocab_size]."""
    keys = [key for arrays in plan.labels.values() for key in arrays.rows]
    places = {key: place for place, key in enumerate(keys) if key is not None}
    parts = [logits[name] for name in plan.labels]
    stacked = parts[0] if len(parts) == 1 else torch.cat(parts)

    def gather(chosen: Sequence[Request], stream: int) -> torch.Tensor:
        index = [places[request.arrival, request.streams[stream].label] for request in chosen]
        return stacked if index == list(range(len(keys))) else stacked[index]

    result = gather(requests, 0)
    for num_contexts in range(1, len(GUIDANCE_LABELS) + 1):
        rows = [row for row, request in enumerate(requests) if len(request.spec.guidance) == num_contexts]
        if rows:
            guided = [requests[row] for row in rows]
            result = result.index_copy(
                0,
                torch.tensor(rows, device=result.device),
                guide(
                    result[rows],
                    [gather(guided, 1 + number) for number in range(num_contexts)],
                    [_build_scales(guided, number, result.device) for number in range(num_contexts)],
                ),
            )
    return result


def _build_scales(requests: Sequence[Request], number: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([[request.spec.guidance[number].scale] for request in requests], device=device)
