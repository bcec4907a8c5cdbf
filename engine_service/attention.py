"""Our attention as transformers calls it: it reads and writes the paged cache through the plan's arrays alone."""

from collections.abc import Sequence
from typing import Any, Generic, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

from engine_service.attention_backends.base import AttentionBackend, BatchT
from engine_service.errors import UnsupportedModelError
from engine_service.kv_cache import KvCache

ATTENTION_NAME = "ringplan"


class AttentionStep(Protocol):
    """What one forward's attention calls go to: handed through the model as the keyword `ringplan_step`."""

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        extras: dict[str, Any],
    ) -> torch.Tensor:
        """Takes one layer's attention.

        Args:
            module: the layer's attention module.
            query: [num_tokens, num_heads, head_dim].
            key: [num_tokens, num_kv_heads, head_dim], of the new tokens.
            value: the same.
            scale: what scores are multiplied by.
            extras: every other keyword the layer passed.

        Returns:
            [num_tokens, num_heads, head_dim].
        """


class PagedStep(Generic[BatchT]):
    """One planned forward over the paged cache.

    Args:
        cache: the cache.
        backend: what computes attention.
        write_rows: where the new tokens' keys and values go, from `KvCache.build_write_rows`.
        parts: for each plan label, the number of its tokens and its batch from `AttentionBackend.prepare`, in order.
    """

    def __init__(
        self,
        cache: KvCache,
        backend: AttentionBackend[BatchT],
        write_rows: tuple[torch.Tensor, torch.Tensor],
        parts: Sequence[tuple[int, BatchT]],
    ) -> None:
        self._cache = cache
        self._backend = backend
        self._write_rows = write_rows
        self._parts = parts

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        extras: dict[str, Any],  # noqa: ARG002 - looked at when the model is loaded, see model_checks.py.
    ) -> torch.Tensor:
        """Writes the new keys and values, then attends plan label by plan label; see `AttentionStep`."""
        layer = module.layer_idx
        assert isinstance(layer, int), "checked when the model is loaded"
        self._cache.write(layer, key, value, self._write_rows)
        pages = self._cache.layer(layer)
        if len(self._parts) == 1:
            return self._backend.attend(pages, query, self._parts[0][1], scale)
        outputs, start = [], 0
        for num_tokens, batch in self._parts:
            outputs.append(self._backend.attend(pages, query[start : start + num_tokens], batch, scale))
            start += num_tokens
        return torch.cat(outputs)


def attend_paged(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    ringplan_step: AttentionStep | None = None,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' attention interface calls it, once a layer, for a batch of one packed sequence.

    Args:
        module: the layer's attention module.
        query: [1, num_heads, num_tokens, head_dim].
        key: [1, num_kv_heads, num_tokens, head_dim].
        value: the same.
        attention_mask: None: transformers makes no masks for an attention it has no mask function for.
        scaling: what scores are multiplied by; None is 1 / sqrt(head_dim).
        dropout: 0: the model is in evaluation mode.
        ringplan_step: where the call goes.
        **extras: what else the layer passes; `model_checks.py` refuses models that pass what would be ignored here.

    Returns:
        [1, num_tokens, num_heads, head_dim], and no attention weights.

    Raises:
        UnsupportedModelError: the model does not hand on keyword arguments, makes a mask of its own, or has dropout.
    """
    if ringplan_step is None:
        raise UnsupportedModelError(type(module).__name__, ["attention without the keyword arguments of the forward"])
    if attention_mask is not None:
        raise UnsupportedModelError(type(module).__name__, ["an attention mask of its own"])
    if dropout:
        raise UnsupportedModelError(type(module).__name__, ["dropout"])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    packed = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]
    output = ringplan_step.attend(module, packed[0], packed[1], packed[2], scale, extras)
    return output.unsqueeze(0), None


def register_attention() -> None:
    """Makes our attention known to transformers as "ringplan". No mask function goes with it, on purpose."""
    AttentionInterface.register(ATTENTION_NAME, attend_paged)
