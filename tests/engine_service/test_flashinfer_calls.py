"""`flashinfer_calls.py`: what FlashInfer is called with, and that its releases take it."""

import inspect
from typing import Any

import pytest
import torch

from engine_service.attention_backends.flashinfer_schedule import Kernels
from engine_service.device_plan import DeviceArrays
from planner_service.client import PlanArrays
from tests.engine_service.fake_flashinfer import DECODE, PREFILL, RELEASES, FakeWrapper, read_signature
from tests.engine_service.flashinfer_steps import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, GraphSteps, LateSteps
from tests.engine_service.hand_plans import build_plan_arrays

PAGE_SIZE = 4
DECODE_ROWS = [(3, 1), None, (9, 1)]
MIXED_ROWS = [(3, 2), None, (6, 0), (0, 5)]


def plan(steps: LateSteps, rows: list[tuple[int, int] | None]) -> tuple[PlanArrays, DeviceArrays, FakeWrapper]:
    """Prepares a plan label, runs one layer, and returns what was given and to what."""
    arrays = build_plan_arrays("main", steps.build_arrays(rows))
    device_arrays = steps.send(arrays)
    batch = steps.backend.prepare(arrays, device_arrays)
    steps.backend.attend(steps.pages, steps.draw_query(arrays), batch, 0.3)
    return arrays, device_arrays, steps.gpu.wrappers[-1]


