"""Protos to plain values and back."""

import pytest
from google.protobuf.message import Message

from planner_service import errors
from planner_service.core.arrays import ArraysExtent
from planner_service.core.layout import Drop, Fork, PlanLabelRows, StepLayout, Truncate
from planner_service.core.ring import RegionDescription
from planner_service.messages import (
    CacheEntryDescription,
    CacheMode,
    LeaseDescription,
    MissReason,
    PlanFailed,
    PlanReady,
    PlanSource,
    SessionDump,
    SessionMessage,
    SessionOptions,
    SessionReply,
    SessionSummary,
    StreamDescription,
)
from planner_service.wire import (
    NUMBER_BY_MISS_REASON,
    REASON_BY_LAYOUT_ERROR,
    build_dump,
    build_response,
    build_summary,
    parse,
    read_message,
    read_options,
)
from ringplan.planner.v1 import planner_pb2 as pb

OPTIONS = SessionOptions(16, 100, 8, ring_depth=3, cache_mode=CacheMode.VERIFY, engine_name="e")
SUMMARY = SessionSummary(
    *("session-7", OPTIONS, 1.5, 90, 2, 4, 3, 1, 4096, 2048, 12, 5, ((MissReason.COLD, 1), (MissReason.FORK, 2))),
    is_drill_pending=True,
)


def _find_unset_fields(message: Message) -> list[str]:
    """Returns the fields of a message, and of those in it, that hold nothing."""
    present = {field.name for field, _ in message.ListFields()}
    unset = [field.full_name for field in message.DESCRIPTOR.fields if field.name not in present]
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            parts = list(value) if field.is_repeated else [value]
            unset += [name for part in parts for name in _find_unset_fields(part)]
    return unset


def test_bytes_that_are_no_message_are_malformed() -> None:
    """A request that protobuf cannot read is named as such."""
    with pytest.raises(errors.MalformedMessageError, match=r"ringplan\.planner\.v1\.PlanRequest"):
        parse(pb.PlanRequest, b"\xff\xff\xff")


def test_a_name_that_is_not_utf8_is_malformed() -> None:
    """Text on the wire is UTF-8; a plan label's name in Latin-1 is refused."""
    data = pb.PlanRequest(layouts=[pb.StepLayout(plan_labels=[pb.PlanLabel(name="me")])]).SerializeToString()
    with pytest.raises(errors.MalformedMessageError):
        parse(pb.PlanRequest, data.replace(b"me", b"m\xe9"))


def test_options_are_read_as_sent() -> None:
    """What the engine chose wins over the planner's defaults."""
    proto = pb.SessionOptions(
        page_size=16,
        num_pages=100,
        max_streams=8,
        ring_depth=3,
        cache_mode=pb.CACHE_MODE_VERIFY,
        engine_name="e",
        set_bytes=640,
    )
    expected = SessionOptions(16, 100, 8, 3, CacheMode.VERIFY, "e", 640)
    assert read_options(proto, default_depth=5, default_mode=CacheMode.ON) == expected


def test_options_left_out_are_the_planners() -> None:
    """Ring depth and cache mode come from the planner's settings if the engine does not choose."""
    proto = pb.SessionOptions(page_size=16, num_pages=100, max_streams=8)
    options = read_options(proto, default_depth=5, default_mode=CacheMode.ON)
    assert (options.ring_depth, options.cache_mode) == (5, CacheMode.ON)


@pytest.mark.parametrize(
    ("wire", "mode"),
    [
        (pb.CACHE_MODE_OFF, CacheMode.OFF),
        (pb.CACHE_MODE_ON, CacheMode.ON),
        (pb.CACHE_MODE_VERIFY, CacheMode.VERIFY),
    ],
)
def test_cache_modes_keep_their_meaning(wire: pb.CacheMode.ValueType, mode: CacheMode) -> None:
    """Each mode has one number on the wire, in both directions."""
    proto = pb.SessionOptions(page_size=16, num_pages=100, max_streams=8, cache_mode=wire)
    options = read_options(proto, default_depth=2, default_mode=CacheMode.OFF)
    assert options.cache_mode is mode
    assert build_summary(SessionSummary("s", options, 0.0, 0, 0, 0, 0, 0, 0, 0)).cache_mode == wire


def test_an_unknown_cache_mode_is_an_invalid_option() -> None:
    """A number that the contract does not have is refused, with the field and the value."""
    proto = parse(pb.SessionOptions, b"\x08\x10\x10\x64\x18\x08\x28\x09")
    assert proto.cache_mode == 9
    with pytest.raises(errors.InvalidOptionsError, match="cache_mode: 9"):
        read_options(proto, default_depth=2, default_mode=CacheMode.OFF)


