"""Attention by FlashInfer's kernels, on CUDA devices."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine_service.attention_backends.flashinfer_calls import FlashInferCalls, GraphBuffers
from engine_service.attention_backends.flashinfer_library import FlashInferLibrary
from engine_service.attention_backends.flashinfer_pool import WrapperPool
from engine_service.attention_backends.flashinfer_schedule import Kernels, build_schedule_key, is_decode
from engine_service.attention_backends.flashinfer_wrapper import (
    MakeSchedule,
    NobodyObserves,
    ScheduledWrapper,
    ScheduleObserver,
    copy_to_host,
)
from engine_service.device_plan import DeviceArrays
from engine_service.kv_cache import KvShape
from planner_service.client import PlanArrays


@dataclass(eq=False, slots=True, weakref_slot=True)
class FlashInferBatch:
    """The rows of one plan label, for `FlashInferBackend.attend`.

    Args:
        wrapper: holds its schedule; the batch keeps others from taking it.
        indices: int32 on the device: the rows' page indices.
        last_page_len: int32 [num_rows] on the device.
        graph_layout: where a graph that was captured finds its schedule; None before, and outside graphs.
    """

    wrapper: ScheduledWrapper
    indices: torch.Tensor
    last_page_len: torch.Tensor
    graph_layout: tuple[int, ...] | None = None


class FlashInferBackend:
    """Schedules each plan label's rows in a wrapper of their own and keeps a schedule while it serves.

    Used by one thread, on one stream. The kernels FA2 serve every GPU, and their schedules outlast the steps between
    two page crossings; FA3, for SM90 alone, needs a schedule each step. Wrappers are made and planned in the inference
    mode of torch, whoever calls: what is made in it may not be written to outside.

    Args:
        library: FlashInfer.
        shape: what the cache keeps of a token.
        num_heads: query heads of a layer.
        page_size: tokens a page holds.
        device: where the cache lives.
        workspace_bytes: device memory for partial results.
        kernels: which kernels to run.
        observer: counts schedules.
        verifies: whether a schedule that could be kept is made again, compared, and the fresh one used.
    """

    def __init__(  # noqa: PLR0913  # Each is a setting of its own.
        self,
        library: FlashInferLibrary,
        shape: KvShape,
        *,
        num_heads: int,
        page_size: int,
        device: torch.device,
        workspace_bytes: int,
        kernels: Kernels = Kernels.FA2,
        observer: ScheduleObserver | None = None,
        verifies: bool = False,
    ) -> None:
        self._library = library
        self._num_heads = num_heads
        self._device = device
        self._kernels = kernels
        self._observer = observer or NobodyObserves()
        self._verifies = verifies
        # Zeros: some of FlashInfer's kernels keep counters there.
        workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=device)
        self._calls = calls = FlashInferCalls(
            library,
            kernels,
            num_heads=num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            page_size=page_size,
            dtype=shape.dtype,
            workspace=workspace,
        )
        self._decode = self._build_pool(calls.open_decode, calls.plan_decode)
        self._prefill = self._build_pool(calls.open_prefill, calls.plan_prefill)

    @torch.inference_mode()
    def prepare(self, arrays: PlanArrays, device_arrays: DeviceArrays | None = None) -> FlashInferBatch:
        """Schedules the rows, unless an earlier schedule is theirs; see `AttentionBackend`."""
        indices, last_page_len = self._find_on_device(arrays, device_arrays)
        key = build_schedule_key(arrays, self._kernels)
        wrapper = (self._decode if is_decode(arrays) else self._prefill).find(key)
        wrapper.schedule(key, arrays, indices)
        return self._use(FlashInferBatch(wrapper, indices, last_page_len))

    def attend(self, pages: torch.Tensor, query: torch.Tensor, batch: FlashInferBatch, scale: float) -> torch.Tensor:
        """Runs the batch's schedule on one layer; see `AttentionBackend`."""
        assert query.shape[1] == self._num_heads, "checked when the model is loaded"
        # transformers hands over heads before tokens, transposed; kernels of some releases look at no strides.
        return batch.wrapper.run(query.contiguous(), pages, scale, batch.indices, batch.last_page_len)

    @torch.inference_mode()
    def build_graph_batch(self, num_rows: int, max_indices: int) -> FlashInferBatch:
        """Makes a decode batch for a graph; see `GraphBackend`.

        Its arrays and its schedule stand in memory that stays where it is. `replan` fills both.

        Args:
            num_rows: rows, each of span 1.
            max_indices: pages of all rows together, at most.
        """
        buffers = GraphBuffers(
            torch.zeros(num_rows + 1, dtype=torch.int32, device=self._device),
            torch.zeros(max_indices, dtype=torch.int32, device=self._device),
            torch.ones(num_rows, dtype=torch.int32, device=self._device),
        )
        wrapper = self._wrap(self._calls.open_graph_decode(buffers), self._calls.plan_decode)
        return self._use(FlashInferBatch(wrapper, buffers.paged_kv_indices, buffers.paged_kv_last_page_len))

    @torch.inference_mode()
    def replan(self, batch: FlashInferBatch, arrays: PlanArrays, device_arrays: DeviceArrays | None = None) -> None:
        """Makes a graph's batch that of another step, on the stream that replays the graph; see `GraphBackend`.

        Args:
            batch: from `build_graph_batch`.
            arrays: the plan label, with as many rows as the batch, each of span 1.
            device_arrays: the same on the device.

        Raises:
            ValueError: the rows are not those that the batch is for.
            RuntimeError: FlashInfer put the schedule elsewhere than the captured graph looks for it.
        """
        num_rows, num_indices = len(batch.last_page_len), len(arrays.paged_kv_indices)
        if len(arrays.kv_lens) != num_rows or not is_decode(arrays):
            raise ValueError(f"{arrays.extent} for a graph of {num_rows} rows of span 1")
        if num_indices > len(batch.indices):
            raise ValueError(f"{num_indices} page indices for a graph that has room for {len(batch.indices)}")
        indices, last_page_len = self._find_on_device(arrays, device_arrays)
        if not batch.wrapper.schedule(build_schedule_key(arrays, self._kernels), arrays, indices):
            batch.indices[:num_indices].copy_(indices, non_blocking=True)
            batch.last_page_len.copy_(last_page_len, non_blocking=True)
        layout = batch.wrapper.find_layout()
        if batch.graph_layout is None:
            batch.graph_layout = layout
        elif layout != batch.graph_layout:
            raise RuntimeError(
                f"FlashInfer {self._library.version} moved the schedule of {num_rows} rows from {batch.graph_layout} "
                f"to {layout}, and captured graphs cannot follow; turn cuda_graphs off"
            )

    def _find_on_device(
        self, arrays: PlanArrays, device_arrays: DeviceArrays | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the arrays that kernels read at every step: page indices and lengths of last pages."""
        if device_arrays is not None:
            return device_arrays.paged_kv_indices, device_arrays.paged_kv_last_page_len
        indices, last_page_len = (
            copy_to_host(values).to(self._device, non_blocking=True)
            for values in (arrays.paged_kv_indices, arrays.paged_kv_last_page_len)
        )
        return indices, last_page_len

    def _build_pool(self, open_wrapper: Callable[[], object], make_schedule: MakeSchedule) -> WrapperPool:
        return WrapperPool(lambda: self._wrap(open_wrapper(), make_schedule))

    def _wrap(self, wrapper: object, make_schedule: MakeSchedule) -> ScheduledWrapper:
        event = self._library.make_event()
        return ScheduledWrapper(wrapper, make_schedule, event, self._observer, verifies=self._verifies)

    @staticmethod
    def _use(batch: FlashInferBatch) -> FlashInferBatch:
        batch.wrapper.add_user(batch)
        return batch
