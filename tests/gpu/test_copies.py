"""Copies of plans to the GPU, with something else in their stream: what arrives is what was planned."""

import mmap

import numpy as np
import pytest
import torch

from engine_service.errors import CopyTimeoutError
from engine_service.pinned_memory import CudaRegistrar, PinnedRegions
from tests.engine_service.copied_steps import LABELS, build_steps, make_decode_step, open_session
from tests.gpu.side import Side
from tests.planner_process import PlannerProcess

NUM_STEPS = 40


@pytest.mark.parametrize("plan_ahead", [0, 8])
def test_late_copies_of_three_labels_move_what_was_planned(
    side: Side, planner: PlannerProcess, plan_ahead: int
) -> None:
    """A ring of 2, copies held back: each step's arrays arrive as they were when the step began, and steps go on."""
    pinned: list[bool] = []
    copies = side.build_late_copies(pinned.append)
    with open_session(planner) as session:
        steps = build_steps(session, copies, plan_ahead)
        num_behind = 0
        for step in range(NUM_STEPS):
            said = steps.run(make_decode_step(), NUM_STEPS - step)
            assert said.keys() == set(LABELS)
            num_behind += copies.fence.is_holding
        copies.end_session()
    assert num_behind > NUM_STEPS // 2, "most steps ended before their plan had been copied"
    assert pinned[0], "the ring's memory is registered"
    if side.is_gpu:
        for said, read in zip(steps.said, steps.read, strict=True):
            arrived = {name: {key: array.tolist() for key, array in arrays.items()} for name, arrays in read.items()}
            assert arrived == said
        assert not pinned[-1]


def test_a_region_is_registered_and_given_back(side: Side, planner: PlannerProcess) -> None:
    """torch sees it as pinned memory while the session lives, and not afterwards."""
    if not side.is_gpu:
        pytest.skip("only CUDA registers memory")
    copies = side.build_late_copies(lambda _is_pinned: None)
    with open_session(planner) as session:
        steps = build_steps(session, copies)
        steps.run(make_decode_step())
        region = torch.from_numpy(steps.plans[0].plan.region_buffer)
        assert region.is_pinned()
        copies.end_session()
        assert not region.is_pinned()


def test_a_refusal_by_cuda_is_a_reason_and_leaves_no_error_behind(side: Side) -> None:
    """Memory cannot be registered twice; the kernel that is launched next does not fail for it."""
    if not side.is_gpu:
        pytest.skip("only CUDA registers memory")
    buffer = np.frombuffer(mmap.mmap(-1, 1 << 16), dtype=np.uint8)
    registrar = CudaRegistrar(side.device)
    assert registrar.try_register(buffer.ctypes.data, buffer.nbytes) is None
    reason = registrar.try_register(buffer.ctypes.data, buffer.nbytes)
    assert reason
    assert torch.arange(5, device=side.device).sum().item() == 10
    registrar.unregister(buffer.ctypes.data)
    regions = PinnedRegions(registrar, lambda _is_pinned: None)
    assert regions.find(buffer, 1).is_pinned()
    regions.close()


def test_a_copy_that_takes_too_long_is_an_error(side: Side, planner: PlannerProcess) -> None:
    """A step that ends before its plan has been copied, and a copy that has no time left, end the run with its step."""
    copies = side.build_late_copies(lambda _is_pinned: None, timeout_seconds=0.0)
    with open_session(planner) as session:
        steps = build_steps(session, copies)
        with pytest.raises(CopyTimeoutError, match="step 1 "):
            steps.run(make_decode_step(), NUM_STEPS)
        if side.is_gpu:
            torch.cuda.synchronize()
        copies.end_session()
