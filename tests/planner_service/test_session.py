"""A session's protocol: order, waiting, time-outs, discards, regions, and what is refused."""

import struct
from dataclasses import replace

import pytest

from planner_service.core.layout import Drop, Fork, PlanLabelRows, StepLayout, Truncate
from planner_service.errors import (
    InvalidLayoutError,
    OutOfPagesError,
    ProtocolError,
    RegionUnavailableError,
    RingTimeoutError,
    UnknownStreamError,
)
from planner_service.messages import PlanFailed, PlanReady, SessionMessage, SessionOptions, SessionReply, WaitKind
from planner_service.session import PLANS_A_PART, Session
from tests.planner_service.mirrored_session import (
    RING_TIMEOUT_SECONDS,
    FakeClock,
    MirroredSession,
    PlainRegion,
    RecordingObserver,
)
from tests.reference.naive_planner import pack_int32, pack_rows

OPTIONS = SessionOptions(page_size=4, num_pages=64, max_streams=8)


def decode(step_id: int, *streams: int, repeat: int = 1) -> StepLayout:
    """Returns a decode layout of one plan label."""
    return StepLayout(step_id, (pack_rows("main", [(stream, 1) for stream in streams]),), repeat=repeat)


def prefill(step_id: int, stream: int, span: int) -> StepLayout:
    """Returns a layout of one row."""
    return StepLayout(step_id, (pack_rows("main", [(stream, span)]),))


def layouts_of(*layouts: StepLayout) -> SessionMessage:
    """Returns a message of layouts only."""
    return SessionMessage(layouts=layouts)


def drop_of(*streams: int) -> Drop:
    """Returns a drop."""
    return Drop(pack_int32(streams))


def step_ids(reply: SessionReply) -> list[int]:
    """Returns the steps a reply answers."""
    return [result.step_id for result in reply.results]


def failure_of(reply: SessionReply) -> PlanFailed:
    """Returns a reply's one result, which is a failure."""
    (result,) = reply.results
    assert isinstance(result, PlanFailed)
    return result


def test_the_first_reply_names_the_first_region() -> None:
    """A session opens with one region that holds as many sets as its ring is deep."""
    observer = RecordingObserver()
    session = Session(
        "s", OPTIONS, PlainRegion, clock=FakeClock(), ring_timeout_seconds=RING_TIMEOUT_SECONDS, observer=observer
    )
    (region,) = session.open().regions
    assert region.region_id == 1
    assert len(region.set_offsets) == OPTIONS.ring_depth
    assert session.deadline is None
    assert not observer.num_grown


def test_plans_come_in_the_order_of_the_steps() -> None:
    """Each step of a message is answered once, in order, as far as sets are free."""
    session = MirroredSession(replace(OPTIONS, ring_depth=8))
    reply = session.send(layouts_of(decode(1, 0, 1), decode(5, 0, repeat=2), decode(9, 2)))
    assert step_ids(reply) == [1, 5, 6, 9]
    assert all(isinstance(result, PlanReady) for result in reply.results)


def test_an_engine_with_nothing_to_run_gets_its_first_plan_by_itself() -> None:
    """In parts, the first plan does not wait for those after it; an engine that has plans gets many at once."""
    session = Session(
        "s",
        replace(OPTIONS, ring_depth=40),
        PlainRegion,
        clock=FakeClock(),
        ring_timeout_seconds=RING_TIMEOUT_SECONDS,
        observer=RecordingObserver(),
    )
    session.open()
    assert step_ids(session.handle(layouts_of(decode(1, 0, repeat=4)), in_parts=True)) == [1]
    assert session.has_more
    assert step_ids(session.go_on()) == [2, 3, 4]
    assert not session.has_more
    # Step 4 is left to run.
    reply = session.handle(SessionMessage(committed_through=3, layouts=(decode(5, 0, repeat=20),)), in_parts=True)
    assert step_ids(reply) == list(range(5, 5 + PLANS_A_PART))
    assert step_ids(session.go_on()) == list(range(5 + PLANS_A_PART, 25))
    # None is left to run: what was ahead is discarded.
    change = SessionMessage(committed_through=4, discard_from=5, layouts=(decode(25, 1, repeat=3),))
    assert step_ids(session.handle(change, in_parts=True)) == [25]
    assert step_ids(session.go_on()) == [26, 27]


