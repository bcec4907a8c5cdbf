"""Layouts: segments are grouped into plan labels and packed; what breaks a rule never leaves the engine."""

import struct
from collections.abc import Sequence

import pytest

from planner_service.client_layout import CombinedLabel, ForkRequest, Layout, Segment, build_layout
from planner_service.client_numbers import StreamNumbers
from planner_service.errors import InvalidLayoutError

A, B = "a", "b"


def _build(segments: Sequence[Segment | tuple[object, ...]], **options: object) -> Layout:
    rows = [Segment(*segment) for segment in segments]
    return build_layout(StreamNumbers(16), rows, **options)  # type: ignore[arg-type]  # Some pass what is not allowed.


def _unpack(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 4}i", packed))


def _describe(layout: Layout) -> list[tuple[str, list[tuple[object, str] | None]]]:
    return [(label.name, list(label.rows)) for label in layout.labels]


def test_labels_stand_as_they_first_appear_with_rows_in_batch_order() -> None:
    """Without combination every label is a plan label of its own, in the order of first appearance."""
    layout = _build([(A, "main"), (A, "cfg"), (None, "main"), (B, "cfg"), (B, "main")])
    assert _describe(layout) == [
        ("main", [(A, "main"), None, (B, "main")]),
        ("cfg", [(A, "cfg"), (B, "cfg")]),
    ]


def test_combined_labels_come_first_and_hold_their_sources_one_after_the_other() -> None:
    """A combined label has all rows of its first source in batch order, padding rows among them, then the next's."""
    segments = [(A, "img"), (A, "main"), (None, "main"), (A, "cfg"), (B, "main"), (B, "cfg")]
    layout = _build(segments, combined_labels=[CombinedLabel("both", ("cfg", "main"))])
    assert _describe(layout) == [
        ("both", [(A, "cfg"), (B, "cfg"), (A, "main"), None, (B, "main")]),
        ("img", [(A, "img")]),
    ]


def test_rows_get_their_pages_in_batch_order_however_they_are_grouped() -> None:
    """The wire says which row comes when in the batch, rows counted over all plan labels, padding rows among them."""
    segments = [(A, "img"), (A, "main"), (None, "main"), (A, "cfg"), (B, "main"), (B, "cfg")]
    layout = _build(segments, combined_labels=[CombinedLabel("both", ("cfg", "main"))])
    # Rows: both = a.cfg, b.cfg, a.main, padding, b.main (0 to 4), img = a.img (5).
    assert _unpack(layout.message.page_order) == [5, 2, 3, 0, 4, 1]


def test_a_batch_in_row_order_sends_no_order() -> None:
    """Where the rows stand in batch order already there is nothing to say."""
    assert _build([(A, "main"), (None, "main"), (B, "main"), (A, "cfg")]).message.page_order == b""
    combined = [CombinedLabel("both", ("main", "cfg"))]
    assert _build([(A, "main"), (B, "main"), (A, "cfg")], combined_labels=combined).message.page_order == b""


def test_a_combined_label_without_rows_is_left_out() -> None:
    """An engine may name its combinations in every step: one that has no rows, or only some of its sources, is fine."""
    combined = [CombinedLabel("guided", ("cfg", "img")), CombinedLabel("rest", ("main", "other"))]
    assert _describe(_build([(A, "main")], combined_labels=combined)) == [("rest", [(A, "main")])]


def test_a_combined_label_may_have_the_name_of_one_of_its_sources() -> None:
    """Names are unique among plan labels; a source that is combined is none."""
    layout = _build([(A, "main"), (A, "cfg")], combined_labels=[CombinedLabel("main", ("main", "cfg"))])
    assert _describe(layout) == [("main", [(A, "main"), (A, "cfg")])]


def test_streams_are_packed_as_little_endian_int32_with_minus_1_for_padding() -> None:
    """The wire has stream numbers in row order; spans are left out where all are 1."""
    layout = _build([(A, "main"), (None, "main"), (B, "main")])
    assert _unpack(layout.message.plan_labels[0].streams) == [0, -1, 1]
    assert layout.message.plan_labels[0].spans == b""


def test_spans_are_packed_where_one_is_not_1() -> None:
    """A span of 0 reads only; every row's span is sent as soon as one differs from 1."""
    layout = _build([(A, "main", 0), (None, "main", 3), (B, "main", 70_000)])
    assert _unpack(layout.message.plan_labels[0].spans) == [0, 3, 70_000]
    assert layout.num_tokens == 70_003


