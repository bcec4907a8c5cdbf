"""The planner over gRPC: what each call answers, how each failure is told, and what a session's end leaves."""

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

import planner_service.errors
from planner_service.errors import PlannerError
from planner_service.region import map_region
from planner_service.rpc import REASON_KEY, STATUS_BY_ERROR
from ringplan.planner.v1 import planner_pb2 as pb
from tests.planner_service.planner_thread import (
    DUMP_SESSION,
    LIST_SESSIONS,
    OPEN,
    PlanCall,
    PlannerThread,
    build_layout,
    open_channel,
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, on a tmpfs."""
    with tempfile.TemporaryDirectory(prefix="ringplan-test-", dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture
def planner(folder: Path) -> Iterator[PlannerThread]:
    """A planner that takes four sessions."""
    planner = PlannerThread(folder)
    yield planner
    planner.stop()


@pytest.fixture
def channel(planner: PlannerThread) -> Iterator[grpc.Channel]:
    """A connection to the planner."""
    with open_channel(planner.socket) as channel:
        yield channel


def _list_sessions(channel: grpc.Channel) -> list[pb.SessionSummary]:
    answer = channel.unary_unary(LIST_SESSIONS)(b"", timeout=30)
    return list(pb.ListSessionsResponse.FromString(answer).sessions)


def _expect_failure(call: PlanCall) -> tuple[grpc.StatusCode, str, str]:
    """Returns the status, reason and message that a call ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call.call)
    return _describe(caught.value)


def _describe(error: grpc.RpcError) -> tuple[grpc.StatusCode, str, str]:
    metadata = dict(error.trailing_metadata() or ())
    return error.code(), str(metadata.get(REASON_KEY)), error.details() or ""


def _wait_until_none_is_open(planner: PlannerThread) -> None:
    """Waits for the planner to have noticed the end of every call, and checks what is left: nothing."""
    planner.run(planner.servicer.wait_until_idle())
    assert planner.call(planner.sessions.summarize) == ()
    assert list(planner.regions.iterdir()) == []
    assert str(planner.regions) not in Path("/proc/self/maps").read_text()
    samples = [sample for family in planner.registry.collect() for sample in family.samples]
    assert [sample.name for sample in samples if "session" in sample.labels] == []


def _find_subclasses(base: type[PlannerError]) -> set[type[PlannerError]]:
    return {base} | {kind for child in base.__subclasses__() for kind in _find_subclasses(child)}


def test_every_error_has_a_status_and_a_reason_of_its_own() -> None:
    """No error that can be raised is left to chance, and no two share a reason."""
    bases = {PlannerError, planner_service.errors.LayoutError, planner_service.errors.SocketError}
    kinds = {kind for kind in _find_subclasses(PlannerError) if kind.__module__ == "planner_service.errors"}
    assert set(STATUS_BY_ERROR) == kinds - bases
    reasons = [reason for _, reason in STATUS_BY_ERROR.values()]
    assert len(set(reasons)) == len(reasons)
    assert grpc.StatusCode.OK not in {code for code, _ in STATUS_BY_ERROR.values()}


def test_opening_a_session_tells_its_name_ring_and_region(channel: grpc.Channel) -> None:
    """The first response says what the engine needs to go on, and the region can be mapped."""
    response = PlanCall(channel).open()
    assert response.opened.session
    assert response.opened.planner_version == "test"
    assert (response.opened.ring_depth, response.opened.cache_mode) == (2, pb.CACHE_MODE_OFF)
    (region,) = response.regions
    assert len(region.set_offsets) == 2
    map_region(region.path, region.num_bytes).close()