def test_a_step_that_waits_is_not_more_to_do() -> None:
    """Going on has nothing to do until a set comes free."""
    session = MirroredSession(OPTIONS)
    session.send(layouts_of(decode(1, 0, repeat=3)))
    assert session.is_waiting
    assert not session.session.has_more


@pytest.mark.parametrize(
    "message",
    [
        layouts_of(decode(3, 0)),
        layouts_of(decode(2, 0)),
        layouts_of(decode(0, 0)),
        layouts_of(decode(1 << 63, 0)),
        layouts_of(decode((1 << 63) - 2, 0, repeat=3)),
        layouts_of(decode(5, 0), decode(5, 0)),
        layouts_of(decode(5, 0, repeat=3), decode(7, 0)),
        SessionMessage(released_through=4),
        SessionMessage(committed_through=4),
        SessionMessage(discard_from=1),
        SessionMessage(committed_through=2, discard_from=2),
        SessionMessage(region_mapped=2),
        SessionMessage(operations=(Truncate(0, 2),)),
        SessionMessage(committed_through=2, operations=(Truncate(0, 3),)),
        SessionMessage(operations=(Truncate(0, -1),)),
        SessionMessage(operations=(Truncate(8, 0),)),
        SessionMessage(operations=(Truncate(-1, 0),)),
        SessionMessage(operations=(Truncate(5, 1),)),
        SessionMessage(operations=(drop_of(8),)),
        SessionMessage(operations=(drop_of(-1),)),
        SessionMessage(operations=(Drop(b"\0\0\0"),)),
    ],
    ids=repr,
)
def test_a_broken_protocol_is_an_error(message: SessionMessage) -> None:
    """Step ids that do not rise, ends of steps that were never answered, and impossible cuts end the session."""
    session = MirroredSession(replace(OPTIONS, ring_depth=4))
    session.send(layouts_of(decode(1, 0, repeat=3)))
    session.send(SessionMessage(committed_through=1))
    with pytest.raises(ProtocolError):
        session.session.handle(message)


def test_the_last_step_id_is_planned_like_any_other() -> None:
    """Ids go up to 2^63 - 1."""
    reply = MirroredSession(OPTIONS).send(layouts_of(decode((1 << 63) - 2, 0, repeat=2)))
    assert step_ids(reply) == [(1 << 63) - 2, (1 << 63) - 1]


@pytest.mark.parametrize("answer", ["released_through", "committed_through"])
def test_a_step_that_waits_has_not_been_answered(answer: str) -> None:
    """A step without a plan yet can be neither released nor committed."""
    session = MirroredSession(OPTIONS)
    session.send(layouts_of(decode(1, 0, repeat=3)))
    with pytest.raises(ProtocolError):
        session.session.handle(SessionMessage(**{answer: 3}))


def test_a_step_waits_until_a_set_is_released() -> None:
    """A ring of two sets gives out two plans; a release brings the third, a commit does not."""
    session = MirroredSession(OPTIONS)
    assert step_ids(session.send(layouts_of(decode(1, 0, repeat=4)))) == [1, 2]
    assert step_ids(session.send(SessionMessage(committed_through=2))) == []
    assert step_ids(session.send(SessionMessage(released_through=1))) == [3]
    assert step_ids(session.send(SessionMessage(released_through=3))) == [4]
    session.check_all_is_free()


def test_what_stands_behind_a_waiting_step_waits_too() -> None:
    """A drop that follows a waiting step does not pull the stream from under it."""
    session = MirroredSession(OPTIONS)
    session.send(layouts_of(decode(1, 0, repeat=3)))
    session.send(SessionMessage(operations=(drop_of(0),), layouts=(decode(4, 0),)))
    reply = session.send(SessionMessage(released_through=2))
    assert step_ids(reply) == [3, 4]
    assert session.in_flight[3].arrays["main"]["kv_lens"] == [3]
    assert session.in_flight[4].arrays["main"]["kv_lens"] == [1]
    session.check_all_is_free()


