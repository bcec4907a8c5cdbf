"""What an engine does to streams beside planning steps: it cuts them back and ends them."""

import numpy as np

from planner_service.core.layout import Drop, Int32Array, StreamOperation, Truncate
from planner_service.core.steps import StepsInFlight
from planner_service.core.streams import StreamTable
from planner_service.errors import ProtocolError


def apply_operation(
    operation: StreamOperation, streams: StreamTable, steps: StepsInFlight, page_size: int
) -> list[Int32Array]:
    """Applies a change to streams.

    Args:
        operation: the change.
        streams: the session's streams.
        steps: the steps in flight, which keep the pages they name.
        page_size: tokens a page holds.

    Returns:
        Pages to give back, in order.

    Raises:
        ProtocolError: it names a stream out of range, or a length it cannot be cut to; nothing has changed.
    """
    if isinstance(operation, Truncate):
        return _truncate(operation, streams, steps, page_size)
    return _drop(operation, streams, steps)


def _truncate(operation: Truncate, streams: StreamTable, steps: StepsInFlight, page_size: int) -> list[Int32Array]:
    stream, length = operation.stream, operation.length
    _require_stream(stream, streams)
    committed = int(streams.committed[stream])
    if not 0 <= length <= committed:
        raise ProtocolError(f"stream {stream} cannot be cut to {length} tokens: {committed} are committed")
    if not streams.exists[stream]:
        return []
    pages = streams.cut(stream, length, -(-length // page_size))
    return steps.retire(pages, int(streams.last_step[stream]), int(streams.forked_by[stream]))


def _drop(operation: Drop, streams: StreamTable, steps: StepsInFlight) -> list[Int32Array]:
    if len(operation.streams) % 4:
        raise ProtocolError(f"the streams to drop have {len(operation.streams)} bytes, not a multiple of 4")
    numbers = np.frombuffer(operation.streams, dtype="<i4").tolist()
    for stream in numbers:
        _require_stream(stream, streams)
    ended: list[Int32Array] = []
    for stream in numbers:
        if streams.exists[stream]:
            forked_by = int(streams.forked_by[stream])
            ended += steps.retire(streams.remove(stream), int(streams.last_step[stream]), forked_by)
    return ended


def _require_stream(stream: int, streams: StreamTable) -> None:
    if not 0 <= stream < streams.max_streams:
        raise ProtocolError(f"stream {stream} is outside 0..{streams.max_streams - 1}")
