"""Attention in plain torch: the reference, and what runs on a CPU."""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from engine_service.attention_backends.row_groups import MAX_GROUPED_SPAN, RowGroup, build_row_groups
from engine_service.device_plan import DeviceArrays
from engine_service.kv_cache import KvShape
from planner_service.client import PlanArrays


@dataclass(frozen=True, slots=True)
class TorchGroup:
    """A group of rows as tensors on the device. R rows, padded to span Q and length L; H key heads.

    Args:
        num_rows: R.
        span: Q.
        length: L.
        gather_rows: int64 [2 * R * H * L], where each head of each key, then of each value, stands in a layer seen as
            [num_pages * 2 * page_size * H, head_dim].
        token_index: int64 [R * Q], the rows' query tokens; None where they are the label's tokens in order.
        real_places: int64, which of those R * Q are not padding; None for all.
        real_tokens: int64, the tokens they belong to; None where `token_index` is None.
        mask: what is added to scores, [R, 1, 1 or Q, L]; None where nothing is masked but what `is_causal` masks.
        is_causal: whether the group is one row without a past.
    """

    num_rows: int
    span: int
    length: int
    gather_rows: torch.Tensor
    token_index: torch.Tensor | None
    real_places: torch.Tensor | None
    real_tokens: torch.Tensor | None
    mask: torch.Tensor | None
    is_causal: bool


@dataclass(frozen=True, slots=True)
class TorchBatch:
    """The rows of one plan label, for `TorchBackend.attend`."""

    groups: tuple[TorchGroup, ...]


