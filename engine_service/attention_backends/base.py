"""What an attention backend does."""

from typing import Protocol, TypeVar

import torch

from planner_service.client import PlanArrays

BatchT = TypeVar("BatchT")


class AttentionBackend(Protocol[BatchT]):
    """Attends over the paged cache for the rows of one plan label."""

    def prepare(self, arrays: PlanArrays) -> BatchT:
        """Turns a plan label's arrays into what `attend` needs: once a step, for all layers.

        The arrays may be overwritten once this step is released, so nothing that `attend` reads may be a view of them
        unless the caller releases after the forward.

        Args:
            arrays: the plan label's index arrays.

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
