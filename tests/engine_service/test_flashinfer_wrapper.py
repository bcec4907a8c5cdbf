"""`flashinfer_wrapper.py`: a schedule is kept, made again or compared, and never overwritten early."""

import logging
from typing import Any

import numpy as np
import pytest
import torch

from engine_service.attention_backends.flashinfer_wrapper import NobodyObserves, ScheduledWrapper, copy_to_host
from planner_service.client import PlanArrays
from tests.engine_service.flashinfer_steps import CountingObserver
from tests.engine_service.hand_plans import build_plan_arrays, build_scattered_arrays

ARRAYS = build_plan_arrays("main", build_scattered_arrays([(3, 1)], 4))
INDICES = torch.ones(1, dtype=torch.int32)


class _Event:
    """Notes what is done with it."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def record(self) -> None:
        self._log.append("record")

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self._log.append("wait")


class _Wrapper:
    """A wrapper that notes its plans; what the next one leaves in the workspace is set by hand."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.schedule = 7
        self.layout = [1, 2]
        self.error: Exception | None = None
        self.run_arguments: dict[str, Any] = {}
        self._plan_info: list[int] = []
        self._int_workspace_buffer = torch.zeros(4, dtype=torch.uint8)
        self._paged_kv_indices_buf = self._paged_kv_last_page_len_buf = None

    def plan(self) -> None:
        self.log.append("plan")
        self._plan_info = list(self.layout)
        self._int_workspace_buffer[2] = self.schedule
        if self.error is not None:
            raise self.error

    def run(self, query: torch.Tensor, pages: torch.Tensor, *, q_scale: float) -> torch.Tensor:
        self.run_arguments = {
            "scale": q_scale,
            "indices": self._paged_kv_indices_buf,
            "last_page_len": self._paged_kv_last_page_len_buf,
        }
        return query


class _Rig:
    """A scheduled wrapper over stand-ins, and what happened to them in order."""

    def __init__(self, *, verifies: bool = False) -> None:
        self.log: list[str] = []
        self.wrapper = _Wrapper(self.log)
        self.observer = CountingObserver()
        self.scheduled = ScheduledWrapper(self.wrapper, self.make, _Event(self.log), self.observer, verifies=verifies)

    def make(self, wrapper: _Wrapper, arrays: PlanArrays, indices: torch.Tensor) -> None:
        assert (arrays, indices) == (ARRAYS, INDICES)
        wrapper.plan()

    def schedule(self, key: bytes) -> bool:
        return self.scheduled.schedule((key,), ARRAYS, INDICES)


def test_memory_is_written_again_only_after_the_last_copy_from_it() -> None:
    """The event comes after each plan and is waited for before the next; a schedule that is kept waits for none."""
    rig = _Rig()
    assert [rig.schedule(key) for key in (b"a", b"a", b"b", b"c")] == [True, False, True, True]
    assert rig.log == ["plan", "record", "wait", "plan", "record", "wait", "plan", "record"]
    assert rig.observer.outcomes == ["made", "kept", "made", "made"]


def test_a_plan_that_fails_leaves_no_schedule() -> None:
    """What it had copied by then is fenced all the same, and the same rows are planned again."""
    rig = _Rig()
    rig.schedule(b"a")
    rig.wrapper.error = RuntimeError("no workspace left")
    with pytest.raises(RuntimeError, match="no workspace left"):
        rig.schedule(b"b")
    rig.wrapper.error = None
    for key in (b"b", b"a"):
        assert not rig.scheduled.has_schedule((key,))
    assert rig.schedule(b"b")
    assert rig.log == ["plan", "record", "wait", "plan", "record", "wait", "plan", "record"]
    assert rig.observer.outcomes == ["made", "made"]


@pytest.mark.parametrize(("part", "value"), [("schedule", 8), ("layout", [1, 3])])
def test_verifying_finds_a_schedule_that_differs_and_serves_the_fresh_one(
    part: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    """In the workspace, or in where things stand there; the log names the plan label."""
    rig = _Rig(verifies=True)
    rig.schedule(b"a")
    rig.schedule(b"a")
    setattr(rig.wrapper, part, value)
    with caplog.at_level(logging.WARNING):
        assert rig.schedule(b"a")
    assert rig.observer.outcomes == ["made", "equal", "unequal"]
    assert [record.getMessage()[:44] for record in caplog.records] == ["plan label main: the attention schedule of a"]
    assert (rig.wrapper._int_workspace_buffer[2], rig.wrapper._plan_info) == (rig.wrapper.schedule, rig.wrapper.layout)


@pytest.mark.parametrize(
    "part", ["_paged_kv_indices_buf", "_paged_kv_last_page_len_buf", "_plan_info", "_int_workspace_buffer"]
)
@pytest.mark.parametrize("verifies", [False, True])
def test_a_wrapper_of_another_build_is_planned_each_step(part: str, verifies: bool) -> None:
    """A release that calls these parts something else would read the last step's pages: it keeps no schedules."""
    rig = _Rig(verifies=verifies)
    made = rig.wrapper.plan

    def plan() -> None:
        made()
        other_names[part] = rig.wrapper.__dict__.pop(part)

    other_names: dict[str, object] = {}
    rig.wrapper.plan = plan  # type: ignore[method-assign]
    for _ in range(2):
        rig.wrapper.__dict__.update(other_names)
        assert rig.schedule(b"a")
    assert rig.observer.outcomes == ["made", "made"]
    assert not rig.scheduled.has_schedule((b"a",))


def test_a_run_reads_the_pages_of_its_own_step() -> None:
    """Whatever arrays the schedule was made with; and the layer's scale."""
    rig = _Rig()
    rig.schedule(b"a")
    indices, last_page_len = torch.zeros(3), torch.zeros(2)
    rig.scheduled.run(torch.zeros(1), torch.zeros(1), 0.25, indices, last_page_len)
    assert rig.wrapper.run_arguments["scale"] == 0.25
    assert rig.wrapper.run_arguments["indices"] is indices
    assert rig.wrapper.run_arguments["last_page_len"] is last_page_len


def test_host_copies_are_copies() -> None:
    """What is written to the ring afterwards does not show."""
    values = np.arange(3, dtype=np.int32)
    copy = copy_to_host(values)
    values[:] = 9
    assert copy.tolist() == [0, 1, 2]
    assert copy.dtype == torch.int32


def test_nobody_has_to_observe() -> None:
    """A backend without metrics counts nothing."""
    nobody = NobodyObserves()
    nobody.schedule_made()
    nobody.schedule_kept()
    nobody.schedule_verified(is_equal=False)
