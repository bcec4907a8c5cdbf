"""However a Plan call ends, the engine learns why; tested against a gRPC server in this process."""

import tempfile
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from planner_service import client_stream, rpc
from planner_service.client_errors import SessionLostError
from planner_service.client_stream import PlanStream
from planner_service.errors import MalformedMessageError, PlannerError, ProtocolError, ShuttingDownError
from ringplan.planner.v1 import planner_pb2 as pb
from ringplan.planner.v1 import planner_pb2_grpc

TIMEOUT_SECONDS = 10.0

Behaviour = Callable[[Iterator[pb.PlanRequest], grpc.ServicerContext], Iterator[pb.PlanResponse]]


class _Servicer(planner_pb2_grpc.PlannerServiceServicer):
    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour

    def Plan(  # noqa: N802 - the proto's name.
        self, request_iterator: Iterator[pb.PlanRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.PlanResponse]:
        return self._behaviour(request_iterator, context)

    ListSessions = DumpSession = None  # type: ignore[assignment]  # Nobody calls them.


@contextmanager
def _serve(behaviour: Behaviour) -> Iterator[planner_pb2_grpc.PlannerServiceStub]:
    """Serves Plan calls that behave so; gives a stub for them."""
    with tempfile.TemporaryDirectory(prefix="ringplan-", dir="/tmp") as folder, futures.ThreadPoolExecutor(2) as pool:
        target = f"unix:{Path(folder) / 's'}"
        server = grpc.server(pool)
        planner_pb2_grpc.add_PlannerServiceServicer_to_server(_Servicer(behaviour), server)
        server.add_insecure_port(target)
        server.start()
        try:
            with grpc.insecure_channel(target) as channel:
                yield planner_pb2_grpc.PlannerServiceStub(channel)
        finally:
            server.stop(None).wait(TIMEOUT_SECONDS)


def _run(behaviour: Behaviour, *, on_response: Callable[[pb.PlanResponse], None] = lambda _: None) -> Exception:
    """Runs a call to its end; returns what it ended with."""
    ended = futures.Future[None]()
    with _serve(behaviour) as stub:
        stream = PlanStream(stub.Plan, on_response, lambda: ended.set_result(None))
        stream.start(pb.PlanRequest())
        ended.result(TIMEOUT_SECONDS)
        stream.close()
    assert stream.ending is not None
    with pytest.raises(type(stream.ending)) as caught:
        stream.check_alive()
    return caught.value


def _abort(error: PlannerError) -> Behaviour:
    """Ends a call as the planner does for this error."""
    code, reason = rpc.STATUS_BY_ERROR[type(error)]

    def behave(_: Iterator[pb.PlanRequest], context: grpc.ServicerContext) -> Iterator[pb.PlanResponse]:
        context.set_trailing_metadata(((rpc.REASON_KEY, reason),))
        context.abort(code, str(error))
        yield pb.PlanResponse()

    return behave


@pytest.mark.parametrize("error", [ProtocolError("step 3 was never planned"), MalformedMessageError("no such field")])
def test_a_broken_protocol_comes_back_as_such(error: ProtocolError) -> None:
    """The planner's words about what the engine did wrong reach it."""
    ending = _run(_abort(error))
    assert isinstance(ending, ProtocolError)
    assert str(ending) == str(error)


def test_any_other_failure_is_a_lost_session() -> None:
    """The status and its words are kept."""
    ending = _run(_abort(ShuttingDownError()))
    assert isinstance(ending, SessionLostError)
    assert (ending.status, ending.reason) == ("UNAVAILABLE", "the planner is shutting down")


def test_a_call_that_ends_in_peace_is_a_lost_session_too() -> None:
    """The engine did not ask for an end, so there is nothing left to plan with."""
    ending = _run(lambda _requests, _context: iter(()))
    assert isinstance(ending, SessionLostError)
    assert ending.status == "OK"


def test_what_taking_a_response_raises_ends_the_stream(caplog: pytest.LogCaptureFixture) -> None:
    """The reader thread never dies in silence."""

    def refuse(response: pb.PlanResponse) -> None:
        raise KeyError(len(response.plans))

    ending = _run(lambda _requests, _context: iter([pb.PlanResponse()]), on_response=refuse)
    assert isinstance(ending, SessionLostError)
    assert ending.reason == "a response cannot be read: KeyError(0)"
    assert "cannot be read" in caplog.text


def test_requests_go_out_in_order_and_closing_ends_them() -> None:
    """The other side gets every request in order, then the end; the stream's end is then this side's."""
    received: list[int] = []

    def record(requests: Iterator[pb.PlanRequest], _: grpc.ServicerContext) -> Iterator[pb.PlanResponse]:
        received.extend(request.released_through for request in requests)
        yield pb.PlanResponse()

    with _serve(record) as stub:
        stream = PlanStream(stub.Plan, lambda _: None, lambda: None)
        stream.start(pb.PlanRequest(released_through=1))
        for step_id in range(2, 100):
            stream.send(pb.PlanRequest(released_through=step_id))
        stream.check_alive()
        stream.close()
        stream.close()
    assert received == list(range(1, 100))
    with pytest.raises(SessionLostError, match="closed by the engine"):
        stream.check_alive()


def test_closing_does_not_wait_for_a_planner_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call whose other side never ends it is cancelled."""
    monkeypatch.setattr(client_stream, "CLOSE_TIMEOUT_SECONDS", 0.01)
    cancelled = futures.Future[None]()

    def hang(_: Iterator[pb.PlanRequest], context: grpc.ServicerContext) -> Iterator[pb.PlanResponse]:
        context.add_callback(lambda: cancelled.set_result(None))
        cancelled.result(TIMEOUT_SECONDS)
        yield pb.PlanResponse()

    with _serve(hang) as stub:
        stream = PlanStream(stub.Plan, lambda _: None, lambda: None)
        stream.start(pb.PlanRequest())
        stream.close()
        assert stream.ending is not None
        cancelled.result(TIMEOUT_SECONDS)


def test_both_sides_use_the_same_word_for_the_reason() -> None:
    """The key of the reason and the reasons for a broken protocol are the planner's own."""
    assert client_stream.REASON_KEY == rpc.REASON_KEY
    errors: list[type[PlannerError]] = [ProtocolError, *ProtocolError.__subclasses__()]
    reasons = {rpc.STATUS_BY_ERROR[error][1] for error in errors}
    assert set(client_stream.PROTOCOL_REASONS) == reasons