class TorchBackend:
    """Gathers each group's keys and values into one buffer and attends over that.

    Used by one thread: the buffer serves every group and layer in turn.

    Args:
        shape: what the cache keeps of a token.
        page_size: tokens a page holds.
        device: where the cache lives.
    """

    def __init__(self, shape: KvShape, *, page_size: int, device: torch.device) -> None:
        self._shape = shape
        self._page_size = page_size
        self._device = device
        self._bytes_per_token = 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
        # A fresh tensor for each gather costs more than the gather: its memory is mapped anew every time.
        self._scratch = torch.empty((0, shape.head_dim), dtype=shape.dtype, device=device)

    def prepare(
        self,
        arrays: PlanArrays,
        device_arrays: DeviceArrays | None = None,  # noqa: ARG002  # What is gathered is worked out on the host.
    ) -> TorchBatch:
        """Groups the rows and builds their index tensors; see `AttentionBackend`."""
        num_tokens = len(arrays.slot_mapping)
        groups = build_row_groups(arrays, page_size=self._page_size, bytes_per_token=self._bytes_per_token)
        batch = TorchBatch(tuple(self._build_group(group, num_tokens) for group in groups))
        largest = max((group.gather_rows.numel() for group in batch.groups), default=0)
        if largest > self._scratch.shape[0]:
            # Rounded up so that contexts that grow token by token do not make a new buffer every step.
            self._scratch = self._scratch.new_empty((_round_up(largest), self._shape.head_dim))
        return batch

    def attend(self, pages: torch.Tensor, query: torch.Tensor, batch: TorchBatch, scale: float) -> torch.Tensor:
        """Attends group by group; see `AttentionBackend`."""
        heads = pages.view(-1, self._shape.head_dim)
        output: torch.Tensor | None = None
        for group in batch.groups:
            key, value = self._gather(heads, group)
            if group.span <= MAX_GROUPED_SPAN:
                attended = self._attend_grouped(query, key, value, group, scale)
            else:
                attended = self._attend_one(query, key, value, group, scale)
            if group.token_index is None:
                return attended
            if output is None:
                output = torch.empty_like(query)
            assert group.real_tokens is not None, "a group with an index has its tokens too"
            if group.real_places is not None:
                attended = attended.index_select(0, group.real_places)
            output.index_copy_(0, group.real_tokens, attended)
        assert output is not None, "a forward has tokens"
        return output

    def _gather(self, heads: torch.Tensor, group: TorchGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values, [R, H, L, head_dim] each."""
        gathered = self._scratch[: group.gather_rows.numel()]
        torch.index_select(heads, 0, group.gather_rows, out=gathered)
        size = (2, group.num_rows, self._shape.num_kv_heads, group.length, self._shape.head_dim)
        key, value = gathered.view(size).unbind(0)
        return key, value

    def _attend_grouped(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: TorchGroup, scale: float
    ) -> torch.Tensor:
        """The query heads that share a key head count as so many more query tokens: no key is repeated."""
        num_heads, head_dim = query.shape[1:]
        num_kv_heads = self._shape.num_kv_heads
        if group.token_index is not None:
            query = query.index_select(0, group.token_index)
        size = (group.num_rows, group.span, num_kv_heads, num_heads // num_kv_heads, head_dim)
        folded = query.reshape(size).permute(0, 2, 3, 1, 4).reshape(group.num_rows, num_kv_heads, -1, head_dim)
        attended = scaled_dot_product_attention(folded, key, value, attn_mask=self._fold(group, size[3]), scale=scale)
        unfolded = attended.reshape(group.num_rows, num_kv_heads, size[3], group.span, head_dim).permute(0, 3, 1, 2, 4)
        return unfolded.reshape(-1, num_heads, head_dim)

    def _attend_one(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: TorchGroup, scale: float
    ) -> torch.Tensor:
        """One row: key heads are the batch, and the query heads of each read the same keys through a stride of 0."""
        num_heads, head_dim = query.shape[1:]
        num_kv_heads = self._shape.num_kv_heads
        if group.token_index is not None:
            query = query.index_select(0, group.token_index)
        by_head = query.transpose(0, 1).reshape(num_kv_heads, num_heads // num_kv_heads, group.span, head_dim)
        size = (num_kv_heads, num_heads // num_kv_heads, group.length, head_dim)
        attended = scaled_dot_product_attention(
            by_head,
            key[0].unsqueeze(1).expand(size),
            value[0].unsqueeze(1).expand(size),
            attn_mask=group.mask,
            is_causal=group.is_causal,
            scale=scale,
        )
        return attended.reshape(num_heads, group.span, head_dim).transpose(0, 1)

    @staticmethod
    def _fold(group: TorchGroup, num_heads_per_kv_head: int) -> torch.Tensor | None:
        """A mask for folded query tokens: the same for every query head."""
        if group.mask is None or group.mask.shape[2] == 1:
            return group.mask
        return group.mask.repeat(1, 1, num_heads_per_kv_head, 1)

    def _build_group(self, group: RowGroup, num_tokens: int) -> TorchGroup:
        num_rows, length = group.slots.shape
        span = group.token_index.shape[1]
        is_whole = group.token_index.size == num_tokens and bool((np.diff(group.token_index.ravel()) == 1).all())
        is_causal = span > MAX_GROUPED_SPAN and span == length
        token_index = self._to_device(group.token_index.ravel())
        real_places = real_tokens = None
        if not is_whole:
            real_tokens = token_index
            if (group.spans < span).any():
                real_places = self._to_device(np.flatnonzero((np.arange(span) < group.spans[:, None]).ravel()))
                real_tokens = token_index[real_places]
        return TorchGroup(
            num_rows=num_rows,
            span=span,
            length=length,
            gather_rows=self._build_gather_rows(group.slots),
            token_index=None if is_whole else token_index,
            real_places=real_places,
            real_tokens=real_tokens,
            mask=None if is_causal else self._build_mask(group),
            is_causal=is_causal,
        )

    def _build_gather_rows(self, slots: np.ndarray) -> torch.Tensor:
        num_kv_heads, page_size = self._shape.num_kv_heads, self._page_size
        key_rows = self._to_device(slots + slots // page_size * page_size)
        head_index = torch.arange(num_kv_heads, device=self._device)
        by_head = key_rows.unsqueeze(1) * num_kv_heads + head_index.unsqueeze(1)
        return torch.stack((by_head, by_head + page_size * num_kv_heads)).view(-1)

    def _build_mask(self, group: RowGroup) -> torch.Tensor | None:
        span, length = group.token_index.shape[1], group.slots.shape[1]
        if span == 1 and bool((group.kv_lens == length).all()):
            return None
        # A query token reads what stands before it and itself; one beyond its row's span reads all there is.
        num_read = np.minimum(
            group.kv_lens[:, None] - group.spans[:, None] + np.arange(1, span + 1), group.kv_lens[:, None]
        )
        is_masked = np.arange(length) >= num_read[:, :, None]
        mask = torch.zeros(is_masked.shape, dtype=self._shape.dtype, device=self._device)
        return mask.masked_fill_(self._to_device(is_masked), -torch.inf).unsqueeze(1)

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)


def _round_up(count: int) -> int:
    return 1 << (count - 1).bit_length()
