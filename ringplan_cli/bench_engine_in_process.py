"""A step planner in the engine's own process: what the planner's process is compared with."""

import tempfile
import time
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from pathlib import Path

from engine_service.step_layout import StepSpec
from planner_service.client import CacheMode, Layout, Plan
from planner_service.client_layout import build_layout
from planner_service.client_numbers import StreamNumbers
from planner_service.client_plan import PlanReader
from planner_service.config import build_default_ring_dir
from planner_service.core.layout import Drop, StreamOperation
from planner_service.core.plan import CaptureDocument, Mismatch
from planner_service.errors import LayoutError
from planner_service.messages import PlanFailed, PlanSource, SessionMessage, SessionOptions, SessionReply, WaitKind
from planner_service.region import RegionFolder
from planner_service.session import Session
from planner_service.wire import build_response, read_message
from ringplan.planner.v1 import planner_pb2 as pb


class InProcessPlanner:
    """Makes each step's plan when the step begins, in the thread that asks for it, with the planner's own code.

    Only the socket, the other process and planning ahead are missing: layouts and plans take the same forms.

    Args:
        page_size: tokens a page holds.
        num_pages: pages in the pool, the sink page included.
        max_streams: streams at once, at most.
        cache_mode: how decode plans are cached.
    """

    def __init__(self, *, page_size: int, num_pages: int, max_streams: int, cache_mode: CacheMode) -> None:
        self.is_connected = True
        self.was_plan_ready = False
        self._resources = ExitStack()
        # In memory, as a planner's: CUDA registers nothing else.
        parent = build_default_ring_dir().parent
        path = self._resources.enter_context(tempfile.TemporaryDirectory(prefix="ringplan-", dir=parent))
        folder = RegionFolder(Path(path) / "regions")
        options = SessionOptions(page_size, num_pages, max_streams, cache_mode=cache_mode)
        self._session = Session(
            "in-process",
            options,
            folder.allocate,
            clock=time.monotonic,
            ring_timeout_seconds=1.0,
            observer=_Silent(),
        )
        self._resources.callback(self._session.close)
        self._numbers = StreamNumbers(max_streams)
        self._reader = PlanReader()
        self._spec: StepSpec | None = None
        self._layout: Layout | None = None
        self._operations: list[StreamOperation] = []
        self._done = self._last_step = 0
        self._read(self._session.open())

    def connect(self, timeout_seconds: float) -> None:
        """Does nothing: there is nobody to connect to."""

    def plan_step(self, spec: StepSpec, num_steady_steps: int = 1) -> Plan:  # noqa: ARG002  # It plans none ahead.
        """Makes a step's plan.

        Raises:
            LayoutError: there is none.
        """
        if self._layout is None or self._spec != spec:
            self._spec = spec
            self._layout = build_layout(
                self._numbers,
                spec.segments,
                combined_labels=spec.combined_labels,
                commit=spec.commit,
                forks_before=spec.forks_before,
                forks_after=spec.forks_after,
            )
        self._last_step += 1
        message = self._layout.message
        message.step_id, message.repeat = self._last_step, 1
        request = pb.PlanRequest(released_through=self._done, committed_through=self._done, layouts=[message])
        parts = read_message(request)
        operations, self._operations = tuple(self._operations), []
        reply = self._session.handle(
            SessionMessage(parts.released_through, parts.committed_through, 0, 0, operations, parts.layouts)
        )
        response = self._read(reply)
        return self._reader.read(response.plans[0], self._layout.labels)

    def end_step(self, plan: Plan, *, is_kept: bool) -> None:
        """Says that a step has run; the planner hears of it with the next."""
        assert is_kept, "benchmarks run no steps that fail"
        self._done = plan.step_id

    def drop(self, request: Hashable) -> None:
        """Gives up what a request holds, with the next step."""
        numbers = self._numbers.drop(request)
        if numbers:
            self._operations.append(Drop(b"".join([number.to_bytes(4, "little") for number in numbers])))
        self._layout = None

    def flush(self) -> None:
        """Tells the planner what it has not been told yet."""
        operations, self._operations = tuple(self._operations), []
        self._session.handle(SessionMessage(self._done, self._done, operations=operations))

    def close(self) -> None:
        """Gives the memory up."""
        self._resources.close()

    def _read(self, reply: SessionReply) -> pb.PlanResponse:
        for result in reply.results:
            if isinstance(result, PlanFailed):
                raise result.error
        response = build_response(reply)
        for region in response.regions:
            self._reader.map_region(region)
        return response


class _Silent:
    """Hears what happens in the session, and keeps none of it."""

    def plan_published(self, source: PlanSource, plan_labels: Sequence[str], seconds: float) -> None:
        """See `SessionObserver`."""

    def cache_missed(self, plan_labels: Sequence[str], reason: str) -> None:
        """See `SessionObserver`."""

    def cache_mismatched(self, mismatch: Mismatch) -> None:
        """See `SessionObserver`."""

    def mismatch_drilled(self) -> None:
        """See `SessionObserver`."""

    def mismatch_captured(self, capture: CaptureDocument) -> None:
        """See `SessionObserver`."""

    def layout_failed(self, error: LayoutError) -> None:
        """See `SessionObserver`."""

    def ring_waited(self, kind: WaitKind, seconds: float) -> None:
        """See `SessionObserver`."""

    def steps_discarded(self, num_steps: int) -> None:
        """See `SessionObserver`."""

    def region_grown(self) -> None:
        """See `SessionObserver`."""
