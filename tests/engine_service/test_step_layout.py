"""Rules of what a step consists of."""

import pytest

from engine_service.request import GenerationSpec, GuidanceContext, Request
from engine_service.scheduler import ScheduledRow
from engine_service.step_layout import (
    MAIN_LABEL,
    LayoutOptions,
    StepSpec,
    build_step_spec,
    count_padding_rows,
    count_steady_steps,
)
from engine_service.streams import StreamFork
from planner_service.client import CombinedLabel, ForkRequest, Segment

PADDING_ROW = Segment(None, MAIN_LABEL)


def make_decode_row(arrival: int, num_generated: int = 1, max_tokens: int = 100) -> ScheduledRow:
    """Returns a row of a request that decodes."""
    request = Request(GenerationSpec("r", (1, 2, 3)), arrival, max_tokens)
    request.token_ids += [4] * num_generated
    request.streams[0].num_computed_tokens = len(request.token_ids) - 1
    return ScheduledRow(request, 1)


def make_prompt_row(arrival: int, num_tokens: int) -> ScheduledRow:
    """Returns a row of a prompt's first tokens."""
    return ScheduledRow(Request(GenerationSpec("r", (1, 2, 3)), arrival, 100), num_tokens)


@pytest.mark.parametrize(
    ("num_rows", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16), (17, 32), (32, 32), (33, 64)]
)
def test_decode_batch_is_padded_to_its_bucket(num_rows: int, bucket: int) -> None:
    """A batch of decode rows gets padding rows behind them up to the next of 1, 2, 4, 8, 16, ..."""
    spec = build_step_spec([make_decode_row(arrival) for arrival in range(num_rows)], LayoutOptions())
    rows = tuple(Segment(arrival, MAIN_LABEL) for arrival in range(num_rows))
    assert spec.segments == rows + (PADDING_ROW,) * (bucket - num_rows)
    assert count_padding_rows(num_rows) == bucket - num_rows


def test_step_with_a_prompt_is_not_padded() -> None:
    """A prompt's part has whatever length it has: no shape is saved by padding."""
    rows = [make_decode_row(1), make_decode_row(2), make_prompt_row(3, 2)]
    assert build_step_spec(rows, LayoutOptions()).segments == (
        Segment(1, MAIN_LABEL),
        Segment(2, MAIN_LABEL),
        Segment(3, MAIN_LABEL, 2),
    )


def test_padding_can_be_turned_off() -> None:
    """With the setting off a step has its requests' rows alone."""
    rows = [make_decode_row(arrival) for arrival in range(3)]
    assert len(build_step_spec(rows, LayoutOptions(pads_decode_batches=False)).segments) == 3


def test_batch_is_steady_until_its_first_row_has_all_its_tokens() -> None:
    """The row with the fewest tokens to go says for how long the batch stays; one more token is one more step."""
    rows = [make_decode_row(1, 5, 20), make_decode_row(2, 6, 10), make_decode_row(3, 1, 50)]
    assert count_steady_steps(rows) == 4
    assert count_steady_steps([make_decode_row(1, 9, 10)]) == 1


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_step_with_a_part_of_a_prompt_is_followed_by_another(num_tokens: int) -> None:
    """A prompt that goes on, or ends, makes the next step a different one."""
    assert count_steady_steps([make_decode_row(1), make_prompt_row(2, num_tokens)]) == 1


def test_equal_rows_make_equal_steps() -> None:
    """A step is the same one as long as requests, labels, spans and padding are."""
    first = build_step_spec([make_decode_row(1, 1), make_decode_row(2, 4), make_decode_row(3)], LayoutOptions())
    later = build_step_spec([make_decode_row(1, 2), make_decode_row(2, 5), make_decode_row(3)], LayoutOptions())
    assert first == later
    assert first != build_step_spec([make_decode_row(1), make_decode_row(2)], LayoutOptions())


