"""A planner's side of a session without a socket, from the bytes of a request to the bytes of its response."""

import time
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry

from planner_service.captures import CaptureFolder
from planner_service.messages import CacheMode, SessionOptions
from planner_service.metrics import PlannerMetrics
from planner_service.session import Session
from planner_service.wire import build_response, parse, read_message
from ringplan.planner.v1 import planner_pb2 as pb
from tests.planner_service.mirrored_session import PlainRegion

PAGE_SIZE = 16
NUM_PAGES_A_ROW = 8
RING_DEPTH = 16
LABELS = ("main", "cfg_text", "cfg_img")


class PlannerSteps:
    """A session whose rows hold pages already, and decode steps on it.

    Args:
        folder: where captures would go.
        num_rows: rows of each plan label.
        num_labels: plan labels.
        cache_mode: how plans are cached.
        is_staggered: whether rows cross pages at different steps; else all cross at once, after 15 more steps.
    """

    def __init__(
        self, folder: Path, *, num_rows: int, num_labels: int, cache_mode: CacheMode, is_staggered: bool
    ) -> None:
        num_streams = num_rows * num_labels
        options = SessionOptions(
            page_size=PAGE_SIZE,
            num_pages=num_streams * (NUM_PAGES_A_ROW + 20) + 1,
            max_streams=num_streams,
            ring_depth=RING_DEPTH,
            cache_mode=cache_mode,
            set_bytes=1 << 20,
        )
        metrics = PlannerMetrics(CollectorRegistry(), "1", CaptureFolder(folder, 1))
        self.session = Session(
            "s",
            options,
            PlainRegion,
            clock=time.monotonic,
            ring_timeout_seconds=30.0,
            observer=metrics.observe_session("s"),
        )
        self.session.open()
        self.last_step = 0
        self._streams = np.arange(num_streams, dtype="<i4").reshape(num_labels, num_rows)
        spans = np.full(num_rows, (NUM_PAGES_A_ROW - 1) * PAGE_SIZE, dtype="<i4")
        self._run(1, (spans + np.arange(num_rows, dtype="<i4") % PAGE_SIZE * is_staggered).astype("<i4").tobytes())

    def build_request(self, num_steps: int) -> bytes:
        """Returns a request for a run of decode steps, which gives back and commits the last one."""
        return self._build(num_steps, b"")

    def answer(self, request: bytes) -> bytes:
        """Returns what the planner answers."""
        reply = self.session.handle(read_message(parse(pb.PlanRequest, request)))
        return build_response(reply).SerializeToString()

    def run(self, num_steps: int) -> pb.PlanResponse:
        """Runs decode steps; returns their response."""
        return self._run(num_steps, b"")

    def _run(self, num_steps: int, spans: bytes) -> pb.PlanResponse:
        response = pb.PlanResponse.FromString(self.answer(self._build(num_steps, spans)))
        assert len(response.plans) == num_steps
        return response

    def _build(self, num_steps: int, spans: bytes) -> bytes:
        labels = [
            pb.PlanLabel(name=LABELS[index], streams=row.tobytes(), spans=spans)
            for index, row in enumerate(self._streams)
        ]
        layout = pb.StepLayout(step_id=self.last_step + 1, commit=True, repeat=num_steps, plan_labels=labels)
        done, self.last_step = self.last_step, self.last_step + num_steps
        return pb.PlanRequest(released_through=done, committed_through=done, layouts=[layout]).SerializeToString()
