"""A session buffers, numbers and orders what the engine says, and hands out results in step order."""

import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from planner_service.client_errors import PlannerUnavailableError, SessionLostError
from planner_service.client_layout import ForkRequest, Layout, Segment
from planner_service.client_session import PlannerSession
from planner_service.client_wire import build_open_request
from planner_service.errors import InvalidLayoutError, OutOfPagesError
from planner_service.messages import CacheMode
from ringplan.planner.v1 import planner_pb2 as pb
from tests.planner_service.scripted_planner import TIMEOUT_SECONDS, ScriptedPlanner, build_plan


@pytest.fixture
def planner(tmp_path: Path) -> ScriptedPlanner:
    """The planner's side."""
    return ScriptedPlanner(tmp_path)


@pytest.fixture
def session(planner: ScriptedPlanner) -> Iterator[PlannerSession]:
    """An open session; its planner has received the opening and the note that the region is mapped."""
    planner.open()
    session = _open(planner)
    opening, mapped = planner.receive(), planner.receive()
    assert opening is not None
    assert opening.open.num_pages == 64
    assert mapped == pb.PlanRequest(region_mapped=1)
    yield session
    planner.end()
    session.close()


def _open(planner: ScriptedPlanner, timeout_seconds: float = TIMEOUT_SECONDS) -> PlannerSession:
    request = build_open_request(page_size=4, num_pages=64, max_streams=8)
    return PlannerSession(planner.start_call, request, target="unix:/p", open_timeout_seconds=timeout_seconds)


def _build(session: PlannerSession, *requests: str) -> Layout:
    return session.build_layout([Segment(request, "main") for request in requests or ("a",)])


def _take(session: PlannerSession) -> int:
    return session.next_plan(TIMEOUT_SECONDS).step_id


def test_an_open_session_knows_what_the_planner_said(session: PlannerSession) -> None:
    """Name, version, ring depth and cache mode are the planner's."""
    assert (session.name, session.planner_version) == ("session-7", "1.2.3")
    assert (session.ring_depth, session.cache_mode) == (4, CacheMode.ON)


def test_step_ids_rise_by_one_a_step_and_are_never_used_again(
    planner: ScriptedPlanner, session: PlannerSession
) -> None:
    """A run takes as many ids as it has steps; discarded ids stay used."""
    layout = _build(session)
    assert session.submit(layout) == range(1, 2)
    assert session.submit(layout, repeat=3) == range(2, 5)
    session.discard_from(3)
    assert session.submit(layout) == range(5, 6)
    sent = [(request.layouts[0].step_id, request.layouts[0].repeat) for request in _receive(planner, 3)]
    assert sent == [(1, 1), (2, 3), (5, 1)]


def _receive(planner: ScriptedPlanner, count: int) -> list[pb.PlanRequest]:
    return [planner.receive_layouts() for _ in range(count)]


def test_what_is_buffered_goes_out_with_the_next_layout_in_one_message(
    planner: ScriptedPlanner, session: PlannerSession
) -> None:
    """Releases and commits are cumulative, discards cut at the earliest step, operations keep their order."""
    layout = _build(session, "a", "b")
    session.submit(layout, repeat=6)
    planner.receive_layouts()
    planner.answer(plans=[build_plan(step, rows=(("main", 2),)) for step in range(1, 7)])
    assert [_take(session) for _ in range(3)] == [1, 2, 3]
    session.commit(2)
    session.commit(1)
    session.release(1)
    session.release(3)
    session.discard_from(5)
    session.discard_from(4)
    session.truncate("b", "main", 1)
    session.drop("a")
    session.submit(_build(session, "b"))
    request = planner.receive()
    assert request is not None
    assert (request.committed_through, request.released_through, request.discard_from) == (2, 3, 4)
    assert request.operations[0].truncate == pb.TruncateStream(stream=1, length=1)
    assert request.operations[1].drop.streams == (0).to_bytes(4, "little")
    assert [layout.step_id for layout in request.layouts] == [7]


def test_flush_if_due_sends_half_a_ring_of_releases_in_one_message(
    planner: ScriptedPlanner, session: PlannerSession
) -> None:
    """With 4 sets every second step sends one, as long as steps are still to be planned."""
    session.submit(_build(session), repeat=6)
    planner.receive_layouts()
    planner.answer(plans=[build_plan(step_id) for step_id in (1, 2, 3, 4)])
    for step_id in (1, 2, 3, 4):
        assert _take(session) == step_id
        session.commit(step_id)
        session.release(step_id)
        session.flush_if_due()
    assert [planner.receive() for _ in range(2)] == [
        pb.PlanRequest(released_through=2, committed_through=2),
        pb.PlanRequest(released_through=4, committed_through=4),
    ]
    planner.answer(plans=[build_plan(5), build_plan(6)])
    for step_id in (5, 6):
        assert _take(session) == step_id
        session.commit(step_id)
        session.release(step_id)
        session.flush_if_due()
    # No step is left that would need a set: it stays buffered.
    session.submit(_build(session))
    request = planner.receive()
    assert request is not None
    assert (request.released_through, len(request.layouts)) == (6, 1)