def test_a_layout_is_answered_with_a_plan_in_shared_memory(channel: grpc.Channel) -> None:
    """The arrays stand where the response says, with the values of DESIGN section 2."""
    call = PlanCall(channel)
    (region,) = call.open().regions
    mapping = map_region(region.path, region.num_bytes)
    call.send(pb.PlanRequest(region_mapped=region.region_id, layouts=[build_layout(1, [0, 1, -1])]))
    (plan,) = call.receive().plans
    assert (plan.step_id, plan.source) == (1, pb.PLAN_SOURCE_FULL)
    (arrays,) = plan.plan_labels
    assert (arrays.name, arrays.num_rows, arrays.num_tokens, arrays.num_indices) == ("main", 3, 3, 3)
    start = region.set_offsets[plan.set_index]
    counts = (4, 4, 3, 3, 3, 3, 3)
    found = [
        np.frombuffer(mapping.buffer, dtype="<i4", count=count, offset=start + offset).tolist()
        for count, offset in zip(counts, arrays.offsets, strict=True)
    ]
    assert found == [[0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 0], [1, 1, 1], [1, 1, 1], [4, 8, 0], [0, 0, 0]]
    assert not Path(region.path).exists()
    mapping.close()


def test_a_refused_layout_leaves_the_session_as_it_was(channel: grpc.Channel) -> None:
    """An error answers the step, and the next layout is planned."""
    call = PlanCall(channel)
    call.open()
    bad_bytes = pb.StepLayout(step_id=2, plan_labels=[pb.PlanLabel(name="main", streams=b"\1\2\3")])
    call.send(pb.PlanRequest(layouts=[build_layout(1, [99]), bad_bytes, build_layout(3, [5])]))
    response = call.receive(3)
    assert [(error.step_id, pb.PlanErrorReason.Name(error.reason)) for error in response.errors] == [
        (1, "PLAN_ERROR_REASON_UNKNOWN_STREAM"),
        (2, "PLAN_ERROR_REASON_INVALID_LAYOUT"),
    ]
    assert [plan.step_id for plan in response.plans] == [3]


def test_a_step_that_waits_too_long_for_a_set_fails_and_the_session_goes_on(folder: Path) -> None:
    """Without a message from the engine the waiting step times out, and names the lease that is in its way."""
    planner = PlannerThread(folder, ring_timeout_seconds=0.05)
    with open_channel(planner.socket) as channel:
        call = PlanCall(channel)
        call.open()
        call.send(pb.PlanRequest(layouts=[build_layout(1, [0], repeat=2)]))
        assert [plan.step_id for plan in call.receive(2).plans] == [1, 2]
        call.send(pb.PlanRequest(layouts=[build_layout(3, [0]), build_layout(4, [1])]))
        for step_id in (3, 4):
            (error,) = call.receive().errors
            assert (error.step_id, error.reason) == (step_id, pb.PLAN_ERROR_REASON_RING_TIMEOUT)
            assert error.oldest_lease_step_id == 1
        call.send(pb.PlanRequest(released_through=2, layouts=[build_layout(5, [1])]))
        assert [plan.step_id for plan in call.receive().plans] == [5]
    planner.stop()


def test_a_protocol_broken_by_what_waited_ends_the_call(folder: Path) -> None:
    """What stands behind a step that times out is applied then, and judged then."""
    planner = PlannerThread(folder, ring_timeout_seconds=0.05)
    with open_channel(planner.socket) as channel:
        call = PlanCall(channel)
        call.open()
        too_long = pb.StreamOperation(truncate=pb.TruncateStream(stream=0, length=99))
        call.send(pb.PlanRequest(layouts=[build_layout(1, [0], repeat=3)]), pb.PlanRequest(operations=[too_long]))
        code, reason, message = _expect_failure(call)
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "PROTOCOL_BROKEN")
        assert "99" in message
        _wait_until_none_is_open(planner)
    planner.stop()


def test_a_waiting_step_is_planned_when_a_set_comes_free(channel: grpc.Channel) -> None:
    """A release that comes while a step waits ends the wait, however often steps wait."""
    call = PlanCall(channel)
    call.open()
    call.send(pb.PlanRequest(layouts=[build_layout(1, [0], repeat=20)]))
    assert [plan.step_id for plan in call.receive(2).plans] == [1, 2]
    for step_id in range(3, 21):
        call.send(pb.PlanRequest(released_through=step_id - 2, committed_through=step_id - 2))
        assert [plan.step_id for plan in call.receive().plans] == [step_id]


