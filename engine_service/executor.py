"""Runs one planned step on the model and chooses the next tokens."""

from collections.abc import Sequence
from typing import Protocol

import torch

from engine_service.planner_link import MAIN_LABEL
from engine_service.request import Request
from engine_service.sampling import Sampler, SamplingState
from engine_service.sampling_params import SampledToken
from engine_service.scheduler import ScheduledRow
from planner_service.client import Plan


class Forward(Protocol):
    """A model over a paged KV cache."""

    def forward(self, token_ids: dict[str, torch.Tensor], plan: Plan) -> dict[str, torch.Tensor]:
        """Runs a step: int64 [num_tokens] for each plan label in, float32 [num_rows, vocab_size] out."""


class ModelExecutor:
    """Runs steps on a model, and keeps what sampling needs of each request.

    Args:
        runner: the model.
        vocab_size: number of logits of a row.
    """

    def __init__(self, runner: Forward, vocab_size: int) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
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
        token_ids = torch.tensor([token_id for row in rows for token_id in row.token_ids], dtype=torch.int64)
        logits = self._runner.forward({MAIN_LABEL: token_ids}, plan)[MAIN_LABEL]
        places = [place for place, row in enumerate(rows) if row.is_sampled]
        if len(places) != len(rows):
            logits = logits[places]
        tokens = self._sampler.sample(logits, [self._find_state(rows[place].request) for place in places])
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
            state = self._states[request.arrival] = SamplingState(
                spec.sampling, spec.prompt_token_ids, vocab_size=self._vocab_size, num_logprobs=spec.num_logprobs
            )
        return state
