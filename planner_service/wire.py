"""Protos to plain values and back; knows protobuf, but no gRPC."""

from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from planner_service.core.layout import Drop, Fork, PlanLabelRows, StepLayout, StreamOperation, Truncate
from planner_service.errors import (
    InvalidLayoutError,
    InvalidOptionsError,
    LayoutError,
    MalformedMessageError,
    OutOfPagesError,
    RegionUnavailableError,
    RingTimeoutError,
    UnknownStreamError,
)
from planner_service.messages import (
    CacheMode,
    MissCounts,
    MissReason,
    PlanFailed,
    PlanReady,
    PlanSource,
    RegionDescription,
    SessionDump,
    SessionMessage,
    SessionOptions,
    SessionReply,
    SessionSummary,
)
from ringplan.planner.v1 import planner_pb2 as pb

MessageT = TypeVar("MessageT", bound=Message)

REASON_BY_LAYOUT_ERROR: dict[type[LayoutError], pb.PlanErrorReason.ValueType] = {
    OutOfPagesError: pb.PLAN_ERROR_REASON_OUT_OF_PAGES,
    InvalidLayoutError: pb.PLAN_ERROR_REASON_INVALID_LAYOUT,
    UnknownStreamError: pb.PLAN_ERROR_REASON_UNKNOWN_STREAM,
    RingTimeoutError: pb.PLAN_ERROR_REASON_RING_TIMEOUT,
    RegionUnavailableError: pb.PLAN_ERROR_REASON_REGION_UNAVAILABLE,
}
_CACHE_MODE_BY_NUMBER: dict[int, CacheMode] = {
    pb.CACHE_MODE_OFF: CacheMode.OFF,
    pb.CACHE_MODE_ON: CacheMode.ON,
    pb.CACHE_MODE_VERIFY: CacheMode.VERIFY,
}
NUMBER_BY_CACHE_MODE = {
    CacheMode.OFF: pb.CACHE_MODE_OFF,
    CacheMode.ON: pb.CACHE_MODE_ON,
    CacheMode.VERIFY: pb.CACHE_MODE_VERIFY,
}
NUMBER_BY_MISS_REASON = {reason: pb.CacheMissReason.Value(f"CACHE_MISS_REASON_{reason.name}") for reason in MissReason}
_NUMBER_BY_SOURCE = {
    PlanSource.FULL: pb.PLAN_SOURCE_FULL,
    PlanSource.CACHED: pb.PLAN_SOURCE_CACHED,
    PlanSource.VERIFIED: pb.PLAN_SOURCE_VERIFIED,
}


def parse(message_type: Callable[[], MessageT], data: bytes) -> MessageT:
    """Reads a message.

    Raises:
        MalformedMessageError: the bytes are no such message, or a string in it is not UTF-8.
    """
    message = message_type()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise MalformedMessageError(f"the bytes are no {message.DESCRIPTOR.full_name}: {error}") from error
    return message


def read_options(options: pb.SessionOptions, default_depth: int, default_mode: CacheMode) -> SessionOptions:
    """Reads what a session is to be.

    Args:
        options: as the engine sent them.
        default_depth: the ring depth if it sent none.
        default_mode: the cache mode if it sent none.

    Raises:
        InvalidOptionsError: an option is out of range.
    """
    if options.cache_mode == pb.CACHE_MODE_UNSPECIFIED:
        cache_mode = default_mode
    elif options.cache_mode in _CACHE_MODE_BY_NUMBER:
        cache_mode = _CACHE_MODE_BY_NUMBER[options.cache_mode]
    else:
        raise InvalidOptionsError("cache_mode", f"{options.cache_mode} is no cache mode")
    return SessionOptions(
        page_size=options.page_size,
        num_pages=options.num_pages,
        max_streams=options.max_streams,
        ring_depth=options.ring_depth or default_depth,
        cache_mode=cache_mode,
        engine_name=options.engine_name,
        set_bytes=options.set_bytes,
    )


def read_message(request: pb.PlanRequest) -> SessionMessage:
    """Reads a request that follows the first.

    Raises:
        MalformedMessageError: it opens a session again, or a stream operation in it is none.
    """
    if request.HasField("open"):
        raise MalformedMessageError("only the first request may open a session")
    return SessionMessage(
        released_through=request.released_through,
        committed_through=request.committed_through,
        discard_from=request.discard_from,
        region_mapped=request.region_mapped,
        operations=tuple([_read_operation(operation) for operation in request.operations]),
        layouts=tuple([_read_layout(layout) for layout in request.layouts]),
    )


def _read_operation(operation: pb.StreamOperation) -> StreamOperation:
    kind = operation.WhichOneof("operation")
    if kind == "truncate":
        return Truncate(operation.truncate.stream, operation.truncate.length)
    if kind == "drop":
        return Drop(operation.drop.streams)
    raise MalformedMessageError("a stream operation is neither a truncate nor a drop")