def test_the_first_request_may_carry_work(channel: grpc.Channel) -> None:
    """What comes with the opening is done, not dropped."""
    call = PlanCall(channel)
    call.open(pb.PlanRequest(open=OPEN.open, layouts=[build_layout(1, [0])]))
    assert [plan.step_id for plan in call.receive().plans] == [1]


@pytest.mark.parametrize(
    ("requests", "code", "reason", "words"),
    [
        ([pb.PlanRequest()], "FAILED_PRECONDITION", "PROTOCOL_BROKEN", "open"),
        ([OPEN, OPEN], "INVALID_ARGUMENT", "MALFORMED_MESSAGE", "first"),
        ([b"\xff"], "INVALID_ARGUMENT", "MALFORMED_MESSAGE", "PlanRequest"),
        ([OPEN, b"\xff"], "INVALID_ARGUMENT", "MALFORMED_MESSAGE", "PlanRequest"),
        ([b"\x0a\x03\x32\x01\xe9"], "INVALID_ARGUMENT", "MALFORMED_MESSAGE", "PlanRequest"),
        ([b"\x0a\x02\x28\x63"], "INVALID_ARGUMENT", "INVALID_OPTIONS", "cache_mode: 99"),
        ([pb.PlanRequest(open=pb.SessionOptions())], "INVALID_ARGUMENT", "INVALID_OPTIONS", "page_size: 0"),
        ([OPEN, pb.PlanRequest(committed_through=9)], "FAILED_PRECONDITION", "PROTOCOL_BROKEN", "committed_through"),
        ([OPEN, pb.PlanRequest(operations=[pb.StreamOperation()])], "INVALID_ARGUMENT", "MALFORMED_MESSAGE", "neither"),
        (
            [OPEN, pb.PlanRequest(layouts=[build_layout(1, [0]), build_layout(1, [0])])],
            "FAILED_PRECONDITION",
            "PROTOCOL_BROKEN",
            "step id 1",
        ),
    ],
)
def test_a_broken_protocol_ends_the_call_and_says_why(
    planner: PlannerThread,
    channel: grpc.Channel,
    requests: list[pb.PlanRequest | bytes],
    code: str,
    reason: str,
    words: str,
) -> None:
    """The engine gets a status, a word for programs and a sentence for people; the session leaves nothing."""
    call = PlanCall(channel)
    call.send(*requests)
    found_code, found_reason, message = _expect_failure(call)
    assert (found_code.name, found_reason) == (code, reason)
    assert words in message
    _wait_until_none_is_open(planner)
    num_broken = planner.registry.get_sample_value("ringplan_protocol_errors_total")
    assert num_broken == (0 if reason == "INVALID_OPTIONS" else 1)


def test_a_region_that_cannot_be_made_refuses_the_session(planner: PlannerThread, channel: grpc.Channel) -> None:
    """No memory for the first region: the call fails with its own reason, and leaves nothing."""
    planner.regions.chmod(0o700)
    planner.regions.rename(planner.regions.with_name("gone"))
    call = PlanCall(channel)
    call.send(OPEN)
    code, reason, message = _expect_failure(call)
    assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "REGION_UNAVAILABLE")
    assert str(planner.regions) in message
    planner.regions.mkdir()
    _wait_until_none_is_open(planner)


def test_one_session_too_many_is_refused_and_the_others_stay(planner: PlannerThread, channel: grpc.Channel) -> None:
    """The limit answers at once; a place that comes free is given again."""
    calls = [PlanCall(channel) for _ in range(4)]
    for call in calls:
        call.open()
    refused = PlanCall(channel)
    refused.send(OPEN)
    assert _expect_failure(refused)[:2] == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SESSION_LIMIT")
    assert len(_list_sessions(channel)) == 4
    calls[0].end()
    assert list(calls[0].call) == []
    PlanCall(channel).open()
    assert planner.call(planner.sessions.__len__) == 4