def check_tensors(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compares the arrays among a call's arguments, and takes them out."""
    for name, values in expected.items():
        tensor = found.pop(name)
        assert tensor.dtype == torch.int32
        assert tensor.tolist() == values.tolist()


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("kernels", Kernels)
def test_decode_is_planned_with_host_lengths_and_device_indices(release: str, kernels: Kernels) -> None:
    """Outside graphs: page counts and lengths from the host, where FlashInfer reads them, indices from the device."""
    arrays, device_arrays, wrapper = plan(LateSteps(PAGE_SIZE, kernels, release=release), DECODE_ROWS)
    (_, made), (_, planned), (_, run) = wrapper.calls
    assert made.pop("float_workspace_buffer").shape == (64,)
    # Two query heads a key head: FA2 has a kernel without tensor cores for that, FA3 has not.
    assert made == {"kv_layout": "NHD", "use_tensor_cores": kernels is Kernels.FA3, "backend": kernels.value}
    assert planned.pop("indices") is device_arrays.paged_kv_indices
    check_tensors(planned, {"indptr": arrays.paged_kv_indptr, "last_page_len": arrays.paged_kv_last_page_len})
    sizes = {"num_qo_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM, "page_size": PAGE_SIZE}
    dtypes = {"q_data_type": torch.float32, "kv_data_type": torch.float32}
    assert planned == {**sizes, **dtypes, "sm_scale": 1.0, "non_blocking": True}
    assert run.keys() == {"q", "paged_kv_cache", "q_scale"}
    assert run["q_scale"] == 0.3


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("kernels", Kernels)
def test_prefill_is_planned_with_host_lengths_and_device_indices(release: str, kernels: Kernels) -> None:
    """As decode is, with the spans, and causal."""
    arrays, device_arrays, wrapper = plan(LateSteps(PAGE_SIZE, kernels, release=release), MIXED_ROWS)
    (_, made), (_, planned), (_, run) = wrapper.calls
    assert made.pop("float_workspace_buffer").shape == (64,)
    assert made == {"kv_layout": "NHD", "backend": kernels.value}
    assert planned.pop("paged_kv_indices") is device_arrays.paged_kv_indices
    names = ("qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len")
    check_tensors(planned, {name: getattr(arrays, name) for name in names})
    sizes = {"num_qo_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS, "head_dim_qk": HEAD_DIM, "page_size": PAGE_SIZE}
    dtypes = {"q_data_type": torch.float32, "kv_data_type": torch.float32}
    assert planned == {**sizes, **dtypes, "causal": True, "sm_scale": 1.0, "non_blocking": True}
    assert run.keys() == {"q", "paged_kv_cache", "q_scale"}


@pytest.mark.parametrize("release", RELEASES)
def test_a_graph_is_planned_with_device_indices_into_its_own_buffers(release: str) -> None:
    """An index array of the host's would be waited for; one on the device is copied without."""
    steps = GraphSteps(3, PAGE_SIZE, release=release)
    arrays = build_plan_arrays("main", steps.build_arrays(DECODE_ROWS))
    device_arrays = steps.send(arrays)
    steps.backend.replan(steps.batch, arrays, device_arrays)
    (wrapper,) = steps.gpu.wrappers
    made, planned = wrapper.calls[0][1], wrapper.calls[-1][1]
    assert made.pop("float_workspace_buffer").shape == (64,)
    assert made.pop("paged_kv_indptr_buffer").shape == (4,)
    assert made.pop("paged_kv_indices_buffer") is steps.batch.indices
    assert made.pop("paged_kv_last_page_len_buffer") is steps.batch.last_page_len
    assert made == {"kv_layout": "NHD", "use_cuda_graph": True, "use_tensor_cores": False, "backend": "fa2"}
    assert planned["indices"] is device_arrays.paged_kv_indices
    check_tensors(planned, {"indptr": arrays.paged_kv_indptr, "last_page_len": arrays.paged_kv_last_page_len})


def test_all_wrappers_share_one_workspace_for_partial_results() -> None:
    """One stream runs them in turn."""
    steps = LateSteps(PAGE_SIZE)
    steps.run([DECODE_ROWS, MIXED_ROWS])
    first, second = (wrapper.calls[0][1]["float_workspace_buffer"] for wrapper in steps.gpu.wrappers)
    assert first is second


@pytest.mark.parametrize("name", [DECODE, PREFILL])
@pytest.mark.parametrize("method", ["__init__", "plan", "run"])
def test_the_recorded_signatures_are_those_of_the_installed_release(name: str, method: str) -> None:
    """What the tests above bind to is what FlashInfer takes."""
    flashinfer = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    wrapper = getattr(flashinfer, name)
    found = find_signature(wrapper, method)
    if flashinfer.__version__ not in RELEASES:
        pytest.skip(f"flashinfer {flashinfer.__version__} is not recorded; our calls are bound to its own")
    recorded = read_signature(flashinfer.__version__, name, method)
    assert describe(found) == describe(recorded)


@pytest.mark.parametrize("rows", [DECODE_ROWS, MIXED_ROWS])
@pytest.mark.parametrize("is_graph", [False, True])
def test_our_calls_bind_to_the_installed_release(rows: list[tuple[int, int] | None], is_graph: bool) -> None:
    """Both wrappers, eager and captured: exactly the arguments that our code gives, bound to the real signatures."""
    flashinfer = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    if is_graph:
        (wrapper,) = GraphSteps(3, PAGE_SIZE).gpu.wrappers
    else:
        *_, wrapper = plan(LateSteps(PAGE_SIZE), rows)
    assert [method for method, _ in wrapper.calls] == ["__init__", "plan", "run"]
    for method, args, kwargs in wrapper.calls_as_made:
        find_signature(getattr(flashinfer, wrapper.name), method).bind(*args, **kwargs)


def find_signature(wrapper: type, method: str) -> inspect.Signature:
    """Returns what a method takes beside `self`, or what it hands everything on to."""
    signature = inspect.signature(getattr(wrapper, method))
    if any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values()):
        # A call with any name would bind to this one and fail inside.
        signature = inspect.signature(getattr(wrapper, f"_{method}_impl"))
    return signature.replace(parameters=[one for one in signature.parameters.values() if one.name != "self"])


def describe(signature: inspect.Signature) -> list[tuple[str, int, bool]]:
    """Returns each parameter's name, kind, and whether it must be given."""
    return [(one.name, one.kind, one.default is one.empty) for one in signature.parameters.values()]
