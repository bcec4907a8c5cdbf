"""The tensor that holds the keys and values of every page."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class KvShape:
    """What a model's attention keeps of a token.

    Args:
        num_layers: attention layers.
        num_kv_heads: key (and value) heads of a layer.
        head_dim: elements of a head.
        dtype: the elements' type.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def bytes_per_page(self, page_size: int) -> int:
        """Returns the bytes that the keys and values of `page_size` tokens take in all layers."""
        return 2 * self.num_layers * page_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KvCache:
    """Keys and values, page by page: for each layer `[num_pages, 2, page_size, num_kv_heads, head_dim]` (NHD).

    Nothing is cleared: a slot has meaning only where a plan says that it was written.

    Args:
        shape: what a token takes.
        num_pages: pages, the sink page included.
        page_size: tokens a page holds.
        device: where the tensor lives.
    """

    def __init__(self, shape: KvShape, *, num_pages: int, page_size: int, device: torch.device) -> None:
        self.shape = shape
        self.num_pages = num_pages
        self.page_size = page_size
        size = (shape.num_layers, num_pages, 2, page_size, shape.num_kv_heads, shape.head_dim)
        self.pages = torch.empty(size, dtype=shape.dtype, device=device)
        # One row a slot and kind: slot s of page p is row p * 2 * page_size + s, its value page_size rows further.
        self._rows = self.pages.view(shape.num_layers, -1, shape.num_kv_heads, shape.head_dim).unbind(0)
        self._layers = self.pages.unbind(0)

    def layer(self, index: int) -> torch.Tensor:
        """Returns one layer, `[num_pages, 2, page_size, num_kv_heads, head_dim]`; writable, not a copy."""
        return self._layers[index]

    def build_write_rows(self, slot_mapping: npt.NDArray[np.int32]) -> tuple[torch.Tensor, torch.Tensor]:
        """Turns slots into what `write` takes: done once a step, for all layers.

        Args:
            slot_mapping: int32 [num_tokens].

        Returns:
            The rows of the keys and of the values, int64 [num_tokens] each.
        """
        slots = slot_mapping.astype(np.int64)
        key_rows = torch.from_numpy(slots + slots // self.page_size * self.page_size).to(self.pages.device)
        return key_rows, key_rows + self.page_size

    def find_write_rows(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Does what `build_write_rows` does for slots on the device.

        Args:
            slots: int32 [num_tokens].
        """
        key_rows = slots.long()
        key_rows = key_rows + key_rows // self.page_size * self.page_size
        return key_rows, key_rows + self.page_size

    def write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Writes the keys and values of new tokens.

        Args:
            layer: the layer.
            key: [num_tokens, num_kv_heads, head_dim].
            value: the same.
            rows: where they go, from `build_write_rows`.
        """
        layer_rows = self._rows[layer]
        layer_rows.index_copy_(0, rows[0], key)
        layer_rows.index_copy_(0, rows[1], value)

    def copy_pages(self, page_copies: npt.NDArray[np.int32]) -> None:
        """Copies whole pages in all layers.

        Args:
            page_copies: int32 [n, 2] of (source page, target page), in order: a later copy may read an earlier target.
        """
        if not len(page_copies):
            return
        sources, targets = page_copies.T.tolist()
        if not set(sources).isdisjoint(targets) or len(set(targets)) < len(targets):
            for source, target in page_copies.tolist():
                self.pages[:, target] = self.pages[:, source]
            return
        device = self.pages.device
        index = torch.from_numpy(page_copies.astype(np.int64)).to(device)
        self.pages.index_copy_(1, index[:, 1], self.pages.index_select(1, index[:, 0]))