def test_a_call_that_ends_in_peace_leaves_nothing(planner: PlannerThread, channel: grpc.Channel) -> None:
    """When the engine has nothing more to send, the call ends with OK and everything is given back."""
    call = PlanCall(channel)
    call.open()
    call.send(pb.PlanRequest(layouts=[build_layout(1, [0, 1, 2], repeat=9)]))
    call.receive(2)
    call.end()
    assert list(call.call) == []
    assert call.call.code() is grpc.StatusCode.OK
    _wait_until_none_is_open(planner)


def test_a_call_without_any_message_is_nothing(planner: PlannerThread, channel: grpc.Channel) -> None:
    """It ends with OK, and no session was opened for it."""
    call = PlanCall(channel)
    call.end()
    assert list(call.call) == []
    assert call.call.code() is grpc.StatusCode.OK
    assert planner.registry.get_sample_value("ringplan_sessions_opened_total") == 0


@pytest.mark.parametrize("has_waiting_step", [False, True])
def test_a_cancelled_call_leaves_nothing(planner: PlannerThread, channel: grpc.Channel, has_waiting_step: bool) -> None:
    """An engine that gives up is noticed at once, also while a step of it waits."""
    call = PlanCall(channel)
    call.open()
    if has_waiting_step:
        call.send(pb.PlanRequest(layouts=[build_layout(1, [0], repeat=3)]))
        call.receive()
    call.call.cancel()
    _wait_until_none_is_open(planner)


def test_sessions_are_listed_oldest_first(channel: grpc.Channel) -> None:
    """Each with its figures, under the name that its engine was told."""
    calls = [PlanCall(channel), PlanCall(channel)]
    names = [call.open().opened.session for call in calls]
    calls[1].send(pb.PlanRequest(layouts=[build_layout(1, [3, 7])]))
    calls[1].receive()
    first, second = _list_sessions(channel)
    assert [first.session, second.session] == names
    assert first.age_seconds > second.age_seconds
    assert (second.engine_name, second.page_size, second.num_pages) == ("test", 4, 64)
    assert (first.num_free_pages, second.num_free_pages) == (63, 61)
    assert (second.num_streams, second.num_steps_in_flight, second.num_leased_sets) == (2, 1, 1)


def test_a_session_can_be_shown_whole(channel: grpc.Channel) -> None:
    """A dump names every stream with its pages, and every lease."""
    call = PlanCall(channel)
    name = call.open().opened.session
    call.send(pb.PlanRequest(layouts=[build_layout(1, [3, 7])]))
    call.receive()
    request = pb.DumpSessionRequest(session=name).SerializeToString()
    dump = pb.DumpSessionResponse.FromString(channel.unary_unary(DUMP_SESSION)(request, timeout=30))
    assert dump.summary.session == name
    assert [(item.stream, item.committed_length, item.planned_length, list(item.pages)) for item in dump.streams] == [
        (3, 0, 1, [1]),
        (7, 0, 1, [2]),
    ]
    assert [lease.step_id for lease in dump.leases] == [1]


@pytest.mark.parametrize(
    ("request_bytes", "code", "reason"),
    [
        (pb.DumpSessionRequest(session="none").SerializeToString(), "NOT_FOUND", "UNKNOWN_SESSION"),
        # A status is a header, of which gRPC takes some kilobytes.
        (pb.DumpSessionRequest(session="s" * 50_000).SerializeToString(), "NOT_FOUND", "UNKNOWN_SESSION"),
        (b"\x0a\x01\xe9", "INVALID_ARGUMENT", "MALFORMED_MESSAGE"),
    ],
)
def test_a_dump_that_cannot_be_says_why(channel: grpc.Channel, request_bytes: bytes, code: str, reason: str) -> None:
    """A session that is not open is NOT_FOUND, and a name that is no text is INVALID_ARGUMENT."""
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(DUMP_SESSION)(request_bytes, timeout=30)
    found_code, found_reason, _ = _describe(caught.value)
    assert (found_code.name, found_reason) == (code, reason)


