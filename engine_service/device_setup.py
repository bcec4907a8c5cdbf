"""Where the model runs, and what it needs there beside its weights."""

import logging
import time
from collections.abc import Callable

import torch

from engine_service.copy_fence import CopyFence
from engine_service.cuda_graphs import GraphCapturer, describe_shapes
from engine_service.errors import NoSuchDeviceError
from engine_service.model_runner import ModelRunner
from engine_service.pinned_memory import CudaRegistrar, PinnedRegions
from engine_service.plan_copies import CudaCopyEngine, PlanCopies
from engine_service.warm_up import run_decode_steps, run_largest_step, warm_up

_logger = logging.getLogger(__name__)


def choose_device(name: str) -> torch.device:
    """Returns the device that a setting stands for.

    Args:
        name: "cpu", "cuda", or "auto" for the GPU where there is one.

    Raises:
        NoSuchDeviceError: there is no GPU, and one was asked for.
    """
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        reason = "torch finds no GPU" if torch.version.cuda else "this torch is built without CUDA"
        raise NoSuchDeviceError(name, f"{reason}; give cpu, or auto")
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


def build_plan_copies(
    device: torch.device, *, pins: bool, timeout_seconds: float, on_pinned_changed: Callable[[bool], None]
) -> PlanCopies | None:
    """Returns what copies plans to a GPU; None for a CPU, which reads them where they are.

    Args:
        device: where the model runs.
        pins: whether the ring's memory is registered with CUDA.
        timeout_seconds: a copy that has not been made for so long will never be.
        on_pinned_changed: told whether the ring's memory is registered, when that changes.
    """
    if device.type != "cuda":
        return None
    regions = PinnedRegions(CudaRegistrar(device) if pins else None, on_pinned_changed)
    return PlanCopies(CudaCopyEngine(device), regions, CopyFence(timeout_seconds))


def measure_step_bytes(runner: ModelRunner, *, max_step_tokens: int, max_running_requests: int) -> int:
    """Returns the memory on the GPU that a step takes beside weights and KV cache, at most.

    Args:
        runner: the model, over a KV cache of any size.
        max_step_tokens: tokens of a step at most.
        max_running_requests: requests in a step at most.
    """
    device = runner.loaded.device
    # What libraries allocate once and keep is none of a step's.
    warm_up(runner, max_step_tokens)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    bytes_before = torch.cuda.memory_allocated(device)
    run_largest_step(runner, max_step_tokens=max_step_tokens, max_running_requests=max_running_requests)
    torch.cuda.synchronize(device)
    num_bytes = torch.cuda.max_memory_allocated(device) - bytes_before
    # What torch keeps for later counts as taken, and would be missing from the KV cache.
    torch.cuda.empty_cache()
    return num_bytes


def capture_decode_steps(
    runner: ModelRunner,
    capturer: GraphCapturer,
    *,
    max_running_requests: int,
    on_decode: Callable[[bool], None],
) -> None:
    """Captures the decode steps of every batch size, where the attention backend can be captured, and logs which.

    Steps of several plan labels are captured when the first of their sizes comes. Only the sink page is written.

    Args:
        runner: the model, warmed up.
        capturer: captures.
        max_running_requests: requests in a step at most.
        on_decode: told of each decode step of a request whether it was replayed.
    """
    if not runner.use_graphs(capturer, on_decode):
        _logger.info("decode steps run without CUDA graphs: the attention backend cannot be captured")
        return
    started, bytes_before = time.monotonic(), capturer.read_memory_bytes()
    run_decode_steps(runner, max_running_requests)
    assert runner.graphs is not None
    _logger.info(
        "CUDA graphs of decode steps: %s; %.1f MiB, captured in %.1f s",
        describe_shapes(runner.graphs.shapes),
        (capturer.read_memory_bytes() - bytes_before) / (1 << 20),
        time.monotonic() - started,
    )