def test_forks_name_streams_of_their_request_or_of_another() -> None:
    """A fork stays within its request unless a target request is given; streams it names first get numbers."""
    forks = [ForkRequest(A, "main", "cfg"), ForkRequest(A, "main", "main", B)]
    layout = _build([(A, "main")], forks_before=forks[:1], forks_after=forks[1:])
    assert [(fork.source, fork.target) for fork in layout.message.forks_before] == [(0, 1)]
    assert [(fork.source, fork.target) for fork in layout.message.forks_after] == [(0, 2)]
    assert layout.has_forks
    assert not _build([(A, "main")]).has_forks


@pytest.mark.parametrize(
    ("segments", "rule"),
    [
        ([], "needs at least one segment"),
        ([(A, "")], "1 to 64 characters"),
        ([(A, "x" * 65)], "1 to 64 characters"),
        ([(A, "\ud800")], "characters of Unicode"),
        ([(A, "main", -1)], "request 'a' under 'main' has span -1: 0..2147483647"),
        ([(A, "main", 2**31)], "has span 2147483648"),
        ([(A, "main", 1.0)], "has span 1.0"),
        ([(A, "main", True)], "has span True"),
        ([(None, "main", 0)], "a padding row under 'main' has span 0: 1.."),
        ([(A, "main"), (B, "main"), (A, "main")], "request 'a' has two segments under 'main'"),
    ],
)
def test_bad_segments_are_refused(segments: list[tuple[object, ...]], rule: str) -> None:
    """A segment out of its range is named together with the rule it breaks."""
    with pytest.raises(InvalidLayoutError, match=rule):
        _build(segments)


@pytest.mark.parametrize(
    ("combined", "rule"),
    [
        ([CombinedLabel("x", ("main",)), CombinedLabel("y", ("cfg", "main"))], "label 'main' is combined twice"),
        ([CombinedLabel("x", ("main", "main"))], "label 'main' is combined twice"),
        ([CombinedLabel("x", ("main",)), CombinedLabel("x", ("cfg",))], "two combined labels are named 'x'"),
        ([CombinedLabel("cfg", ("main",))], "label 'cfg' has rows of its own and names a combined label too"),
        ([CombinedLabel("", ("main",))], "1 to 64 characters"),
    ],
)
def test_bad_combinations_are_refused(combined: list[CombinedLabel], rule: str) -> None:
    """A label is covered by one plan label, and plan labels have names of their own."""
    with pytest.raises(InvalidLayoutError, match=rule):
        _build([(A, "main"), (A, "cfg")], combined_labels=combined)


@pytest.mark.parametrize(
    ("fork", "rule"),
    [
        (ForkRequest(A, "main", "main"), "forks 'main' onto itself"),
        (ForkRequest(A, "main", "main", A), "forks 'main' onto itself"),
        (ForkRequest(None, "main", "cfg"), "names its request"),
        (ForkRequest(A, "main", ""), "1 to 64 characters"),
    ],
)
@pytest.mark.parametrize("when", ["forks_before", "forks_after"])
def test_bad_forks_are_refused(fork: ForkRequest, rule: str, when: str) -> None:
    """A fork names two streams that differ."""
    with pytest.raises(InvalidLayoutError, match=rule):
        _build([(A, "main")], **{when: [fork]})


def test_a_refused_layout_gives_out_no_numbers() -> None:
    """Whatever rule is broken, no stream has come to be."""
    numbers = StreamNumbers(4)
    for combined in ([CombinedLabel("cfg", ("main",))], [CombinedLabel("", ("main",))]):
        with pytest.raises(InvalidLayoutError):
            build_layout(numbers, [Segment(A, "main"), Segment(A, "cfg")], combined_labels=combined)
    assert numbers.find((A, "main")) is None


def test_a_layout_is_good_until_one_of_its_requests_is_dropped() -> None:
    """A drop elsewhere does no harm; after a drop in it the numbers may mean others, so the layout is refused."""
    numbers = StreamNumbers(4)
    numbers.assign([("other", "main")])
    layout = build_layout(numbers, [Segment(A, "main")])
    numbers.drop("other")
    layout.check_streams(numbers)
    numbers.drop(A)
    with pytest.raises(InvalidLayoutError, match="request 'a' has been dropped"):
        layout.check_streams(numbers)
    numbers.assign([("new", "main"), (A, "main")])
    with pytest.raises(InvalidLayoutError, match="request 'a' has been dropped"):
        layout.check_streams(numbers)


def test_a_layout_belongs_to_its_session() -> None:
    """Another session's numbers mean other streams."""
    layout = build_layout(StreamNumbers(4), [Segment(A, "main")])
    with pytest.raises(InvalidLayoutError, match="built by another session"):
        layout.check_streams(StreamNumbers(4))