def test_a_fault_within_the_planner_ends_one_call_only(
    planner: PlannerThread, channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unforeseen exception is INTERNAL for the session it hit; the other one goes on."""
    broken, sound = PlanCall(channel), PlanCall(channel)
    name = broken.open().opened.session
    sound.open()

    def fail(message: object, *, in_parts: bool) -> None:
        raise ZeroDivisionError(f"on {type(message).__name__}")

    monkeypatch.setattr(planner.sessions.get(name), "handle", fail)
    broken.send(pb.PlanRequest(layouts=[build_layout(1, [0])]))
    code, reason, message = _expect_failure(broken)
    assert (code, reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert "ZeroDivisionError" in message
    sound.send(pb.PlanRequest(layouts=[build_layout(1, [0])]))
    assert [plan.step_id for plan in sound.receive().plans] == [1]


def test_sessions_do_not_share_pages_or_regions(channel: grpc.Channel) -> None:
    """Two engines get the same page numbers and different memory."""
    calls = [PlanCall(channel), PlanCall(channel)]
    paths = [call.open().regions[0].path for call in calls]
    assert paths[0] != paths[1]
    for call in calls:
        call.send(pb.PlanRequest(layouts=[build_layout(1, [0])]))
    assert [call.receive().plans[0].step_id for call in calls] == [1, 1]
    assert [summary.num_free_pages for summary in _list_sessions(channel)] == [62, 62]


def test_a_planner_that_ends_takes_no_new_sessions_and_then_ends_the_open_ones(
    planner: PlannerThread, channel: grpc.Channel
) -> None:
    """New sessions are refused at once; open ones go on until they are ended, and are told why."""
    call = PlanCall(channel)
    call.open()
    planner.call(planner.sessions.refuse_new)
    refused = PlanCall(channel)
    refused.send(OPEN)
    assert _expect_failure(refused)[:2] == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
    call.send(pb.PlanRequest(layouts=[build_layout(1, [0], repeat=3)]))
    assert [plan.step_id for plan in call.receive(2).plans] == [1, 2]
    planner.run(planner.servicer.end_sessions())
    assert _expect_failure(call)[:2] == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
    _wait_until_none_is_open(planner)


def test_a_session_that_is_ended_while_it_opens_is_told_why(planner: PlannerThread, channel: grpc.Channel) -> None:
    """An end that comes before the first response has gone out waits for it, for gRPC would refuse the status."""

    async def end_at_once() -> None:
        while not planner.sessions.summarize():  # noqa: ASYNC110  # It is to be seen at once, in the midst of its write.
            await asyncio.sleep(0)
        await planner.servicer.end_sessions()

    for _ in range(8):
        ending = planner.start(end_at_once())
        call = PlanCall(channel)
        call.send(OPEN)
        assert _expect_failure(call)[:2] == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
        ending.result(30)
    _wait_until_none_is_open(planner)


def test_many_engines_come_and_go_at_once(planner: PlannerThread) -> None:
    """Sessions opened, used and broken off from many threads leave nothing."""
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            with open_channel(planner.socket) as channel:
                for _ in range(5):
                    call = PlanCall(channel)
                    call.open()
                    call.send(pb.PlanRequest(layouts=[build_layout(1, range(8), repeat=4)]))
                    assert call.receive(2).plans
                    if index % 2:
                        call.call.cancel()
                    else:
                        call.end()
                        assert list(call.call) == []
        except BaseException as error:  # noqa: BLE001 - told by the test's own thread.
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    _wait_until_none_is_open(planner)
