"""Rules of running a step: which tokens go in, and whose next token comes out."""

from collections.abc import Mapping

import torch

from engine_service.executor import ModelExecutor
from engine_service.request import GenerationSpec, Request
from engine_service.sampling_params import SamplingParams
from engine_service.scheduler import ScheduledRow
from planner_service.client import Plan
from tests.engine_service.hand_plans import build_plan, build_scattered_arrays

VOCAB_SIZE = 11


class RecordingRunner:
    """Row r's likeliest token is r + 4; every token has some chance."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.num_rows = 0

    def forward(self, token_ids: Mapping[str, torch.Tensor], plan: Plan) -> dict[str, torch.Tensor]:
        """Records the tokens."""
        self.token_ids = token_ids["main"].tolist()
        logits = torch.zeros(self.num_rows, VOCAB_SIZE)
        for row in range(self.num_rows):
            logits[row, row + 4] = 1.0
        return {"main": logits}


def _make_row(arrival: int, tokens: tuple[int, ...], num_tokens: int, **given: object) -> ScheduledRow:
    spec = GenerationSpec("r", tokens, **given)  # type: ignore[arg-type]  # The cases have different types.
    return ScheduledRow(Request(spec, arrival, 5), num_tokens)


def _build_plan(rows: list[ScheduledRow], num_padding: int = 0) -> Plan:
    arrays = build_scattered_arrays([*((0, row.num_tokens) for row in rows), *[None] * num_padding], page_size=4)
    keys = [*((row.request.arrival, "main") for row in rows), *[None] * num_padding]
    return build_plan({"main": arrays}, rows={"main": keys})


def _run(
    executor: ModelExecutor, runner: RecordingRunner, rows: list[ScheduledRow], num_padding: int = 0
) -> list[int | None]:
    runner.num_rows = len(rows) + num_padding
    return [token and token.token_id for token in executor.run(rows, _build_plan(rows, num_padding))]


def test_tokens_go_in_row_after_row() -> None:
    """The model gets each row's missing tokens in the order of the rows."""
    runner = RecordingRunner()
    _run(ModelExecutor(runner, VOCAB_SIZE), runner, [_make_row(1, (1, 2, 3), 3), _make_row(2, (7, 8, 9), 2)])
    assert runner.token_ids == [1, 2, 3, 7, 8]


def test_only_rows_that_are_complete_get_a_token() -> None:
    """A row whose prompt goes on has no next token; the others get their own row's."""
    runner = RecordingRunner()
    rows = [_make_row(1, (1, 2, 3), 2), _make_row(2, (7,), 1), _make_row(3, (5, 5), 1), _make_row(4, (6,), 1)]
    assert _run(ModelExecutor(runner, VOCAB_SIZE), runner, rows) == [None, 5, None, 7]


def test_padding_rows_get_a_token_in_and_none_out() -> None:
    """The model sees as many tokens as the plan has; the padding rows' logits choose nothing."""
    runner = RecordingRunner()
    rows = [_make_row(arrival, (arrival,), 1) for arrival in (1, 2, 3)]
    assert _run(ModelExecutor(runner, VOCAB_SIZE), runner, rows, num_padding=1) == [4, 5, 6]
    assert len(runner.token_ids) == 4
    assert runner.token_ids[:3] == [1, 2, 3]


def test_step_without_a_complete_row_chooses_nothing() -> None:
    """A step may be prompt chunks alone."""
    runner = RecordingRunner()
    assert _run(ModelExecutor(runner, VOCAB_SIZE), runner, [_make_row(1, (1, 2, 3), 1)]) == [None]


def test_sampling_goes_on_where_it_stopped_until_the_request_is_forgotten() -> None:
    """A seeded request draws on from step to step; one with the same seed that starts later draws the same."""
    runner = RecordingRunner()
    executor = ModelExecutor(runner, VOCAB_SIZE)
    sampling = SamplingParams(temperature=50.0, seed=7)

    def draw(arrival: int, num_steps: int) -> list[int | None]:
        row = _make_row(arrival, (1,), 1, sampling=sampling)
        return [_run(executor, runner, [row])[0] for _ in range(num_steps)]

    first = draw(1, 8)
    assert len(set(first)) > 1
    assert draw(2, 8) == first
    executor.forget(_make_row(1, (1,), 1).request)
    assert draw(1, 8) == first
    assert draw(2, 8) != first, "request 2 was not forgotten"


def test_logprobs_come_where_they_are_asked_for() -> None:
    """One request's wish does not concern the others."""
    runner = RecordingRunner()
    runner.num_rows = 2
    rows = [_make_row(1, (1,), 1, num_logprobs=2), _make_row(2, (1,), 1)]
    first, second = ModelExecutor(runner, VOCAB_SIZE).run(rows, _build_plan(rows))
    assert first is not None
    assert second is not None
    assert first.logprob is not None
    assert first.top_logprobs[0].token_id == 4
    assert second.logprob is None
