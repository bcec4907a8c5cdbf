"""FlashInfer's schedules: one that is kept is the one that would be made, and none is overwritten on its way."""

import pytest
import torch

from engine_service.attention_backends.flashinfer_backend import FlashInferBackend
from engine_service.attention_backends.flashinfer_library import load_flashinfer
from engine_service.kv_cache import KvShape
from tests.engine_service.fake_flashinfer import LateGpu
from tests.engine_service.flashinfer_steps import CountingObserver
from tests.gpu.side import SLEEP_CYCLES, WORKSPACE_BYTES, Side
from tests.gpu.test_attention import HEAD_DIM, MANY_HEADS, NUM_HEADS, NUM_KV_HEADS, SCALE, Case, Rows, build_case, check

PAGE_SIZE = 16
SHAPE = KvShape(num_layers=1, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float16)

# FlashInfer compiles its kernels when they are first used.
pytestmark = pytest.mark.timeout(200)


def build_backend(
    side: Side, observer: CountingObserver, *, verifies: bool, num_heads: int = NUM_HEADS
) -> FlashInferBackend:
    """Returns the backend over FlashInfer, or over what stands in for it."""
    return FlashInferBackend(
        load_flashinfer() if side.is_gpu else LateGpu(is_late=False).build_library(),
        SHAPE,
        num_heads=num_heads,
        page_size=PAGE_SIZE,
        device=side.device,
        workspace_bytes=WORKSPACE_BYTES if side.is_gpu else 64,
        observer=observer,
        verifies=verifies,
    )


def build_decode(side: Side, step: int, num_heads: int = NUM_HEADS) -> Case:
    """A decode batch some steps on: its rows begin a page at steps 7, 14 and 15, the last one its 82nd."""
    rows: Rows = [(9 + step, 1), (2 + step, 1), (1_281 + step, 1), None]
    return build_case(side, rows, PAGE_SIZE, SHAPE.dtype, num_heads)


@pytest.mark.parametrize("num_heads", [NUM_HEADS, MANY_HEADS])
@pytest.mark.parametrize("verifies", [False, True])
@pytest.mark.parametrize("is_graph", [False, True])
def test_a_schedule_that_is_kept_is_the_one_that_would_be_made(
    side: Side, is_graph: bool, verifies: bool, num_heads: int
) -> None:
    """Over sixteen steps with three page crossings, in wrappers of both modes, byte by byte in the workspace."""
    observer = CountingObserver()
    backend = build_backend(side, observer, verifies=verifies, num_heads=num_heads)
    batch = backend.build_graph_batch(4, 400) if is_graph else None
    for step in range(16):
        case = build_decode(side, step, num_heads)
        if batch is not None:
            backend.replan(batch, case.arrays, case.device_arrays)
        used = batch or backend.prepare(case.arrays, case.device_arrays)
        check(case, backend.attend(case.pages, case.query, used, SCALE), PAGE_SIZE)
    kept = "equal" if verifies else "kept"
    assert observer.outcomes == ["made" if step in {0, 7, 14, 15} else kept for step in range(16)]


def test_schedules_are_not_overwritten_on_their_way_to_a_busy_device(side: Side) -> None:
    """The device is busy with something else while one schedule after the other is made, in the same pinned memory."""
    backend = build_backend(side, CountingObserver(), verifies=False)
    cases = [build_decode(side, 16 * step) for step in range(8)]
    if side.is_gpu:
        torch.cuda.synchronize()
        torch.cuda._sleep(8 * SLEEP_CYCLES)
    results = [
        backend.attend(case.pages, case.query, backend.prepare(case.arrays, case.device_arrays), SCALE)
        for case in cases
    ]
    for case, result in zip(cases, results, strict=True):
        check(case, result, PAGE_SIZE)
