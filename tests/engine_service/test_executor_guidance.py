"""Rules of running guided rows: every stream's tokens stand where the plan has its row, whatever the grouping."""

from collections.abc import Hashable, Mapping, Sequence

import pytest
import torch

from engine_service.executor import ModelExecutor
from engine_service.request import GenerationSpec, GuidanceContext, Request
from engine_service.scheduler import ScheduledRow
from engine_service.streams import StreamFork
from planner_service.client import Plan
from tests.engine_service.hand_plans import build_plan, build_scattered_arrays
from tests.reference.dense_guidance import guide_dense

VOCAB_SIZE = 13
Key = tuple[Hashable, str]


class ScriptedRunner:
    """Every stream has logits of its own, drawn by its name."""

    def __init__(self) -> None:
        self.token_ids: dict[str, list[int]] = {}

    def forward(self, token_ids: Mapping[str, torch.Tensor], plan: Plan) -> dict[str, torch.Tensor]:
        """Records the tokens."""
        self.token_ids = {name: tokens.tolist() for name, tokens in token_ids.items()}
        return {
            name: torch.stack(
                [draw_logits(key) if key else torch.full((VOCAB_SIZE,), torch.nan) for key in arrays.rows]
            )
            for name, arrays in plan.labels.items()
        }

    def forward_with_places(
        self, token_ids: Mapping[str, torch.Tensor], plan: Plan, places: Sequence[tuple[str, Sequence[int]]]
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Nothing here asks for further tokens."""
        raise AssertionError(places)


def draw_logits(key: Key) -> torch.Tensor:
    """Returns a stream's logits."""
    return 3 * torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(sum(map(ord, repr(key)))))


def make_row(arrival: int, prompt: tuple[int, ...], *contexts: tuple[tuple[int, ...], float]) -> ScheduledRow:
    """Returns a row that computes a request's streams whole."""
    guidance = tuple(GuidanceContext(*context) for context in contexts)
    request = Request(GenerationSpec("r", prompt, guidance=guidance), arrival, 5)
    return ScheduledRow(request, len(prompt), tuple(len(context) for context, _ in contexts))


ROWS = [
    make_row(1, (1, 2), ((3,), 1.5)),
    make_row(2, (4,)),
    make_row(3, (5, 6), ((7, 8), 2.0), ((9,), 3.0)),
]
SPANS: dict[Key, int] = {
    (1, "main"): 2,
    (2, "main"): 1,
    (3, "main"): 2,
    (1, "cfg_text"): 1,
    (3, "cfg_text"): 2,
    (3, "cfg_img"): 1,
}


def plan_rows(labels: Mapping[str, Sequence[Key | None]]) -> Plan:
    """Returns a plan with these rows."""
    return build_plan(
        {
            name: build_scattered_arrays([(0, SPANS[key]) if key else None for key in keys], page_size=4)
            for name, keys in labels.items()
        },
        rows=labels,
    )


SEPARATE = {
    label: [key for key in SPANS if key[1] == label] + [None] * num_padding
    for label, num_padding in (("main", 1), ("cfg_text", 0), ("cfg_img", 0))
}
COMBINED = {"guided": [*SPANS, None, None]}


@pytest.mark.parametrize("labels", [SEPARATE, COMBINED], ids=["separate", "combined"])
def test_tokens_are_chosen_from_what_guidance_makes_of_each_rows_streams(
    labels: Mapping[str, Sequence[Key | None]],
) -> None:
    """Rows with no, one and two contexts in one batch: each gets its own formula on its own logits."""
    tokens = ModelExecutor(ScriptedRunner(), VOCAB_SIZE).run(ROWS, plan_rows(labels))
    for row, token in zip(ROWS, tokens, strict=True):
        main, *others = (
            draw_logits((row.request.arrival, stream.label)).double().numpy() for stream in row.request.streams
        )
        scales = [context.scale for context in row.request.spec.guidance]
        assert token is not None
        assert token.token_id == int(guide_dense(main, others, scales).argmax())


def test_tokens_go_in_as_the_plans_rows_stand() -> None:
    """Each plan label gets its rows' tokens in its order; padding rows get any."""
    runner = ScriptedRunner()
    executor = ModelExecutor(runner, VOCAB_SIZE)
    executor.run(ROWS, plan_rows(SEPARATE))
    assert runner.token_ids == {"main": [1, 2, 4, 5, 6, 0], "cfg_text": [3, 7, 8], "cfg_img": [9]}
    executor.run(ROWS, plan_rows(COMBINED))
    assert runner.token_ids == {"guided": [1, 2, 4, 5, 6, 3, 7, 8, 9, 0, 0]}


def test_row_is_chosen_from_only_when_all_its_streams_are_complete() -> None:
    """While a context goes in, the prompt's last token waits, and there is nothing to choose."""
    request = make_row(1, (1, 2), ((3, 4, 5), 1.5)).request
    arrays = {name: build_scattered_arrays([(0, span)], page_size=4) for name, span in (("main", 1), ("cfg_text", 2))}
    plan = build_plan(arrays, rows={"main": [(1, "main")], "cfg_text": [(1, "cfg_text")]})
    runner = ScriptedRunner()
    assert ModelExecutor(runner, VOCAB_SIZE).run([ScheduledRow(request, 1, (2,))], plan) == [None]
    assert runner.token_ids == {"main": [1], "cfg_text": [3, 4]}


def test_forked_stream_goes_on_where_the_fork_ends() -> None:
    """The tokens that a fork brings do not go in again."""
    request = make_row(1, (1, 2, 3), ((1, 2, 9), 1.5)).request
    row = ScheduledRow(request, 0, (1,), (StreamFork(1, "main", "cfg_text", 2),))
    plan = build_plan({"cfg_text": build_scattered_arrays([(2, 1)], page_size=4)}, rows={"cfg_text": [(1, "cfg_text")]})
    runner = ScriptedRunner()
    ModelExecutor(runner, VOCAB_SIZE).run([row], plan)
    assert runner.token_ids == {"cfg_text": [9]}
