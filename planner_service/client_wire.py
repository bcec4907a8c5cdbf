"""What the client sends and receives, as plain values: options, cache modes and the errors of layouts."""

from planner_service.client_layout import is_unicode
from planner_service.errors import (
    InvalidLayoutError,
    InvalidOptionsError,
    LayoutError,
    OutOfPagesError,
    RegionUnavailableError,
    RingTimeoutError,
    UnknownStreamError,
)
from planner_service.messages import CacheMode, SessionOptions
from planner_service.wire import NUMBER_BY_CACHE_MODE
from ringplan.planner.v1 import planner_pb2

_CACHE_MODE_BY_NUMBER: dict[int, CacheMode] = {number: mode for mode, number in NUMBER_BY_CACHE_MODE.items()}
_ANY_RING_DEPTH = 2  # stands in for the planner's choice where the other options are checked


def build_open_request(
    *,
    page_size: int,
    num_pages: int,
    max_streams: int,
    ring_depth: int = 0,
    cache_mode: CacheMode | None = None,
    engine_name: str = "",
    set_bytes: int = 0,
) -> planner_pb2.PlanRequest:
    """Returns a session's first request; `ring_depth` 0 and `cache_mode` None leave the choice to the planner.

    Raises:
        InvalidOptionsError: an option is out of range.
    """
    if not is_unicode(engine_name):
        raise InvalidOptionsError("engine_name", "lone surrogates are not allowed")
    SessionOptions(
        page_size=page_size,
        num_pages=num_pages,
        max_streams=max_streams,
        ring_depth=ring_depth or _ANY_RING_DEPTH,
        engine_name=engine_name,
        set_bytes=set_bytes,
    )
    options = planner_pb2.SessionOptions(
        page_size=page_size,
        num_pages=num_pages,
        max_streams=max_streams,
        ring_depth=ring_depth,
        cache_mode=NUMBER_BY_CACHE_MODE[cache_mode] if cache_mode else planner_pb2.CACHE_MODE_UNSPECIFIED,
        engine_name=engine_name,
        set_bytes=set_bytes,
    )
    return planner_pb2.PlanRequest(open=options)


def read_cache_mode(number: int) -> CacheMode:
    """Returns the cache mode that the planner names.

    Raises:
        ValueError: it names none.
    """
    if number not in _CACHE_MODE_BY_NUMBER:
        raise ValueError(f"the planner names cache mode {number}, which is none")
    return _CACHE_MODE_BY_NUMBER[number]


def read_plan_error(error: planner_pb2.PlanError, max_streams: int) -> LayoutError:
    """Returns the planner's error for the engine to catch, with the planner's own words.

    Args:
        error: what came over the wire.
        max_streams: the session's.
    """
    stream = error.stream if error.HasField("stream") else None
    layout_error = _build_layout_error(error, stream, max_streams)
    layout_error.args = (error.message,)
    layout_error.stream = stream
    layout_error.step_id = error.step_id
    layout_error.num_steps = error.num_steps
    return layout_error


def _build_layout_error(error: planner_pb2.PlanError, stream: int | None, max_streams: int) -> LayoutError:
    if error.reason == planner_pb2.PLAN_ERROR_REASON_OUT_OF_PAGES:
        return OutOfPagesError(error.pages_short, None)
    if error.reason == planner_pb2.PLAN_ERROR_REASON_UNKNOWN_STREAM and stream is not None:
        return UnknownStreamError(stream, max_streams)
    if error.reason == planner_pb2.PLAN_ERROR_REASON_RING_TIMEOUT:
        return RingTimeoutError(error.oldest_lease_step_id, error.oldest_lease_age_seconds)
    if error.reason == planner_pb2.PLAN_ERROR_REASON_REGION_UNAVAILABLE:
        return RegionUnavailableError(0, error.message)
    return InvalidLayoutError(error.message, stream)