def test_flush_sends_what_is_buffered_once(planner: ScriptedPlanner, session: PlannerSession) -> None:
    """A flush with nothing to say sends nothing."""
    session.flush()
    session.build_layout([Segment("a", "main"), Segment("a", "cfg")])
    session.drop("a")
    session.drop("never seen")
    session.flush()
    session.flush()
    session.submit(_build(session, "b"))
    dropped, submitted = planner.receive(), planner.receive()
    assert dropped is not None
    assert dropped.operations[0].drop.streams == b"\0\0\0\0\1\0\0\0"
    assert submitted is not None
    assert submitted.layouts


def test_a_layout_may_be_submitted_again(planner: ScriptedPlanner, session: PlannerSession) -> None:
    """A prepared layout is sent whole every time, with the step ids of that time."""
    layout = _build(session)
    session.submit(layout)
    session.submit(layout)
    first, second = _receive(planner, 2)
    assert first.layouts[0].plan_labels == second.layouts[0].plan_labels
    assert [first.layouts[0].step_id, second.layouts[0].step_id] == [1, 2]


def test_results_come_in_step_order_errors_among_them(planner: ScriptedPlanner, session: PlannerSession) -> None:
    """A step without a plan raises its error in its turn; later steps go on."""
    layout = _build(session)
    for _ in range(3):
        session.submit(layout)
    error = pb.PlanError(
        step_id=2, num_steps=1, reason=pb.PLAN_ERROR_REASON_OUT_OF_PAGES, pages_short=2, message="2 short"
    )
    planner.answer(plans=[build_plan(1), build_plan(3)], errors=[error])
    assert _take(session) == 1
    with pytest.raises(OutOfPagesError, match="2 short") as caught:
        session.next_plan(TIMEOUT_SECONDS)
    assert (caught.value.step_id, caught.value.num_steps, caught.value.num_short) == (2, 1, 2)
    assert _take(session) == 3
    assert session.num_outstanding() == 0


def test_a_failed_run_answers_all_its_steps(planner: ScriptedPlanner, session: PlannerSession) -> None:
    """The one error of a run that ended early stands for all the steps it names."""
    session.submit(_build(session), repeat=4)
    planner.answer(plans=[build_plan(1)])
    planner.answer(errors=[pb.PlanError(step_id=2, num_steps=3, reason=pb.PLAN_ERROR_REASON_OUT_OF_PAGES)])
    assert _take(session) == 1
    assert session.num_outstanding() == 3
    with pytest.raises(OutOfPagesError) as caught:
        session.next_plan(TIMEOUT_SECONDS)
    assert (caught.value.step_id, caught.value.num_steps) == (2, 3)
    assert session.num_outstanding() == 0


def test_discarded_steps_never_come_ready_or_late(planner: ScriptedPlanner, session: PlannerSession) -> None:
    """A discard drops results that are ready and those still on their way, and nothing submitted afterwards."""
    session.submit(_build(session), repeat=4)
    planner.answer(plans=[build_plan(1), build_plan(2)])
    assert _take(session) == 1
    session.discard_from(2)
    assert (session.num_ready(), session.num_outstanding()) == (0, 0)
    session.submit(_build(session))
    planner.answer(plans=[build_plan(3)])
    planner.answer(errors=[pb.PlanError(step_id=4, num_steps=1, reason=pb.PLAN_ERROR_REASON_OUT_OF_PAGES)])
    planner.answer(plans=[build_plan(5)])
    assert _take(session) == 5


def test_an_error_within_which_a_discard_falls_is_cut(planner: ScriptedPlanner, session: PlannerSession) -> None:
    """Of a failed run only the steps that were not discarded are reported."""
    session.submit(_build(session), repeat=5)
    session.discard_from(4)
    session.submit(_build(session))
    planner.answer(errors=[pb.PlanError(step_id=2, num_steps=4, reason=pb.PLAN_ERROR_REASON_OUT_OF_PAGES)])
    planner.answer(plans=[build_plan(6)])
    with pytest.raises(OutOfPagesError) as caught:
        session.next_plan(TIMEOUT_SECONDS)
    assert (caught.value.step_id, caught.value.num_steps) == (2, 2)
    assert _take(session) == 6


