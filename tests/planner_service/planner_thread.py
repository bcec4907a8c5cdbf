"""A planner's gRPC service in a thread of the test's own process, for tests of what goes over the wire."""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
from prometheus_client import CollectorRegistry

from planner_service.captures import CaptureFolder
from planner_service.messages import CacheMode
from planner_service.metrics import PlannerMetrics
from planner_service.region import RegionFolder
from planner_service.rpc import PlannerServicer
from planner_service.sessions import OpenSessions
from planner_service.unix_socket import build_target
from ringplan.planner.v1 import planner_pb2 as pb

ResultT = TypeVar("ResultT")
PLAN = "/ringplan.planner.v1.PlannerService/Plan"
LIST_SESSIONS = "/ringplan.planner.v1.PlannerService/ListSessions"
DUMP_SESSION = "/ringplan.planner.v1.PlannerService/DumpSession"
DRILL_MISMATCH = "/ringplan.planner.v1.PlannerService/DrillMismatch"
OPEN = pb.PlanRequest(open=pb.SessionOptions(page_size=4, num_pages=64, max_streams=16, engine_name="test"))


class PlannerThread:
    """Serves `PlannerService` on a socket.

    Args:
        folder: where the socket and the regions are.
        max_sessions: how many sessions may be open.
        ring_timeout_seconds: how long a step waits for a buffer set.
        allows_drills: whether mismatches may be made on purpose.
        max_captures: how many captures are written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_sessions: int = 4,
        ring_timeout_seconds: float = 30.0,
        allows_drills: bool = False,
        max_captures: int = 4,
    ) -> None:
        self.socket = folder / "p"
        self.regions = folder / "regions"
        self.captures = folder / "captures"
        self.registry = CollectorRegistry()
        self.sessions: OpenSessions
        self.servicer: PlannerServicer
        self._allows_drills = allows_drills
        self._max_captures = max_captures
        self._options = {
            "max_sessions": max_sessions,
            "ring_timeout_seconds": ring_timeout_seconds,
            "num_cache_entries": 8,
        }
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = self.run(self._start())

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Runs work in the server's thread and returns its result."""
        return self.start(work).result(30)

    def start(self, work: Coroutine[Any, Any, ResultT]) -> concurrent.futures.Future[ResultT]:
        """Starts work in the server's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, function: Callable[[], ResultT]) -> ResultT:
        """Calls a function in the server's thread and returns its result."""

        async def work() -> ResultT:
            return function()

        return self.run(work())

    def stop(self) -> None:
        """Ends the server and its thread."""
        self.run(self._server.stop(0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> grpc.aio.Server:
        metrics = PlannerMetrics(self.registry, "test", CaptureFolder(self.captures, self._max_captures))
        self.sessions = OpenSessions(RegionFolder(self.regions), metrics, clock=time.monotonic, **self._options)  # type: ignore[arg-type]
        self.servicer = PlannerServicer(
            self.sessions,
            metrics,
            default_ring_depth=2,
            default_cache_mode=CacheMode.OFF,
            version="test",
            clock=time.monotonic,
            allows_drills=self._allows_drills,
        )
        metrics.watch_sessions(self.sessions.summarize)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((self.servicer.build_handler(),))
        server.add_insecure_port(build_target(self.socket))
        await server.start()
        return server


class PlanCall:
    """A Plan call that sends what it is told, message by message, readable or not.

    Args:
        channel: a channel to the planner.
    """

    def __init__(self, channel: grpc.Channel) -> None:
        self._more = threading.Condition()
        self._requests: list[bytes | None] = []
        self.call = channel.stream_stream(PLAN)(self._iterate(), timeout=30)

    def send(self, *requests: pb.PlanRequest | bytes) -> None:
        """Sends messages."""
        with self._more:
            self._requests += [item if isinstance(item, bytes) else item.SerializeToString() for item in requests]
            self._more.notify()

    def end(self) -> None:
        """Sends nothing any more."""
        with self._more:
            self._requests.append(None)
            self._more.notify()

    def receive(self, num_results: int = 0) -> pb.PlanResponse:
        """Returns the next response, and with it those that follow until there are so many plans and errors."""
        response = pb.PlanResponse.FromString(next(self.call))
        while len(response.plans) + len(response.errors) < num_results:
            response.MergeFrom(pb.PlanResponse.FromString(next(self.call)))
        return response

    def open(self, request: pb.PlanRequest = OPEN) -> pb.PlanResponse:
        """Opens a session; returns the first response."""
        self.send(request)
        return self.receive()

    def _iterate(self) -> Iterator[bytes]:
        while True:
            with self._more:
                self._more.wait_for(lambda: self._requests)
                request = self._requests.pop(0)
            if request is None:
                return
            yield request


def build_layout(step_id: int, streams: Iterable[int], *, label: str = "main", repeat: int = 1) -> pb.StepLayout:
    """Returns a committing decode layout of one plan label."""
    packed = np.array(list(streams), dtype="<i4").tobytes()
    labels = [pb.PlanLabel(name=label, streams=packed)]
    return pb.StepLayout(step_id=step_id, commit=True, repeat=repeat, plan_labels=labels)


@contextmanager
def open_channel(socket: Path) -> Iterator[grpc.Channel]:
    """Yields a channel of its own connection."""
    with grpc.insecure_channel(build_target(socket), [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel
