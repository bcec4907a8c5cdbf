"""A layout's rules: what is refused, and what its rows come to."""

import pytest

from planner_service.core.layout import Fork, PlanLabelRows, StepLayout
from planner_service.core.rows import build_rows
from planner_service.errors import InvalidLayoutError, LayoutError, UnknownStreamError
from tests.reference.naive_planner import pack_int32, pack_rows

MAX_STREAMS = 8
ONE_ROW = pack_rows("main", [(0, 1)])


def label_of(*rows: tuple[int, int], name: str = "main") -> PlanLabelRows:
    """Returns a plan label with these (stream, span) rows."""
    return pack_rows(name, rows)


@pytest.mark.parametrize(
    ("layout", "error", "words"),
    [
        (StepLayout(1, ()), InvalidLayoutError, "no plan label"),
        (StepLayout(1, (PlanLabelRows("main", b""),)), InvalidLayoutError, "'main' has no rows"),
        (StepLayout(1, (PlanLabelRows("", pack_int32([0])),)), InvalidLayoutError, "0 characters"),
        (StepLayout(1, (PlanLabelRows("x" * 65, pack_int32([0])),)), InvalidLayoutError, "65 characters"),
        (StepLayout(1, (ONE_ROW, label_of((1, 1)))), InvalidLayoutError, "not all different"),
        (StepLayout(1, (label_of((0, 1), (0, 1)),)), InvalidLayoutError, "stream 0"),
        (StepLayout(1, (ONE_ROW, label_of((0, 1), name="cfg"))), InvalidLayoutError, "stream 0"),
        (StepLayout(1, (label_of((0, -1)),)), InvalidLayoutError, "span -1"),
        (StepLayout(1, (label_of((-1, 0)),)), InvalidLayoutError, "span 0"),
        (StepLayout(1, (label_of((-1, -5)),)), InvalidLayoutError, "span -5"),
        (StepLayout(1, (label_of((8, 1)),)), UnknownStreamError, "stream 8"),
        (StepLayout(1, (label_of((-2, 1)),)), UnknownStreamError, "stream -2"),
        (StepLayout(1, (label_of((2**31 - 1, 1)),)), UnknownStreamError, "stream 2147483647"),
        (StepLayout(1, (PlanLabelRows("main", b"\0\0\0"),)), InvalidLayoutError, "3 bytes"),
        (StepLayout(1, (PlanLabelRows("main", pack_int32([0]), b"\1\0"),)), InvalidLayoutError, "2 bytes"),
        (StepLayout(1, (PlanLabelRows("main", pack_int32([0, 1]), pack_int32([1])),)), InvalidLayoutError, "1 spans"),
        (StepLayout(1, (ONE_ROW,), repeat=0), InvalidLayoutError, "repeat 0"),
        (StepLayout(1, (ONE_ROW,), repeat=1_025), InvalidLayoutError, "repeat 1025"),
        (StepLayout(1, (ONE_ROW,), repeat=2, commit=False), InvalidLayoutError, "repeat 2"),
        (StepLayout(1, (ONE_ROW,), repeat=2, forks_before=(Fork(0, 1),)), InvalidLayoutError, "repeat 2"),
        (StepLayout(1, (ONE_ROW,), repeat=2, forks_after=(Fork(0, 1),)), InvalidLayoutError, "repeat 2"),
        (StepLayout(1, (ONE_ROW,), forks_before=(Fork(8, 1),)), UnknownStreamError, "stream 8"),
        (StepLayout(1, (ONE_ROW,), forks_after=(Fork(1, -1),)), UnknownStreamError, "stream -1"),
        (StepLayout(1, (label_of((0, 2**31 - 1)),)), InvalidLayoutError, "2147483647"),
        (StepLayout(1, (label_of((0, 2**31 - 1), (1, 2**31 - 1), (2, 2)),)), InvalidLayoutError, "4294967296"),
    ],
)
def test_a_layout_that_breaks_a_rule_is_refused_with_the_value(
    layout: StepLayout, error: type[LayoutError], words: str
) -> None:
    """Each rule has its error class, and the message names the value."""
    with pytest.raises(error) as refusal:
        build_rows(layout, MAX_STREAMS)
    assert words in str(refusal.value)


@pytest.mark.parametrize("labels", [(label_of((0, 1), name="x" * 100_000),), (ONE_ROW,) * 20_000])
def test_a_refusal_does_not_send_back_all_that_was_wrong(labels: tuple[PlanLabelRows, ...]) -> None:
    """Megabytes of a broken layout do not come back as megabytes of error message."""
    with pytest.raises(InvalidLayoutError) as refusal:
        build_rows(StepLayout(1, labels), MAX_STREAMS)
    assert len(str(refusal.value)) < 200


def test_the_error_names_the_stream_at_fault() -> None:
    """An engine can tell which of its streams a refusal is about."""
    with pytest.raises(LayoutError) as refusal:
        build_rows(StepLayout(1, (label_of((3, 1), (5, 1), (5, 1)),)), MAX_STREAMS)
    assert refusal.value.stream == 5


def test_rows_of_all_plan_labels_follow_one_another() -> None:
    """Streams, spans and bounds are those of the labels in order; padding rows are told apart."""
    layout = StepLayout(1, (label_of((3, 2), (-1, 5), (0, 0)), label_of((7, 1), name="cfg")))
    rows = build_rows(layout, MAX_STREAMS)
    assert rows.streams.tolist() == [3, -1, 0, 7]
    assert rows.spans.tolist() == [2, 5, 0, 1]
    assert rows.bounds == (0, 3, 4)
    assert rows.num_tokens == (7, 1)
    assert rows.stream_rows is not None
    assert rows.stream_rows.tolist() == [0, 2, 3]
    assert rows.row_streams.tolist() == [3, 0, 7]
    assert rows.row_spans.tolist() == [2, 0, 1]
    assert (rows.is_decode, rows.is_all_ones, rows.max_padding_span) == (False, False, 5)


def test_empty_spans_mean_one_each() -> None:
    """A decode layout needs no spans; padding rows of another span do not make it less of a decode."""
    rows = build_rows(StepLayout(1, (PlanLabelRows("main", pack_int32([4, 2])),)), MAX_STREAMS)
    assert rows.spans.tolist() == [1, 1]
    assert (rows.is_decode, rows.is_all_ones, rows.stream_rows) == (True, True, None)
    rows = build_rows(StepLayout(1, (label_of((4, 1), (-1, 3)),)), MAX_STREAMS)
    assert (rows.is_decode, rows.is_all_ones) == (True, False)


def test_a_layout_of_padding_rows_only_is_allowed() -> None:
    """An engine may run a step in which every row is padding."""
    rows = build_rows(StepLayout(1, (label_of((-1, 1), (-1, 2)),)), MAX_STREAMS)
    assert rows.row_streams.tolist() == []
