"""Steps of a session whose plans are copied to a device, as an engine takes, copies and ends them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from engine_service.device_plan import DevicePlan
from engine_service.plan_copies import PlanCopies
from engine_service.plan_pipeline import PlanPipeline
from engine_service.step_layout import StepSpec
from planner_service.client import ARRAY_NAMES, Plan, PlannerClient, PlannerSession, Segment
from tests.planner_process import PlannerProcess

LABELS = ("main", "cfg_text", "cfg_img")
RING_DEPTH = 2
PAGE_SIZE = 2

# By plan label and name of the array.
Arrays = dict[str, dict[str, list[int]]]
DeviceCopies = dict[str, dict[str, torch.Tensor]]


@contextmanager
def open_session(planner: PlannerProcess, **options: int) -> Iterator[PlannerSession]:
    """Opens a session with a ring of 2 sets."""
    with (
        PlannerClient(planner.target) as client,
        client.open_session(
            page_size=PAGE_SIZE, num_pages=2_001, max_streams=64, ring_depth=RING_DEPTH, **options
        ) as session,
    ):
        yield session


def make_decode_step(num_requests: int = 5) -> StepSpec:
    """Returns a decode step with three labels, each of another size, and padding rows."""
    segments = [
        Segment(request, label)
        for label, count in zip(LABELS, (num_requests, 3, 2), strict=True)
        for request in range(count)
    ]
    return StepSpec((*segments, Segment(None, "main"), Segment(None, "cfg_text")))


@dataclass
class Steps:
    """Runs steps as an engine does.

    Args:
        pipeline: plans them.
        copies: copies the plans.

    Attributes:
        plans: the steps' plans.
        said: what stood in them when they came.
        read: what a forward reads of them on the device.
    """

    pipeline: PlanPipeline
    copies: PlanCopies
    plans: list[DevicePlan] = field(default_factory=list)
    said: list[Arrays] = field(default_factory=list)
    read: list[DeviceCopies] = field(default_factory=list)

    def run(self, spec: StepSpec, num_steady_steps: int = 1) -> Arrays:
        """Runs a step; returns what its plan says."""
        plan = self.pipeline.plan_step(spec, num_steady_steps)
        said = read_plan(plan)
        self.said.append(said)
        with self.copies.reading(plan) as device_plan:
            self.copies.wait(device_plan)
            self.copies.note_host_reads(device_plan)
            self.plans.append(device_plan)
            # As a forward does that runs when the copy has been made, be that late.
            self.read.append(
                {
                    name: {array: getattr(arrays, array).clone() for array in ARRAY_NAMES}
                    for name, arrays in device_plan.labels.items()
                }
            )
        self.pipeline.end_step(plan, is_kept=True)
        return said


def read_plan(plan: Plan) -> Arrays:
    """Returns every array of a plan on the host."""
    return {
        name: {array: getattr(arrays, array).tolist() for array in ARRAY_NAMES} for name, arrays in plan.labels.items()
    }


def read_device_plan(device_plan: DevicePlan) -> Arrays:
    """Returns every array of a plan on the device."""
    return {
        name: {array: getattr(arrays, array).tolist() for array in ARRAY_NAMES}
        for name, arrays in device_plan.labels.items()
    }


def build_steps(session: PlannerSession, copies: PlanCopies, plan_ahead: int = 8) -> Steps:
    """Returns what runs steps of a session."""
    pipeline = PlanPipeline(session, plan_ahead=plan_ahead, timeout_seconds=20, fence=copies.fence)
    return Steps(pipeline, copies)