def test_only_steps_that_keep_their_tokens_and_fork_nothing_can_be_repeated() -> None:
    """The planner repeats no other layout."""
    segments = (Segment(1, MAIN_LABEL),)
    fork = (ForkRequest(1, MAIN_LABEL, "other"),)
    assert StepSpec(segments).is_repeatable
    assert not StepSpec(segments, commit=False).is_repeatable
    assert not StepSpec(segments, forks_before=fork).is_repeatable
    assert not StepSpec(segments, forks_after=fork).is_repeatable


def make_guided_row(arrival: int, num_contexts: int) -> ScheduledRow:
    """Returns a row of a guided request that decodes."""
    guidance = (GuidanceContext((5, 6), 1.5),) * num_contexts
    request = Request(GenerationSpec("r", (1, 2, 3), guidance=guidance), arrival, 100)
    for stream in request.streams:
        stream.num_computed_tokens = len(stream.prompt_token_ids) - 1
    return ScheduledRow(request, 1, (1,) * num_contexts)


GUIDED_ROWS = [make_decode_row(1), make_guided_row(2, 1), make_guided_row(3, 2)]


def test_each_context_stands_under_its_label() -> None:
    """A request's rows follow one another in batch order; each label is padded to its own bucket."""
    spec = build_step_spec(GUIDED_ROWS, LayoutOptions())
    assert spec.combined_labels == ()
    assert spec.segments == (
        Segment(1, "main"),
        Segment(2, "main"),
        Segment(2, "cfg_text"),
        Segment(3, "main"),
        Segment(3, "cfg_text"),
        Segment(3, "cfg_img"),
        PADDING_ROW,
    )


def test_combined_labels_are_padded_together() -> None:
    """Six rows get two padding rows, at the end of the last label."""
    spec = build_step_spec(GUIDED_ROWS, LayoutOptions(combines_guidance=True))
    assert spec.combined_labels == (CombinedLabel("guided", ("main", "cfg_text", "cfg_img")),)
    assert spec.segments[6:] == (Segment(None, "cfg_img"),) * 2


@pytest.mark.parametrize(("num_contexts", "num_padding_rows"), [((), 1), ((1, 2), 1), ((2, 2, 2), 3)])
def test_padding_rows_are_counted_over_all_labels(num_contexts: tuple[int, ...], num_padding_rows: int) -> None:
    """Three rows of a label are padded by one, in each label that has three."""
    rows = [make_guided_row(arrival, count) for arrival, count in enumerate(num_contexts)]
    rows += [make_decode_row(9 + i) for i in range(3 - len(rows))]
    assert build_step_spec(rows, LayoutOptions()).num_padding_rows == num_padding_rows
    assert build_step_spec(rows, LayoutOptions(pads_decode_batches=False)).num_padding_rows == 0


def test_plain_step_is_the_same_whether_contexts_are_combined_or_not() -> None:
    """Without further contexts there is nothing to combine."""
    rows = [make_decode_row(1), make_decode_row(2)]
    assert build_step_spec(rows, LayoutOptions(combines_guidance=True)) == build_step_spec(rows, LayoutOptions())


def test_forks_come_before_the_step_and_for_it_alone() -> None:
    """A step with forks is not planned ahead."""
    guided = make_guided_row(2, 1).request
    row = ScheduledRow(guided, 1, (2,), (StreamFork(9, "main", "cfg_text", 1),))
    spec = build_step_spec([row], LayoutOptions())
    assert spec.forks_before == (ForkRequest(9, "main", "cfg_text", 2),)
    assert not spec.is_repeatable
    assert count_steady_steps([ScheduledRow(guided, 1, (1,), row.forks)]) == 1
    assert count_steady_steps(GUIDED_ROWS) > 1


def test_stream_without_tokens_has_no_row() -> None:
    """A prompt that waits for its contexts takes no part in the step."""
    request = make_guided_row(2, 1).request
    assert build_step_spec([ScheduledRow(request, 0, (1,))], LayoutOptions()).segments == (Segment(2, "cfg_text"),)