def test_a_discard_of_steps_not_submitted_does_nothing(planner: ScriptedPlanner, session: PlannerSession) -> None:
    """There is nothing to cut beyond the last submitted step."""
    session.submit(_build(session))
    session.discard_from(2)
    planner.answer(plans=[build_plan(1)])
    assert _take(session) == 1
    session.flush()
    session.submit(_build(session))
    assert _receive(planner, 2)[1].discard_from == 0


def test_what_the_engine_has_not_got_cannot_be_committed_or_released(
    planner: ScriptedPlanner, session: PlannerSession
) -> None:
    """A step runs after its plan has come; a discarded one does not run, a committed one is not discarded."""
    session.submit(_build(session), repeat=3)
    planner.answer(plans=[build_plan(1), build_plan(2), build_plan(3)])
    for end in (session.commit, session.release):
        with pytest.raises(ValueError, match="step 1 has not come from next_plan"):
            end(1)
    assert [_take(session), _take(session)] == [1, 2]
    session.commit(1)
    with pytest.raises(ValueError, match="steps to 1 are committed"):
        session.discard_from(1)
    session.discard_from(2)
    session.release(2)
    with pytest.raises(ValueError, match="step 2 cannot be committed: it has been discarded"):
        session.commit(2)


def test_the_end_of_a_failed_step_is_that_of_the_plan_before(planner: ScriptedPlanner, session: PlannerSession) -> None:
    """A failed step neither ran nor holds a set, so releasing or committing through it means the last plan before."""
    layout = _build(session)
    session.submit(layout)
    session.submit(layout)
    planner.answer(
        plans=[build_plan(1)],
        errors=[pb.PlanError(step_id=2, num_steps=1, reason=pb.PLAN_ERROR_REASON_OUT_OF_PAGES)],
    )
    _take(session)
    with pytest.raises(OutOfPagesError):
        session.next_plan(TIMEOUT_SECONDS)
    session.commit(2)
    session.release(2)
    session.submit(layout)
    request = _receive(planner, 3)[2]
    assert (request.committed_through, request.released_through) == (1, 1)


def test_bad_layouts_are_refused_before_anything_is_sent(planner: ScriptedPlanner, session: PlannerSession) -> None:
    """A refused layout uses up no step id and sends no message."""
    plain = _build(session)
    reading = session.build_layout([Segment("a", "main")], commit=False)
    forking = session.build_layout([Segment("a", "main")], forks_after=[ForkRequest("a", "main", "cfg")])
    stale = _build(session, "gone")
    session.drop("gone")
    for layout, repeat in ((plain, 0), (plain, 1_025), (reading, 2), (forking, 2), (stale, 1)):
        with pytest.raises(InvalidLayoutError):
            session.submit(layout, repeat=repeat)
    assert session.submit(plain, repeat=1_024) == range(1, 1_025)
    assert planner.receive_layouts().layouts[0].step_id == 1


@pytest.mark.parametrize(("label", "length"), [("main", -1), ("cfg", 1)])
def test_a_stream_is_not_cut_to_more_than_it_has(session: PlannerSession, label: str, length: int) -> None:
    """A negative length, or tokens of a stream that does not exist, is refused here."""
    _build(session)
    with pytest.raises(ValueError, match="cannot be cut"):
        session.truncate("a", label, length)
    session.truncate("a", "cfg", 0)


def test_waiting_for_nothing_is_an_error_and_waiting_too_long_a_timeout(session: PlannerSession) -> None:
    """A plan that nobody submitted would never come; one that is late may still come."""
    with pytest.raises(ValueError, match="no submitted step is left"):
        session.next_plan()
    session.submit(_build(session))
    with pytest.raises(TimeoutError, match="step 1 has no plan after 0 s"):
        session.next_plan(0)
    assert session.num_outstanding() == 1


def test_a_wait_for_a_plan_sends_what_the_planner_may_wait_for(
    planner: ScriptedPlanner, session: PlannerSession
) -> None:
    """A buffered release goes out before the engine waits, so neither side waits for the other; else it stays."""
    session.submit(_build(session), repeat=3)
    planner.receive_layouts()
    planner.answer(plans=[build_plan(1), build_plan(2)])
    _take(session)
    session.release(1)
    while session.num_ready() < 1:
        pass
    _take(session)
    session.release(2)
    with pytest.raises(TimeoutError):
        session.next_plan(0)
    assert planner.receive() == pb.PlanRequest(released_through=2)


def test_a_lost_session_says_so_in_every_call(planner: ScriptedPlanner, session: PlannerSession) -> None:
    """When the stream has ended nothing waits and nothing is sent, not even for plans that had come."""
    layout = _build(session)
    session.submit(layout, repeat=2)
    planner.answer(plans=[build_plan(1)])
    _take(session)
    planner.end()
    with pytest.raises(SessionLostError, match="the planner ended it") as caught:
        session.next_plan(TIMEOUT_SECONDS)
    assert caught.value.status == "OK"
    for call in (session.next_plan, session.flush, lambda: session.submit(layout)):
        with pytest.raises(SessionLostError):
            call()