def test_discarded_steps_that_wait_are_never_answered() -> None:
    """A discard cuts a waiting run short, and later layouts go on from the length before it."""
    session = MirroredSession(OPTIONS)
    session.send(layouts_of(decode(1, 0, repeat=10)))
    reply = session.send(SessionMessage(discard_from=2, layouts=(decode(11, 0, repeat=3),)))
    assert step_ids(reply) == [11]
    assert session.in_flight[11].arrays["main"]["kv_lens"] == [2]
    assert step_ids(session.send(SessionMessage(released_through=11))) == [12, 13]
    session.check_all_is_free()


def test_a_discard_leaves_waiting_steps_before_it() -> None:
    """Only steps from the discarded one on are cut."""
    session = MirroredSession(OPTIONS)
    session.send(layouts_of(decode(1, 0, repeat=6)))
    session.send(SessionMessage(discard_from=4, layouts=(decode(7, 1),)))
    assert step_ids(session.send(SessionMessage(released_through=2))) == [3, 7]


def test_a_discard_ends_the_leases_of_its_steps() -> None:
    """Discarded plans give their sets back without a release."""
    session = MirroredSession(OPTIONS)
    session.send(layouts_of(decode(1, 0, repeat=2)))
    reply = session.send(SessionMessage(discard_from=1, layouts=(decode(3, 0, repeat=2),)))
    assert step_ids(reply) == [3, 4]
    assert session.in_flight[3].arrays["main"]["kv_lens"] == [1]
    assert session.observer.num_discarded == 2


def test_the_ring_timeout_fails_the_waiting_run_and_later_layouts_go_on() -> None:
    """The error names the oldest lease and its age; steps behind it are planned when a set comes free."""
    session = MirroredSession(OPTIONS)
    session.send(layouts_of(decode(1, 0, repeat=5), decode(6, 1)))
    assert session.session.deadline == session.clock.now + RING_TIMEOUT_SECONDS
    session.clock.now += RING_TIMEOUT_SECONDS - 1
    assert session.session.expire() == SessionReply()
    session.clock.now -= RING_TIMEOUT_SECONDS - 1
    failed = failure_of(session.expire())
    assert (failed.step_id, failed.num_steps) == (3, 3)
    assert isinstance(failed.error, RingTimeoutError)
    assert failed.error.oldest_step_id == 1
    assert failed.error.oldest_age_seconds == pytest.approx(RING_TIMEOUT_SECONDS)
    assert step_ids(session.send(SessionMessage(committed_through=2, released_through=2))) == [6]
    assert session.session.deadline is None


def test_a_wait_is_a_stall_only_when_the_engine_has_run_everything() -> None:
    """While plans are ahead a wait is back-pressure; each kind is told with its own seconds."""
    session = MirroredSession(OPTIONS)
    session.send(layouts_of(decode(1, 0, repeat=3)))
    session.clock.now += 2
    session.send(SessionMessage(committed_through=2))
    session.clock.now += 3
    session.send(SessionMessage(released_through=1))
    assert session.observer.waits == [(WaitKind.BACKPRESSURE, 2.0), (WaitKind.STALL, 3.0)]


def test_a_failing_step_fails_the_rest_of_its_run() -> None:
    """One failure counts every step without a plan, and the steps before it stand."""
    session = MirroredSession(SessionOptions(page_size=1, num_pages=4, max_streams=2, ring_depth=8))
    *plans, failed = session.send(layouts_of(decode(1, 0, repeat=9))).results
    assert [plan.step_id for plan in plans] == [1, 2, 3]
    assert isinstance(failed, PlanFailed)
    assert (failed.step_id, failed.num_steps) == (4, 6)
    assert isinstance(failed.error, OutOfPagesError)
    assert failed.error.num_short == 1
    session.send(SessionMessage(committed_through=9, released_through=9))
    session.check_all_is_free()


