"""The planner's client: all that an engine imports from the planner.

A `PlannerClient` is a connection, a `PlannerSession` on it is one engine's pool of pages. The engine describes steps by
their segments, submits them ahead and reads each plan as numpy views of shared memory:

    with PlannerClient("unix:/tmp/planner.sock") as client:
        with client.open_session(page_size=16, num_pages=1024, max_streams=64) as session:
            layout = session.build_layout([Segment("request-1", "main", 5)])
            session.submit(layout)
            plan = session.next_plan()
            ...  # run the step: plan.labels["main"].slot_mapping and so on
            session.commit(plan.step_id)
            session.release(plan.step_id)
"""

import re
import threading
import weakref
from pathlib import Path
from typing import Self

import grpc

from planner_service.client_errors import ClientError, PlannerUnavailableError, SessionLostError
from planner_service.client_layout import CombinedLabel, ForkRequest, Layout, LayoutLabel, Segment
from planner_service.client_plan import Plan, PlanArrays
from planner_service.client_session import MAX_REPEAT, PlannerSession
from planner_service.client_wire import build_open_request
from planner_service.core.arrays import ARRAY_NAMES, ArraysExtent
from planner_service.errors import (
    InvalidLayoutError,
    InvalidOptionsError,
    LayoutError,
    OutOfPagesError,
    PlannerError,
    ProtocolError,
    RegionUnavailableError,
    RingTimeoutError,
    UnknownStreamError,
)
from planner_service.messages import MAX_RING_DEPTH, CacheMode, PlanSource
from planner_service.unix_socket import build_target, find_fault
from ringplan.planner.v1 import planner_pb2_grpc

__all__ = [
    "ARRAY_NAMES",
    "MAX_REPEAT",
    "MAX_RING_DEPTH",
    "ArraysExtent",
    "CacheMode",
    "ClientError",
    "CombinedLabel",
    "ForkRequest",
    "InvalidLayoutError",
    "InvalidOptionsError",
    "Layout",
    "LayoutError",
    "LayoutLabel",
    "OutOfPagesError",
    "Plan",
    "PlanArrays",
    "PlanSource",
    "PlannerClient",
    "PlannerError",
    "PlannerSession",
    "PlannerUnavailableError",
    "ProtocolError",
    "RegionUnavailableError",
    "RingTimeoutError",
    "Segment",
    "SessionLostError",
    "UnknownStreamError",
    "parse_target",
]

_SCHEME = "unix:"
_NETWORK_ADDRESS = re.compile(r"(?!unix:)[a-z0-9+-]+://.*|[^/]*:\d+|(dns|ipv4|ipv6|xds|vsock|unix-abstract):.*")
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    # A connection of its own: another client's back-off after a failure is not ours.
    ("grpc.use_local_subchannel_pool", 1),
    # A planner that comes back is on this machine: look for it often.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


class PlannerClient:
    """A connection to a planner on this machine. Safe to use, and to close, from any thread.

    Args:
        target: the planner's unix socket: `unix:/path`, or the path alone.
        connect_timeout_seconds: how long to wait for the planner to answer, here and for a session to be opened.

    Raises:
        PlannerUnavailableError: no planner answered in time, or no socket's path can be so long.
        ValueError: the target is not a unix socket.
    """

    def __init__(self, target: str, *, connect_timeout_seconds: float = 10.0) -> None:
        self.target = parse_target(target)
        fault = find_fault(self.target)
        if fault is not None:
            raise PlannerUnavailableError(self.target, fault)
        self._timeout_seconds = connect_timeout_seconds
        self._lock = threading.Lock()
        self._is_closed = False
        self._sessions: weakref.WeakSet[PlannerSession] = weakref.WeakSet()
        self._channel = grpc.insecure_channel(build_target(self.target), options=_CHANNEL_OPTIONS)
        self._stub = planner_pb2_grpc.PlannerServiceStub(self._channel)
        try:
            grpc.channel_ready_future(self._channel).result(timeout=connect_timeout_seconds)
        except grpc.FutureTimeoutError:
            self._channel.close()
            is_there = Path(self.target.removeprefix(_SCHEME)).exists()
            reason = "the socket does not answer" if is_there else "the socket does not exist"
            raise PlannerUnavailableError(self.target, f"{reason} ({connect_timeout_seconds} s)") from None

    def open_session(
        self,
        *,
        page_size: int,
        num_pages: int,
        max_streams: int,
        ring_depth: int = 0,
        cache_mode: CacheMode | None = None,
        engine_name: str = "",
        set_bytes: int = 0,
    ) -> PlannerSession:
        """Opens a session; where the planner is away, waits for it as long as connecting may take.

        Args:
            page_size: tokens a page holds.
            num_pages: pages in the pool, the sink page included.
            max_streams: (request, label) pairs that may exist at once.
            ring_depth: plans that can be held at once, at least 2; 0 is the planner's default.
            cache_mode: how decode plans are cached; None is the planner's default.
            engine_name: for people and logs, at most 128 characters.
            set_bytes: first size of a buffer set in bytes; 0 lets the planner choose. Sets grow when they must.

        Raises:
            InvalidOptionsError: an option is out of range.
            PlannerUnavailableError: the planner is away, refuses, or has no memory for a ring.
        """
        request = build_open_request(
            page_size=page_size,
            num_pages=num_pages,
            max_streams=max_streams,
            ring_depth=ring_depth,
            cache_mode=cache_mode,
            engine_name=engine_name,
            set_bytes=set_bytes,
        )
        self._check_open()
        session = PlannerSession(
            lambda requests: self._stub.Plan(requests, wait_for_ready=True),
            request,
            target=self.target,
            open_timeout_seconds=self._timeout_seconds,
        )
        with self._lock:
            self._sessions.add(session)
        try:
            self._check_open()
        except PlannerUnavailableError:
            session.close()  # The client was closed meanwhile, and has not seen this one.
            raise
        return session

    def close(self) -> None:
        """Closes every session and the connection. May be called again."""
        with self._lock:
            self._is_closed = True
            sessions = list(self._sessions)
        for session in sessions:
            session.close()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise PlannerUnavailableError(self.target, "the client is closed")


def parse_target(target: str) -> str:
    """Returns the address of a unix socket in one form: "unix:" and an absolute path.

    Args:
        target: `unix:/path`, `unix:///path`, or a path.

    Raises:
        ValueError: it is the address of something else.
    """
    path = target.removeprefix(_SCHEME)
    if not path or _NETWORK_ADDRESS.fullmatch(target):
        raise ValueError(f"{target!r} is not a unix socket: engine and planner share memory, so also a machine")
    if path.startswith("//"):
        path = path[2:]
    return _SCHEME + str(Path(path).absolute())
