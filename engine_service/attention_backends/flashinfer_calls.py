"""The calls that make FlashInfer's wrappers and their schedules; `ScheduledWrapper.run` holds the remaining one."""

from dataclasses import dataclass
from typing import Any

import torch

from engine_service.attention_backends.flashinfer_library import FlashInferLibrary
from engine_service.attention_backends.flashinfer_schedule import Kernels
from engine_service.attention_backends.flashinfer_support import wants_tensor_cores
from engine_service.attention_backends.flashinfer_wrapper import copy_to_host
from planner_service.client import PlanArrays

# [num_pages, 2, page_size, num_kv_heads, head_dim], as `KvCache` has its layers.
LAYOUT = "NHD"
# What schedules are made with: `run` is given the layer's own scale as a factor on it.
_UNIT_SCALE = 1.0


@dataclass(frozen=True, slots=True)
class GraphBuffers:
    """Where the arrays of a captured decode batch stand: device memory that stays where it is.

    Args:
        paged_kv_indptr: int32 [num_rows + 1].
        paged_kv_indices: int32 [max_indices].
        paged_kv_last_page_len: int32 [num_rows].
    """

    paged_kv_indptr: torch.Tensor
    paged_kv_indices: torch.Tensor
    paged_kv_last_page_len: torch.Tensor


class FlashInferCalls:
    """Calls FlashInfer for one model and cache.

    The kernels are named, never left to "auto": what a schedule depends on differs between them, and a captured graph
    must not find others when it is planned again.

    Args:
        library: FlashInfer.
        kernels: which of its kernels.
        num_heads: query heads.
        num_kv_heads: key heads.
        head_dim: elements of a head.
        page_size: tokens a page holds.
        dtype: of queries, keys, values and outputs.
        workspace: uint8 on the device, for partial results; all wrappers share it, as one stream runs them in turn.
    """

    def __init__(
        self,
        library: FlashInferLibrary,
        kernels: Kernels,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        workspace: torch.Tensor,
    ) -> None:
        self._library = library
        self._kernels = kernels
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._page_size = page_size
        self._dtype = dtype
        self._workspace = workspace
        # FA3 has no other decode kernel than its prefill one.
        self._uses_tensor_cores = kernels is Kernels.FA3 or wants_tensor_cores(num_heads, num_kv_heads)

    def open_decode(self) -> Any:
        """Returns a wrapper for decode batches of any size."""
        return self._library.decode_wrapper(
            self._workspace, LAYOUT, use_tensor_cores=self._uses_tensor_cores, backend=self._kernels.value
        )

    def open_graph_decode(self, buffers: GraphBuffers) -> Any:
        """Returns a wrapper for captured decode batches, which reads its arrays from `buffers`."""
        return self._library.decode_wrapper(
            self._workspace,
            LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=self._uses_tensor_cores,
            paged_kv_indptr_buffer=buffers.paged_kv_indptr,
            paged_kv_indices_buffer=buffers.paged_kv_indices,
            paged_kv_last_page_len_buffer=buffers.paged_kv_last_page_len,
            backend=self._kernels.value,
        )

    def open_prefill(self) -> Any:
        """Returns a wrapper for batches with any spans."""
        return self._library.prefill_wrapper(self._workspace, LAYOUT, backend=self._kernels.value)

    def plan_decode(self, wrapper: Any, arrays: PlanArrays, indices: torch.Tensor) -> None:
        """Makes the schedule of a decode batch.

        The page counts and lengths are read on the host, and would be fetched back from the device, which waits for
        it. The indices only go to the device: from there they are taken as they are, or in graph mode copied without
        waiting, where an array of the host's would be waited for.

        Args:
            wrapper: from `open_decode` or `open_graph_decode`.
            arrays: the plan label.
            indices: its page indices, on the device.
        """
        wrapper.plan(
            indptr=copy_to_host(arrays.paged_kv_indptr),
            indices=indices,
            last_page_len=copy_to_host(arrays.paged_kv_last_page_len),
            num_qo_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads,
            head_dim=self._head_dim,
            page_size=self._page_size,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            sm_scale=_UNIT_SCALE,
            non_blocking=True,
        )

    def plan_prefill(self, wrapper: Any, arrays: PlanArrays, indices: torch.Tensor) -> None:
        """Makes the schedule of a batch with any spans; rows of span 0 have no part in it.

        Args:
            wrapper: from `open_prefill`.
            arrays: the plan label.
            indices: its page indices, on the device.
        """
        wrapper.plan(
            qo_indptr=copy_to_host(arrays.qo_indptr),
            paged_kv_indptr=copy_to_host(arrays.paged_kv_indptr),
            paged_kv_indices=indices,
            paged_kv_last_page_len=copy_to_host(arrays.paged_kv_last_page_len),
            num_qo_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads,
            head_dim_qk=self._head_dim,
            page_size=self._page_size,
            causal=True,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            sm_scale=_UNIT_SCALE,
            non_blocking=True,
        )