@pytest.mark.parametrize(
    ("layout", "error"),
    [
        (StepLayout(2, ()), InvalidLayoutError),
        (StepLayout(2, (PlanLabelRows("main", b"\0"),)), InvalidLayoutError),
        (decode(2, 1, 1), InvalidLayoutError),
        (decode(2, 8), UnknownStreamError),
        (replace(decode(2, 1), forks_before=(Fork(0, 9),)), UnknownStreamError),
    ],
)
def test_a_refused_layout_changes_nothing_and_uses_its_id_up(layout: StepLayout, error: type[Exception]) -> None:
    """Layouts around a refused one are planned as if it had not been there."""
    session = MirroredSession(replace(OPTIONS, ring_depth=4))
    reply = session.send(layouts_of(decode(1, 0), layout, decode(3, 0)))
    assert step_ids(reply) == [1, 2, 3]
    failed = reply.results[1]
    assert isinstance(failed, PlanFailed)
    assert isinstance(failed.error, error)
    assert session.in_flight[3].arrays["main"]["kv_lens"] == [2]
    session.check_all_is_free()


def test_every_region_that_a_reply_names_is_announced() -> None:
    """A message whose plans outgrow the ring twice announces both new regions."""
    session = MirroredSession(replace(OPTIONS, ring_depth=4, set_bytes=64))
    reply = session.send(layouts_of(decode(1, 0), prefill(2, 1, 100)))
    assert {result.region_id for result in reply.results if isinstance(result, PlanReady)} == {2, 3}
    assert {region.region_id for region in reply.regions} == {2, 3}
    assert session.observer.num_grown == 2


def test_an_outgrown_region_stays_until_its_last_lease_ends() -> None:
    """A plan in an older region can be read until it is released; then the region is given up."""
    session = MirroredSession(replace(OPTIONS, num_pages=1_024, ring_depth=3, set_bytes=4_096))
    session.send(layouts_of(decode(1, 0), decode(2, 0)))
    session.send(layouts_of(prefill(3, 1, 2_000)))
    session.send(SessionMessage(released_through=1))
    assert not session.regions[1].is_closed
    session.send(SessionMessage(released_through=2))
    assert session.regions[1].is_closed
    assert not session.regions[2].is_closed


def test_a_ring_that_grows_is_never_deeper_than_asked_for() -> None:
    """Leases in an older region count for the depth."""
    session = MirroredSession(replace(OPTIONS, num_pages=1_024, set_bytes=4_096))
    assert step_ids(session.send(layouts_of(decode(1, 0), prefill(2, 1, 2_000), decode(3, 0)))) == [1, 2]
    assert step_ids(session.send(SessionMessage(released_through=1))) == [3]


def test_regions_are_unlinked_when_they_are_mapped() -> None:
    """The file's name stays until the engine says that it has mapped the region."""
    session = MirroredSession(OPTIONS)
    assert not session.regions[1].is_unlinked
    session.send(SessionMessage(region_mapped=1))
    assert session.regions[1].is_unlinked
    assert not session.regions[1].is_closed


def test_no_memory_for_a_larger_region_fails_only_that_step() -> None:
    """A plan that would need a larger region fails where there is none, and changes nothing."""

    def allocate(region_id: int, num_sets: int, set_bytes: int) -> PlainRegion:
        if region_id > 1:
            raise RegionUnavailableError(num_sets * set_bytes, "no space")
        return PlainRegion(region_id, num_sets, set_bytes)

    options = replace(OPTIONS, num_pages=1_024, set_bytes=4_096, ring_depth=4)
    session = Session("s", options, allocate, clock=FakeClock(), ring_timeout_seconds=1.0, observer=RecordingObserver())
    reply = session.handle(layouts_of(decode(1, 0), prefill(2, 0, 2_000), decode(3, 0)))
    first, failed, last = reply.results
    assert isinstance(first, PlanReady)
    assert isinstance(last, PlanReady)
    assert isinstance(failed, PlanFailed)
    assert isinstance(failed.error, RegionUnavailableError)
    (stream,) = session.dump().streams
    assert (stream.planned_length, stream.pages) == (2, (1,))
    session.check_integrity()


def test_dropping_what_does_not_exist_changes_nothing() -> None:
    """A drop or a cut to 0 of a stream that was never used is no error."""
    session = MirroredSession(OPTIONS)
    session.send(SessionMessage(operations=(drop_of(3, 3), Truncate(3, 0)), layouts=(decode(1, 3),)))
    session.check_all_is_free()