def test_a_response_that_cannot_be_read_ends_the_session(
    planner: ScriptedPlanner, session: PlannerSession, caplog: pytest.LogCaptureFixture
) -> None:
    """A planner that answers what nobody asked is left, with the reason."""
    session.submit(_build(session))
    planner.answer(plans=[build_plan(2)])
    with pytest.raises(SessionLostError, match="the planner answers step 2, which nobody asked for"):
        session.next_plan(TIMEOUT_SECONDS)
    assert planner.is_cancelled
    assert "cannot be read" in caplog.text


def test_closing_wakes_a_waiting_engine(planner: ScriptedPlanner, session: PlannerSession) -> None:
    """`close` may come from another thread; the waiting one hears of it."""
    session.submit(_build(session))
    closing = threading.Thread(target=session.close)
    threading.Thread(target=_end_when_asked, args=(planner,)).start()
    closing.start()
    with pytest.raises(SessionLostError, match="closed by the engine"):
        session.next_plan(TIMEOUT_SECONDS)
    closing.join()
    session.close()


def _end_when_asked(planner: ScriptedPlanner) -> None:
    while planner.receive() is not None:
        pass
    planner.end()


def test_closing_a_session_whose_planner_is_silent_cancels_the_call(planner: ScriptedPlanner) -> None:
    """A planner that does not end the stream when asked is not waited for."""
    planner.open()
    session = _open(planner)
    session.close()
    assert planner.is_cancelled
    with pytest.raises(SessionLostError, match="closed by the engine"):
        session.flush()


def test_a_session_that_does_not_open_in_time_is_given_up(planner: ScriptedPlanner) -> None:
    """Opening waits no longer than it is told to, and leaves no call behind."""
    with pytest.raises(PlannerUnavailableError, match=r"unix:/p: no session was opened within 0\.01 s"):
        _open(planner, timeout_seconds=0.01)
    assert planner.is_cancelled


def test_a_refused_session_says_why(planner: ScriptedPlanner) -> None:
    """An end in place of an opening is the reason why there is no session."""
    planner.end(grpc.RpcError("no"))
    with pytest.raises(PlannerUnavailableError, match=r"RpcError\('no'\)"):
        _open(planner)


def test_a_region_that_cannot_be_mapped_is_told_at_once(
    planner: ScriptedPlanner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where engine and planner do not share the ring's folder, opening says which file is missing."""
    region = planner.build_region()
    Path(region.path).unlink()
    planner.answer(opened=pb.SessionOpened(session="s", ring_depth=2, cache_mode=pb.CACHE_MODE_OFF), regions=[region])
    with pytest.raises(PlannerUnavailableError, match="region-1: No such file"):
        _open(planner)
    assert "cannot be read" in caplog.text


def test_an_opening_that_makes_no_sense_is_refused(planner: ScriptedPlanner, caplog: pytest.LogCaptureFixture) -> None:
    """A planner that names no cache mode is not one of ours; the call is not left behind."""
    planner.answer(opened=pb.SessionOpened(session="s", ring_depth=2), regions=[planner.build_region()])
    with pytest.raises(PlannerUnavailableError, match="cache mode 0"):
        _open(planner)
    assert planner.is_cancelled
    assert "cannot be read" in caplog.text


def test_a_grown_region_is_mapped_and_told(planner: ScriptedPlanner, session: PlannerSession) -> None:
    """A plan may stand in a region that came with it; the planner hears that it is mapped."""
    session.submit(_build(session))
    planner.receive_layouts()
    planner.answer(regions=[planner.build_region(2)], plans=[build_plan(1, region_id=2)])
    assert session.next_plan(TIMEOUT_SECONDS).region_id == 2
    assert planner.receive() == pb.PlanRequest(region_mapped=2)


def test_a_region_whose_plans_were_all_discarded_may_be_gone(planner: ScriptedPlanner, session: PlannerSession) -> None:
    """The planner gives a region up with its last lease; a plan in it that nobody wants does no harm."""
    session.submit(_build(session))
    session.discard_from(1)
    session.submit(_build(session))
    gone = planner.build_region(2)
    Path(gone.path).unlink()
    planner.answer(regions=[gone], plans=[build_plan(1, region_id=2)])
    planner.answer(regions=[planner.build_region(3)], plans=[build_plan(2, region_id=3)])
    assert session.next_plan(TIMEOUT_SECONDS).region_id == 3