@pytest.mark.parametrize("field", ["page_size", "num_pages", "max_streams"])
def test_an_option_left_out_that_has_no_default_is_invalid(field: str) -> None:
    """Sizes have no default; 0 is refused by name."""
    proto = pb.SessionOptions(page_size=16, num_pages=100, max_streams=8)
    proto.ClearField(field)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidOptionsError, match=field):
        read_options(proto, default_depth=2, default_mode=CacheMode.OFF)


def test_a_message_is_read_part_by_part() -> None:
    """Every field of a request arrives in its place."""
    proto = pb.PlanRequest(
        released_through=1,
        committed_through=2,
        discard_from=9,
        region_mapped=4,
        operations=[
            pb.StreamOperation(truncate=pb.TruncateStream(stream=5, length=6)),
            pb.StreamOperation(drop=pb.DropStreams(streams=b"\1\0\0\0")),
        ],
        layouts=[
            pb.StepLayout(
                step_id=7,
                commit=True,
                repeat=8,
                forks_before=[pb.Fork(source=1, target=2)],
                forks_after=[pb.Fork(source=3, target=4)],
                plan_labels=[pb.PlanLabel(name="main", streams=b"\2\0\0\0", spans=b"\3\0\0\0")],
                page_order=b"\4\0\0\0",
            )
        ],
    )
    assert _find_unset_fields(proto.layouts[0]) == []
    layout = StepLayout(
        step_id=7,
        plan_labels=(PlanLabelRows("main", b"\2\0\0\0", b"\3\0\0\0"),),
        commit=True,
        repeat=8,
        forks_before=(Fork(1, 2),),
        forks_after=(Fork(3, 4),),
        page_order=b"\4\0\0\0",
    )
    assert read_message(proto) == SessionMessage(1, 2, 9, 4, (Truncate(5, 6), Drop(b"\1\0\0\0")), (layout,))


def test_a_repeat_of_zero_is_one_step() -> None:
    """The wire's default stands for a single step; commit is off unless set."""
    (layout,) = read_message(pb.PlanRequest(layouts=[pb.StepLayout(step_id=1)])).layouts
    assert (layout.repeat, layout.commit) == (1, False)


def test_opening_twice_is_malformed() -> None:
    """A session is opened by its first request alone, also if the second one says the same."""
    with pytest.raises(errors.MalformedMessageError, match="first"):
        read_message(pb.PlanRequest(open=pb.SessionOptions()))


def test_an_operation_of_no_kind_is_malformed() -> None:
    """A newer engine's operation is refused, not ignored."""
    with pytest.raises(errors.MalformedMessageError, match="neither"):
        read_message(pb.PlanRequest(operations=[pb.StreamOperation()]))


def test_a_reply_tells_regions_plans_and_errors_whole() -> None:
    """No field of the response is forgotten."""
    extent = ArraysExtent("main", 2, 3, 4, (0, 64, 448, 128, 192, 256, 320))
    reply = SessionReply(
        regions=(RegionDescription(2, "/dev/shm/r", 2048, 1024, (0, 1024)),),
        results=(
            PlanReady(11, 2, 1, 512, PlanSource.CACHED, (extent,), b"\1\0\0\0\2\0\0\0", b"\3\0\0\0\4\0\0\0"),
            PlanFailed(12, 3, errors.OutOfPagesError(5, 6)),
        ),
    )
    expected = pb.PlanResponse(
        regions=[pb.Region(region_id=2, path="/dev/shm/r", num_bytes=2048, set_bytes=1024, set_offsets=[0, 1024])],
        plans=[
            pb.Plan(
                step_id=11,
                region_id=2,
                set_index=1,
                num_bytes=512,
                source=pb.PLAN_SOURCE_CACHED,
                plan_labels=[
                    pb.PlanArrays(
                        name="main",
                        num_rows=2,
                        num_tokens=3,
                        num_indices=4,
                        offsets=[0, 64, 448, 128, 192, 256, 320],
                    )
                ],
                page_copies_before=b"\1\0\0\0\2\0\0\0",
                page_copies_after=b"\3\0\0\0\4\0\0\0",
            )
        ],
        errors=[
            pb.PlanError(
                step_id=12,
                num_steps=3,
                reason=pb.PLAN_ERROR_REASON_OUT_OF_PAGES,
                message="the step needs 11 pages and 6 are free",
                pages_short=5,
            )
        ],
    )
    assert build_response(reply) == expected
    assert _find_unset_fields(expected.plans[0]) == []


