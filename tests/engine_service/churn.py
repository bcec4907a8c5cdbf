"""Requests that join and leave a running batch, greedily decoded: the smallest engine there could be."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from engine_service.model_runner import ModelRunner
from planner_service.client import Plan
from tests.engine_service.hand_plans import PAD, HandPlanner


@dataclass
class ChurnRequest:
    """One request.

    Args:
        prompt: its token ids.
        num_tokens: how many to generate.
        joins_at: the step from which it takes part.
    """

    prompt: list[int]
    num_tokens: int
    joins_at: int = 0
    generated: list[int] = field(default_factory=list)
    num_sent: int = 0

    @property
    def is_done(self) -> bool:
        """Whether all its tokens are generated."""
        return len(self.generated) == self.num_tokens

    def next_tokens(self, chunk: int) -> list[int]:
        """Returns what the model has not seen yet, at most `chunk` tokens."""
        return (self.prompt + self.generated)[self.num_sent :][:chunk]


def run_churn(
    runner: ModelRunner,
    requests: Sequence[ChurnRequest],
    *,
    chunk: int,
    num_padding: int = 0,
    on_step: Callable[[Plan], None] = lambda _plan: None,
) -> None:
    """Generates every request's tokens, each step with all the rows there are; long prompts go in by chunks.

    Args:
        runner: the model.
        requests: filled with what they generate.
        chunk: prompt tokens a row takes in a step, at most.
        num_padding: padding rows in every step.
        on_step: called with each plan before it runs.
    """
    planner = HandPlanner(page_size=runner.page_size, num_pages=runner.num_pages)
    step = 0
    while any(not request.is_done for request in requests):
        running = [stream for stream, one in enumerate(requests) if one.joins_at <= step and not one.is_done]
        spans = {stream: requests[stream].next_tokens(chunk) for stream in running}
        plan = planner.plan({"main": [(stream, len(spans[stream])) for stream in running] + [(PAD, 1)] * num_padding})
        on_step(plan)
        tokens = [token for stream in running for token in spans[stream]] + [0] * num_padding
        logits = runner.forward({"main": torch.tensor(tokens, dtype=torch.int64)}, plan)["main"]
        for row, stream in enumerate(running):
            request = requests[stream]
            request.num_sent += len(spans[stream])
            if request.num_sent == len(request.prompt) + len(request.generated):
                request.generated.append(int(logits[row].argmax()))
            if request.is_done:
                planner.drop(stream)
        step += 1
    assert len(planner.naive.free) == runner.num_pages - 1, "every page is back"
