"""A step layout as arrays, checked against every rule that does not depend on the session's state."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner_service.core.layout import PADDING, Fork, Int32Array, PlanLabelRows, StepLayout
from planner_service.core.page_tables import IntArray
from planner_service.errors import InvalidLayoutError, UnknownStreamError

MAX_REPEAT = 1_024
MAX_STEP_TOKENS = 1 << 24
MAX_LABEL_CHARACTERS = 64
_INT32 = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class LayoutRows:
    """The rows of a layout, all plan labels one after another.

    Args:
        layout: the layout itself.
        streams: the stream of each row, -1 for padding, intp [num_rows].
        spans: the span of each row, int32 [num_rows].
        bounds: where each plan label's rows start, with the end; num_labels + 1 figures.
        num_tokens: query tokens of each plan label.
        stream_rows: the rows that are no padding, intp, or None if none is padding.
        row_streams: their streams, intp.
        row_spans: their spans, int32.
        page_order: the order in which these are given pages, intp, or None for their own.
        is_decode: whether every stream row has span 1.
        is_all_ones: whether every row, padding included, has span 1.
        max_padding_span: the longest padding row, 0 without one.
    """

    layout: StepLayout
    streams: IntArray
    spans: Int32Array
    bounds: tuple[int, ...]
    num_tokens: tuple[int, ...]
    stream_rows: IntArray | None
    row_streams: IntArray
    row_spans: Int32Array
    page_order: IntArray | None
    is_decode: bool
    is_all_ones: bool
    max_padding_span: int

    def order_pages(self, num_pages: Int32Array) -> tuple[IntArray, Int32Array]:
        """Returns the streams and the pages each needs, in the order in which they are given, intp and int32.

        Args:
            num_pages: pages each row needs, int32 [num_rows].
        """
        num_needed = num_pages if self.stream_rows is None else num_pages[self.stream_rows]
        if self.page_order is None:
            return self.row_streams, num_needed
        return self.row_streams[self.page_order], num_needed[self.page_order]


def build_rows(layout: StepLayout, max_streams: int) -> LayoutRows:
    """Checks a layout and turns it into arrays.

    Args:
        layout: what came over the wire.
        max_streams: the session's streams are numbered 0 to `max_streams - 1`.

    Returns:
        The rows.

    Raises:
        InvalidLayoutError: the layout breaks a rule.
        UnknownStreamError: a stream number is out of range.
    """
    _check_shape(layout)
    _check_forks((*layout.forks_before, *layout.forks_after), max_streams)
    parts = [_unpack_label(label) for label in layout.plan_labels]
    streams = np.concatenate([streams for streams, _ in parts])
    spans = np.concatenate([spans for _, spans in parts])
    is_padding = streams == PADDING
    has_padding = bool(is_padding.any())
    stream_rows = np.flatnonzero(~is_padding) if has_padding else None
    row_streams = streams if stream_rows is None else streams[stream_rows]
    row_spans = spans if stream_rows is None else spans[stream_rows]
    _check_rows(row_streams, row_spans, spans[is_padding], max_streams)
    num_tokens = tuple(int(spans.sum(dtype=np.int64)) for _, spans in parts)
    if sum(num_tokens) > MAX_STEP_TOKENS:
        raise InvalidLayoutError(f"the spans add up to {sum(num_tokens)} tokens; at most {MAX_STEP_TOKENS} are planned")
    bounds = np.cumsum([0, *(len(streams) for streams, _ in parts)]).tolist()
    return LayoutRows(
        layout=layout,
        streams=streams,
        spans=spans,
        bounds=tuple(bounds),
        num_tokens=num_tokens,
        stream_rows=stream_rows,
        row_streams=row_streams,
        row_spans=row_spans,
        page_order=_unpack_order(layout.page_order, is_padding),
        is_decode=bool((row_spans == 1).all()),
        is_all_ones=bool((spans == 1).all()),
        max_padding_span=int(spans[is_padding].max()) if has_padding else 0,
    )


def check_repeat(layout: StepLayout) -> None:
    """Checks how often a layout is to be planned.

    Raises:
        InvalidLayoutError: too often, or more than once though it may not be.
    """
    if not 1 <= layout.repeat <= MAX_REPEAT:
        raise InvalidLayoutError(f"repeat {layout.repeat} is outside 1..{MAX_REPEAT}")
    if layout.repeat > 1 and (not layout.commit or layout.forks_before or layout.forks_after):
        raise InvalidLayoutError(f"repeat {layout.repeat} needs a committing layout without forks")


def _check_shape(layout: StepLayout) -> None:
    if not layout.plan_labels:
        raise InvalidLayoutError("the layout has no plan label; at least one is needed")
    names = [label.name for label in layout.plan_labels]
    for name in names:
        if not 1 <= len(name) <= MAX_LABEL_CHARACTERS:
            # An engine may have sent megabytes: enough of them to recognize the name goes back.
            shown = name[:MAX_LABEL_CHARACTERS]
            raise InvalidLayoutError(
                f"plan label {shown!r} has {len(name)} characters, not 1 to {MAX_LABEL_CHARACTERS}"
            )
    if len(set(names)) != len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise InvalidLayoutError(f"the plan labels are not all different: {twice!r} stands there more than once")
    check_repeat(layout)


def _check_forks(forks: Sequence[Fork], max_streams: int) -> None:
    for fork in forks:
        for stream in (fork.source, fork.target):
            if not 0 <= stream < max_streams:
                raise UnknownStreamError(stream, max_streams)
        if fork.source == fork.target:
            raise InvalidLayoutError(f"stream {fork.source} is forked onto itself", fork.source)


def _unpack_label(label: PlanLabelRows) -> tuple[IntArray, Int32Array]:
    streams = _unpack(label.streams, f"streams of plan label {label.name!r}").astype(np.intp)
    if not len(streams):
        raise InvalidLayoutError(f"plan label {label.name!r} has no rows")
    if not label.spans:
        return streams, np.ones(len(streams), dtype=np.int32)
    spans = _unpack(label.spans, f"spans of plan label {label.name!r}")
    if len(spans) != len(streams):
        raise InvalidLayoutError(f"plan label {label.name!r} has {len(streams)} streams and {len(spans)} spans")
    return streams, spans


def _unpack_order(packed: bytes, is_padding: npt.NDArray[np.bool_]) -> IntArray | None:
    if not packed:
        return None
    order = _unpack(packed, "page_order").astype(np.intp)
    if len(order) != len(is_padding) or not np.array_equal(np.sort(order), np.arange(len(order))):
        raise InvalidLayoutError(f"page_order does not name each of the {len(is_padding)} rows once")
    place_among_streams = np.cumsum(~is_padding) - 1
    return place_among_streams[order[~is_padding[order]]]


def _unpack(packed: bytes, field: str) -> Int32Array:
    if len(packed) % _INT32.itemsize:
        raise InvalidLayoutError(f"{field} has {len(packed)} bytes, not a multiple of 4")
    return np.frombuffer(packed, dtype=_INT32)


def _check_rows(streams: IntArray, spans: Int32Array, padding_spans: npt.NDArray[np.int32], max_streams: int) -> None:
    is_unknown = (streams < 0) | (streams >= max_streams)
    if is_unknown.any():
        raise UnknownStreamError(int(streams[is_unknown][0]), max_streams)
    if (spans < 0).any():
        row = int(np.flatnonzero(spans < 0)[0])
        raise InvalidLayoutError(f"span {spans[row]} of stream {streams[row]} is negative", int(streams[row]))
    if (padding_spans < 1).any():
        raise InvalidLayoutError(f"span {padding_spans.min()} of a padding row is below 1")
    ordered = np.sort(streams)
    is_twice = ordered[1:] == ordered[:-1]
    if is_twice.any():
        stream = int(ordered[1:][is_twice][0])
        raise InvalidLayoutError(f"stream {stream} stands in more than one row", stream)
