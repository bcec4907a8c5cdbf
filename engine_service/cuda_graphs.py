"""Decode steps as CUDA graphs: captured once for each batch size, replayed with the plan of the step."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from engine_service.attention import PagedStep
from engine_service.attention_backends.base import GraphBackend
from engine_service.device_plan import DevicePlan
from engine_service.kv_cache import KvCache
from engine_service.model_loading import LoadedModel
from planner_service.client import Plan

# Graphs of batches of several labels are captured when their first step comes; a mix of sizes must not go on for ever.
MAX_GRAPHS = 64
# What is run before a capture: libraries make up their minds, and allocate, the first times.
NUM_WARM_UP_RUNS = 2

# (plan label, rows) in the plan's order.
GraphShape = tuple[tuple[str, int], ...]

_logger = logging.getLogger(__name__)


class GraphCapturer(Protocol):
    """Captures work on a device, so that it can be done again without the host."""

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Captures a function's work.

        Args:
            run: allocates its results anew and reads what stays where it is; it is called several times.

        Returns:
            What does the work again, and the tensor that the result is then found in.

        Raises:
            RuntimeError: it cannot be captured.
        """

    def read_memory_bytes(self) -> int:
        """Returns the device's memory that is in use."""


class CudaCapturer:
    """Captures CUDA graphs, all in one pool of memory: only the last one replayed has its result.

    All in one stream, too: libraries keep a workspace for every stream that they have met, cuBLAS up to 32 MiB.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no annotations here.
        self._pool: Any = None

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Captures a function's work; see `GraphCapturer`."""
        current, side = torch.cuda.current_stream(self._device), self._stream
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                for _ in range(NUM_WARM_UP_RUNS):
                    run()
        finally:
            current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process do not use the GPU, but libraries of theirs may ask it something. A capture that
        # fails leaves its own stream behind as the current one: the outer `with` goes back.
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"),
        ):
            result = run()
        self._pool = graph.pool()
        return graph.replay, result

    def read_memory_bytes(self) -> int:
        """Returns the device's memory that is in use; see `GraphCapturer`."""
        # What torch keeps for later is given back when a capture begins, and would make its memory less than none.
        torch.cuda.empty_cache()
        free_bytes, all_bytes = torch.cuda.mem_get_info(self._device)
        return all_bytes - free_bytes


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A decode step of one shape; its tensors stay where they are.

    Args:
        token_ids: int64 [1, num_tokens].
        positions: int32 [num_tokens].
        slots: int32 [num_tokens].
        parts: for each plan label its name, its number of rows and its batch.
        work: what was captured; a graph reads memory by its address, and this holds what nothing else does.
        replay: does the captured work again.
        logits: float32 [num_tokens, vocab_size], where the work leaves its result.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    parts: tuple[tuple[str, int, Any], ...]
    work: Callable[[], torch.Tensor]
    replay: Callable[[], None]
    logits: torch.Tensor

    def run(self) -> torch.Tensor:
        """Runs the step that was filled in; returns its logits, which stand until another step is run."""
        self.replay()
        return self.logits


