"""A planner that says what a test tells it to, and shows what it was sent; without a socket."""

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc

from planner_service.core.arrays import build_extents
from ringplan.planner.v1 import planner_pb2 as pb

TIMEOUT_SECONDS = 10.0
SET_BYTES = 4096
NUM_SETS = 4


class ScriptedPlanner:
    """The planner's side of one Plan call; `start_call` is what a client's session starts it with.

    Args:
        folder: where its regions go.
    """

    def __init__(self, folder: Path) -> None:
        self.is_cancelled = False
        self._folder = folder
        self._received: queue.SimpleQueue[pb.PlanRequest | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[pb.PlanResponse | Exception | None] = queue.SimpleQueue()

    def start_call(self, requests: Iterator[pb.PlanRequest]) -> "ScriptedPlanner":
        """Starts the call."""
        threading.Thread(target=self._receive, args=(requests,), daemon=True).start()
        return self

    def __iter__(self) -> Iterator[pb.PlanResponse]:
        while (answer := self._answers.get()) is not None:
            if isinstance(answer, Exception):
                raise answer
            yield answer

    def cancel(self) -> None:
        """The client gives up."""
        self.is_cancelled = True
        self._answers.put(grpc.RpcError("cancelled"))

    def receive(self) -> pb.PlanRequest | None:
        """Returns the next request, or None when the client has sent its last."""
        return self._received.get(timeout=TIMEOUT_SECONDS)

    def receive_layouts(self) -> pb.PlanRequest:
        """Returns the next request with a layout; those without are passed over."""
        while True:
            request = self.receive()
            assert request is not None, "the client has sent its last request"
            if request.layouts:
                return request

    def answer(self, response: pb.PlanResponse | None = None, **fields: object) -> None:
        """Sends a response, or builds one of its fields and sends it."""
        self._answers.put(response or pb.PlanResponse(**fields))  # type: ignore[arg-type]  # Checked when it is built.

    def end(self, error: Exception | None = None) -> None:
        """Ends the call, with an error if one is given."""
        self._answers.put(error)

    def build_region(self, region_id: int = 1) -> pb.Region:
        """Makes a region's file, all zeros."""
        path = self._folder / f"region-{region_id}"
        path.write_bytes(bytes(SET_BYTES * NUM_SETS))
        return pb.Region(
            region_id=region_id,
            path=str(path),
            num_bytes=SET_BYTES * NUM_SETS,
            set_bytes=SET_BYTES,
            set_offsets=[SET_BYTES * index for index in range(NUM_SETS)],
        )

    def open(self) -> None:
        """Answers the opening request."""
        opened = pb.SessionOpened(
            session="session-7", planner_version="1.2.3", ring_depth=NUM_SETS, cache_mode=pb.CACHE_MODE_ON
        )
        self.answer(opened=opened, regions=[self.build_region()])

    def _receive(self, requests: Iterator[pb.PlanRequest]) -> None:
        for request in requests:
            self._received.put(request)
        self._received.put(None)


def build_plan(step_id: int, *, rows: tuple[tuple[str, int], ...] = (("main", 1),), region_id: int = 1) -> pb.Plan:
    """Returns a plan whose rows have one token and one page each; `rows` are (plan label, number of rows) pairs."""
    extents, num_bytes = build_extents([(name, count, count, count) for name, count in rows])
    return pb.Plan(
        step_id=step_id,
        region_id=region_id,
        set_index=step_id % NUM_SETS,
        num_bytes=num_bytes,
        source=pb.PLAN_SOURCE_FULL,
        plan_labels=[
            pb.PlanArrays(
                name=extent.name,
                num_rows=extent.num_rows,
                num_tokens=extent.num_tokens,
                num_indices=extent.num_indices,
                offsets=extent.offsets,
            )
            for extent in extents
        ],
    )