def test_an_errors_figures_reach_the_engine() -> None:
    """The stream at fault and the oldest lease are sent where an error has them."""
    failures = (
        errors.UnknownStreamError(9, 8),
        errors.InvalidLayoutError("stream 3 stands in two rows", stream=3),
        errors.InvalidLayoutError("no plan labels"),
        errors.RingTimeoutError(4, 2.5),
        errors.RegionUnavailableError(4096, "/dev/shm: No space left on device"),
    )
    reply = SessionReply(results=tuple(PlanFailed(1 + i, 1, error) for i, error in enumerate(failures)))
    sent = build_response(reply).errors
    assert [error.reason for error in sent] == [
        pb.PLAN_ERROR_REASON_UNKNOWN_STREAM,
        pb.PLAN_ERROR_REASON_INVALID_LAYOUT,
        pb.PLAN_ERROR_REASON_INVALID_LAYOUT,
        pb.PLAN_ERROR_REASON_RING_TIMEOUT,
        pb.PLAN_ERROR_REASON_REGION_UNAVAILABLE,
    ]
    assert [error.stream if error.HasField("stream") else None for error in sent] == [9, 3, None, None, None]
    assert (sent[3].oldest_lease_step_id, sent[3].oldest_lease_age_seconds) == (4, 2.5)
    assert [error.message for error in sent] == [str(error) for error in failures]


def test_every_layout_error_has_a_reason_of_its_own() -> None:
    """A new kind of layout error cannot be forgotten on the wire, nor a reason be left without an error."""
    kinds = set(errors.LayoutError.__subclasses__())
    assert set(REASON_BY_LAYOUT_ERROR) == kinds
    assert set(REASON_BY_LAYOUT_ERROR.values()) == set(pb.PlanErrorReason.values()) - {0}


def test_every_plan_source_has_a_number_of_its_own() -> None:
    """Full, cached and verified plans are told apart by the engine."""
    plans = [PlanReady(1, 1, 0, 0, source, ()) for source in PlanSource]
    sources = [plan.source for plan in build_response(SessionReply(results=tuple(plans))).plans]
    assert [pb.PlanSource.Name(source) for source in sources] == [
        "PLAN_SOURCE_FULL",
        "PLAN_SOURCE_CACHED",
        "PLAN_SOURCE_VERIFIED",
    ]


def test_a_dump_tells_everything() -> None:
    """No field of a dump is forgotten."""
    dump = SessionDump(
        SUMMARY,
        (StreamDescription(3, 17, 18, (4, 2), 1),),
        (LeaseDescription(5, 1, 2, 0.25),),
        (CacheEntryDescription(("main", "cfg_text"), 6, 7, ((MissReason.DISCARDED, 9),)),),
    )
    sent = build_dump(dump)
    assert _find_unset_fields(sent) == []
    assert sent == pb.DumpSessionResponse(
        summary=pb.SessionSummary(
            session="session-7",
            engine_name="e",
            age_seconds=1.5,
            page_size=16,
            num_pages=100,
            num_free_pages=90,
            num_shared_pages=2,
            num_streams=4,
            num_steps_in_flight=3,
            ring_depth=3,
            num_leased_sets=1,
            cache_mode=pb.CACHE_MODE_VERIFY,
            region_bytes=4096,
            locked_bytes=2048,
            num_cache_hits=12,
            cache_misses=[
                pb.CacheMissCount(reason=pb.CACHE_MISS_REASON_COLD, num_misses=1),
                pb.CacheMissCount(reason=pb.CACHE_MISS_REASON_FORK, num_misses=2),
            ],
            num_cache_mismatches=5,
            is_drill_pending=True,
        ),
        streams=[pb.StreamState(stream=3, committed_length=17, planned_length=18, pages=[4, 2], num_steps_in_flight=1)],
        leases=[pb.LeaseState(step_id=5, region_id=1, set_index=2, age_seconds=0.25)],
        cache_entries=[
            pb.CacheEntryState(
                plan_labels=["main", "cfg_text"],
                num_rows=6,
                num_hits=7,
                misses=[pb.CacheMissCount(reason=pb.CACHE_MISS_REASON_DISCARDED, num_misses=9)],
            )
        ],
    )


def test_every_reason_of_a_miss_has_its_number() -> None:
    """The wire knows every reason that the cache has, and no other."""
    numbers = {pb.CacheMissReason.Name(number) for number in NUMBER_BY_MISS_REASON.values()}
    assert numbers == set(pb.CacheMissReason.keys()) - {"CACHE_MISS_REASON_UNSPECIFIED"}
    assert list(NUMBER_BY_MISS_REASON) == list(MissReason)