def _read_layout(layout: pb.StepLayout) -> StepLayout:
    return StepLayout(
        step_id=layout.step_id,
        plan_labels=tuple([PlanLabelRows(label.name, label.streams, label.spans) for label in layout.plan_labels]),
        commit=layout.commit,
        repeat=layout.repeat or 1,
        forks_before=tuple([Fork(fork.source, fork.target) for fork in layout.forks_before]),
        forks_after=tuple([Fork(fork.source, fork.target) for fork in layout.forks_after]),
        page_order=layout.page_order,
    )


def build_response(reply: SessionReply) -> pb.PlanResponse:
    """Returns what tells the engine of a reply."""
    response = pb.PlanResponse(regions=[_build_region(region) for region in reply.regions])
    for result in reply.results:
        if isinstance(result, PlanReady):
            _add_plan(response, result)
        else:
            response.errors.append(_build_error(result))
    return response


def _build_region(region: RegionDescription) -> pb.Region:
    return pb.Region(
        region_id=region.region_id,
        path=region.path,
        num_bytes=region.num_bytes,
        set_bytes=region.set_bytes,
        set_offsets=region.set_offsets,
    )


def _add_plan(response: pb.PlanResponse, plan: PlanReady) -> None:
    # Added in place: a message that is made by itself and then put into another is copied, which costs as much again.
    message = response.plans.add(
        step_id=plan.step_id,
        region_id=plan.region_id,
        set_index=plan.set_index,
        num_bytes=plan.num_bytes,
        source=_NUMBER_BY_SOURCE[plan.source],
        page_copies_before=plan.page_copies_before,
        page_copies_after=plan.page_copies_after,
    )
    for extent in plan.extents:
        message.plan_labels.add(
            name=extent.name,
            num_rows=extent.num_rows,
            num_tokens=extent.num_tokens,
            num_indices=extent.num_indices,
            offsets=extent.offsets,
        )


def _build_error(failed: PlanFailed) -> pb.PlanError:
    error = failed.error
    message = pb.PlanError(
        step_id=failed.step_id,
        num_steps=failed.num_steps,
        reason=REASON_BY_LAYOUT_ERROR[type(error)],
        message=str(error),
        stream=error.stream,
    )
    if isinstance(error, OutOfPagesError):
        message.pages_short = error.num_short
    elif isinstance(error, RingTimeoutError):
        message.oldest_lease_step_id = error.oldest_step_id
        message.oldest_lease_age_seconds = error.oldest_age_seconds
    return message


def build_summary(summary: SessionSummary) -> pb.SessionSummary:
    """Returns a session in figures."""
    return pb.SessionSummary(
        session=summary.name,
        engine_name=summary.options.engine_name,
        age_seconds=summary.age_seconds,
        page_size=summary.options.page_size,
        num_pages=summary.options.num_pages,
        num_free_pages=summary.num_free_pages,
        num_shared_pages=summary.num_shared_pages,
        num_streams=summary.num_streams,
        num_steps_in_flight=summary.num_steps_in_flight,
        ring_depth=summary.options.ring_depth,
        num_leased_sets=summary.num_leased_sets,
        cache_mode=NUMBER_BY_CACHE_MODE[summary.options.cache_mode],
        region_bytes=summary.region_bytes,
        locked_bytes=summary.locked_bytes,
        num_cache_hits=summary.num_cache_hits,
        cache_misses=_build_misses(summary.cache_misses),
        num_cache_mismatches=summary.num_cache_mismatches,
        is_drill_pending=summary.is_drill_pending,
    )


def build_dump(dump: SessionDump) -> pb.DumpSessionResponse:
    """Returns everything a session holds."""
    return pb.DumpSessionResponse(
        summary=build_summary(dump.summary),
        streams=[
            pb.StreamState(
                stream=stream.stream,
                committed_length=stream.committed_length,
                planned_length=stream.planned_length,
                pages=stream.pages,
                num_steps_in_flight=stream.num_steps_in_flight,
            )
            for stream in dump.streams
        ],
        leases=[
            pb.LeaseState(
                step_id=lease.step_id,
                region_id=lease.region_id,
                set_index=lease.set_index,
                age_seconds=lease.age_seconds,
            )
            for lease in dump.leases
        ],
        cache_entries=[
            pb.CacheEntryState(
                plan_labels=entry.plan_labels,
                num_rows=entry.num_rows,
                num_hits=entry.num_hits,
                misses=_build_misses(entry.misses),
            )
            for entry in dump.cache_entries
        ],
    )


def _build_misses(misses: MissCounts) -> list[pb.CacheMissCount]:
    return [pb.CacheMissCount(reason=NUMBER_BY_MISS_REASON[reason], num_misses=count) for reason, count in misses]
