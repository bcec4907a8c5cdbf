"""What an attention backend does."""

from typing import Protocol, TypeVar, runtime_checkable

import torch

from engine_service.device_plan import DeviceArrays
from planner_service.client import PlanArrays

BatchT = TypeVar("BatchT")


class AttentionBackend(Protocol[BatchT]):
    """Attends over the paged cache for the rows of one plan label."""

    def prepare(self, arrays: PlanArrays, device_arrays: DeviceArrays | None = None) -> BatchT:
        """Turns a plan label's arrays into what `attend` needs: once a step, for all layers.

        The arrays may be overwritten once this step is released, so nothing that `attend` reads may be a view of them
        unless the caller releases after the forward. Copies from the host arrays that `prepare` leaves under way must
        be on the current stream: the caller releases only after those.

        Args:
            arrays: the plan label's index arrays.
            device_arrays: the same on the device, complete for whatever is put on the current stream from now on; None
                where the model runs on a CPU.

        Returns:
            The batch, for `attend`.
        """

    def attend(self, pages: torch.Tensor, query: torch.Tensor, batch: BatchT, scale: float) -> torch.Tensor:
        """Computes causal attention of every row's query tokens over the row's own keys and values.

        Args:
            pages: one layer of the cache, [num_pages, 2, page_size, num_kv_heads, head_dim]; the tokens of this step
                are already written.
            query: [num_tokens, num_heads, head_dim], the label's tokens, row after row.
            batch: what `prepare` returned for this step.
            scale: what scores are multiplied by.

        Returns:
            [num_tokens, num_heads, head_dim]. A padding row's tokens may be anything, NaN too.
        """


@runtime_checkable
class GraphBackend(AttentionBackend[BatchT], Protocol[BatchT]):
    """A backend whose `attend` can be captured in a CUDA graph, for decode batches of a fixed number of rows.

    In a capture `attend` must allocate with torch, on the current stream, and nothing else.
    """

    def build_graph_batch(self, num_rows: int, max_indices: int) -> BatchT:
        """Makes a batch with device buffers of its own, which stay where they are.

        Args:
            num_rows: rows, each of span 1.
            max_indices: pages of all rows together, at most.
        """

    def replan(self, batch: BatchT, arrays: PlanArrays, device_arrays: DeviceArrays) -> None:
        """Makes a batch that of another step: outside the graph, before its capture and before each replay.

        Args:
            batch: from `build_graph_batch`.
            arrays: the plan label's index arrays, with as many rows as the batch.
            device_arrays: the same on the device, complete for whatever is put on the current stream from now on.
        """