class DecodeGraphs:
    """The captured decode steps of a model. Used by one thread.

    Args:
        loaded: the model.
        cache: its KV cache.
        backend: what computes attention.
        capturer: captures.
        on_decode: told of each decode step of a request whether it was replayed.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        cache: KvCache,
        backend: GraphBackend[Any],
        capturer: GraphCapturer,
        on_decode: Callable[[bool], None],
    ) -> None:
        self._loaded = loaded
        self._cache = cache
        self._backend = backend
        self._capturer = capturer
        self._on_decode = on_decode
        self._max_pages_per_row = -(-loaded.max_context_tokens // cache.page_size)
        self._steps: dict[GraphShape, CapturedStep] = {}
        self._is_off = False

    @property
    def shapes(self) -> list[GraphShape]:
        """What has been captured, in that order."""
        return list(self._steps)

    def try_fill(self, token_ids: torch.Tensor, device_plan: DevicePlan) -> CapturedStep | None:
        """Fills a step in that has been captured, or captures it if it is the first of its shape.

        Args:
            token_ids: int64 [num_tokens], of all plan labels, on the device.
            device_plan: the step's plan, complete for whatever is put on the current stream from now on.

        Returns:
            The step, to be run at once; None if it must be run without a graph.
        """
        plan = device_plan.plan
        shape = find_graph_shape(plan)
        if shape is None:
            return None
        known = self._steps.get(shape)
        step = known
        try:
            if known is not None:
                self._fill(known, token_ids, device_plan)
            elif not self._is_off and len(self._steps) < MAX_GRAPHS:
                step = self._capture_logged(shape, token_ids, device_plan)
        except RuntimeError:
            # A shape or a library that cannot be captured must not keep requests from their answers.
            _logger.exception("decode steps run without CUDA graphs from now on, after one with %s", _describe(shape))
            self._is_off = True
            self._steps.clear()
            step = known = None
        if plan.region_id:
            self._on_decode(known is not None)
        return step

    def _capture_logged(self, shape: GraphShape, token_ids: torch.Tensor, device_plan: DevicePlan) -> CapturedStep:
        bytes_before = self._capturer.read_memory_bytes()
        step = self._steps[shape] = self._capture(shape, token_ids, device_plan)
        num_bytes = self._capturer.read_memory_bytes() - bytes_before
        _logger.info("CUDA graph %d captured: %s, %.1f MiB", len(self._steps), _describe(shape), num_bytes / (1 << 20))
        return step

    def _capture(self, shape: GraphShape, token_ids: torch.Tensor, device_plan: DevicePlan) -> CapturedStep:
        loaded, cache, backend = self._loaded, self._cache, self._backend
        device, num_tokens = loaded.device, len(token_ids)
        static_ids = torch.zeros((1, num_tokens), dtype=torch.int64, device=device)
        positions = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        slots = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        keep = torch.arange(num_tokens, device=device)
        parts = tuple(
            (name, num_rows, backend.build_graph_batch(num_rows, num_rows * self._max_pages_per_row))
            for name, num_rows in shape
        )

        def run() -> torch.Tensor:
            return loaded.run(
                static_ids,
                positions.long().unsqueeze(0),
                keep,
                PagedStep(
                    cache, backend, cache.find_write_rows(slots), [(num_rows, batch) for _, num_rows, batch in parts]
                ),
            )

        unfilled = CapturedStep(static_ids, positions, slots, parts, run, lambda: None, torch.empty(0))
        # The runs before the capture are this very step: they write the keys and values that it writes.
        self._fill(unfilled, token_ids, device_plan)
        replay, logits = self._capturer.capture(run)
        return CapturedStep(static_ids, positions, slots, parts, run, replay, logits)

    def _fill(self, step: CapturedStep, token_ids: torch.Tensor, device_plan: DevicePlan) -> None:
        step.token_ids.copy_(token_ids.unsqueeze(0))
        start = 0
        for name, num_rows, batch in step.parts:
            arrays, end = device_plan.labels[name], start + num_rows
            step.positions[start:end].copy_(arrays.positions)
            step.slots[start:end].copy_(arrays.slot_mapping)
            self._backend.replan(batch, device_plan.plan.labels[name], arrays)
            start = end


def find_graph_shape(plan: Plan) -> GraphShape | None:
    """Returns the shape of a plan that a graph can be captured for, or None.

    That is a decode step, padding rows included, whose plan labels have 1, 2, 4, 8, ... rows.
    """
    for arrays in plan.labels.values():
        num_rows = len(arrays.kv_lens)
        if num_rows & (num_rows - 1) or not num_rows or len(arrays.slot_mapping) != num_rows:
            return None
        # As many tokens as rows may still be a row of two and one of none.
        if not np.array_equal(arrays.qo_indptr, np.arange(num_rows + 1)):
            return None
    return tuple((name, len(arrays.kv_lens)) for name, arrays in plan.labels.items())


def list_batch_sizes(max_rows: int) -> list[int]:
    """Returns the sizes that decode batches of up to so many rows are padded to, largest first.

    Graphs share one pool of memory: the smaller ones then fit what the largest has taken.
    """
    return [1 << power for power in range((max_rows - 1).bit_length(), -1, -1)]


def describe_shapes(shapes: Sequence[GraphShape]) -> str:
    """Returns a line that tells shapes to people."""
    return ", ".join(map(_describe, shapes)) or "none"


def _describe(shape: GraphShape) -> str:
    return " + ".join(f"{name} {num_rows}" for name, num_rows in shape)