def test_a_number_may_be_used_again_in_the_message_that_drops_it() -> None:
    """The new stream is empty and gets other pages while steps of the old one are in flight."""
    session = MirroredSession(replace(OPTIONS, ring_depth=4))
    session.send(layouts_of(prefill(1, 0, 6)))
    session.send(SessionMessage(operations=(drop_of(0),), layouts=(prefill(2, 0, 6),)))
    assert session.in_flight[2].arrays["main"]["paged_kv_indices"] == [3, 4]
    session.check_all_is_free()


def test_plans_do_not_depend_on_the_depth_of_the_ring() -> None:
    """Pages given up behind a waiting step are free when its commit stands in order, not before."""
    results = []
    for depth in (2, 8):
        session = MirroredSession(SessionOptions(page_size=1, num_pages=4, max_streams=4, ring_depth=depth))
        answers = list(session.send(layouts_of(decode(1, 0), decode(2, 1))).results)
        answers += session.send(layouts_of(decode(3, 2))).results
        # Stream 0's page is held by step 1, so stream 3 finds no page.
        answers += session.send(SessionMessage(operations=(drop_of(0),), layouts=(decode(4, 3),))).results
        answers += session.send(SessionMessage(committed_through=1)).results
        answers += session.send(SessionMessage(released_through=2)).results
        results.append([(type(answer), answer.step_id) for answer in answers])
    assert results[0] == results[1]


def test_integrity_holds_while_a_step_waits() -> None:
    """Pages whose step has ended are accounted for, also when their giving back waits behind a step."""
    session = MirroredSession(OPTIONS)
    session.send(layouts_of(decode(1, 0), decode(2, 1)))
    session.send(SessionMessage(operations=(drop_of(0),)))
    session.send(layouts_of(decode(3, 2)))
    session.send(SessionMessage(committed_through=1))  # integrity is checked with every message
    assert session.is_waiting


def test_a_closed_session_gives_all_memory_up() -> None:
    """Closing closes every region and may be done twice."""
    session = MirroredSession(replace(OPTIONS, set_bytes=64))
    session.send(layouts_of(decode(1, 0, repeat=3)))
    session.session.close()
    session.session.close()
    assert all(region.is_closed for region in session.regions.values())
    assert session.session.deadline is None


def test_the_dump_shows_streams_and_leases() -> None:
    """Lengths, pages and ages are those of the design's example."""
    session = MirroredSession(OPTIONS)
    session.send(layouts_of(StepLayout(1, (pack_rows("main", [(0, 5), (1, 8)]),))))
    session.send(SessionMessage(committed_through=1, layouts=(decode(2, 0, 1),)))
    session.clock.now += 1.5
    dump = session.session.dump()
    shown = [(s.stream, s.committed_length, s.planned_length, s.pages) for s in dump.streams]
    assert shown == [(0, 5, 6, (1, 2)), (1, 8, 9, (3, 4, 5))]
    assert [(lease.step_id, lease.age_seconds) for lease in dump.leases] == [(1, 1.5), (2, 1.5)]
    summary = dump.summary
    assert (summary.num_free_pages, summary.num_streams, summary.num_steps_in_flight) == (58, 2, 1)
    assert (summary.num_leased_sets, summary.age_seconds) == (2, 1.5)


def test_page_copies_are_packed_pairs() -> None:
    """A fork of a partly filled page sends the copy, before or after the step as asked."""
    session = MirroredSession(replace(OPTIONS, ring_depth=4))
    session.send(layouts_of(prefill(1, 0, 6)))
    before = replace(decode(2, 1), forks_before=(Fork(0, 1),))
    after = replace(decode(3, 0), forks_after=(Fork(0, 2),))
    first, second = session.send(layouts_of(before, after)).results
    assert isinstance(first, PlanReady)
    assert isinstance(second, PlanReady)
    assert first.page_copies_before == struct.pack("<ii", 2, 3)
    assert (first.page_copies_after, second.page_copies_before) == (b"", b"")
    assert second.page_copies_after == struct.pack("<ii", 2, 4)
    session.check_all_is_free()
