"""Runs one planned forward of the model."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from engine_service.attention import PagedStep
from engine_service.attention_backends.base import AttentionBackend
from engine_service.attention_backends.torch_backend import TorchBackend
from engine_service.kv_cache import KvCache
from engine_service.model_loading import LoadedModel
from planner_service.client import Plan


class ModelRunner:
    """A loaded model over a paged KV cache. Used by one thread.

    Args:
        loaded: the model.
        num_pages: pages of the cache, the sink page included.
        page_size: tokens a page holds.
        backend: what computes attention; None is torch.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_pages: int,
        page_size: int,
        backend: AttentionBackend[Any] | None = None,
    ) -> None:
        self.loaded = loaded
        self.num_pages = num_pages
        self.page_size = page_size
        self.kv_bytes_per_page = loaded.kv_shape.bytes_per_page(page_size)
        self.cache = KvCache(loaded.kv_shape, num_pages=num_pages, page_size=page_size, device=loaded.device)
        self.backend = backend or TorchBackend(loaded.kv_shape, page_size=page_size, device=loaded.device)

    def forward(self, token_ids: Mapping[str, torch.Tensor], plan: Plan) -> dict[str, torch.Tensor]:
        """Runs one step: page copies before, the model, page copies after.

        The plan's arrays are read before the model runs and not afterwards, page copies apart.

        Args:
            token_ids: for each plan label of the plan its tokens, int64 [num_tokens], row after row.
            plan: the step's plan.

        Returns:
            For each plan label the logits of each row's last query token, float32 [num_rows, vocab_size]. Those of a
            padding row or of one with span 0 mean nothing.

        Raises:
            ValueError: the tokens are not those of the plan.
        """
        return self.forward_with_places(token_ids, plan, ())[0]

    @torch.inference_mode()
    def forward_with_places(
        self, token_ids: Mapping[str, torch.Tensor], plan: Plan, places: Sequence[tuple[str, Sequence[int]]]
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Runs one step as `forward` does, and returns the logits of further tokens.

        Args:
            token_ids: see `forward`.
            plan: the step's plan.
            places: which further tokens: a plan label and places among its tokens; a label may come several times.

        Returns:
            What `forward` returns, and the further logits, float32 [tokens in all places, vocab_size].

        Raises:
            ValueError: the tokens are not those of the plan.
        """
        labels = plan.labels
        if token_ids.keys() != labels.keys():
            raise ValueError(f"tokens for plan labels {sorted(token_ids)}, the plan has {sorted(labels)}")
        for name, arrays in labels.items():
            if token_ids[name].shape != arrays.slot_mapping.shape:
                raise ValueError(
                    f"{tuple(token_ids[name].shape)} tokens for {name!r}, the plan has {arrays.slot_mapping.shape}"
                )
        self.cache.copy_pages(plan.page_copies_before)
        logits = self._run_model(token_ids, plan, places)
        self.cache.copy_pages(plan.page_copies_after)
        *parts, further = torch.split(
            logits, [*[len(arrays.kv_lens) for arrays in labels.values()], sum(len(some) for _, some in places)]
        )
        return dict(zip(labels, parts, strict=True)), further

    def _run_model(
        self, token_ids: Mapping[str, torch.Tensor], plan: Plan, places: Sequence[tuple[str, Sequence[int]]]
    ) -> torch.Tensor:
        device = self.loaded.device
        arrays = list(plan.labels.values())
        tokens = torch.cat([token_ids[one.name].to(device) for one in arrays]).unsqueeze(0)
        last_tokens, start = [], 0
        starts: dict[str, int] = {}
        for one in arrays:
            # A row without query tokens has no last one; any token's logits do for it.
            last_tokens.append(np.maximum(one.qo_indptr[1:].astype(np.int64) - 1, 0) + start)
            starts[one.name] = start
            start += len(one.slot_mapping)
        last_tokens += [np.array(some, dtype=np.int64) + starts[name] for name, some in places]
        if not start:
            return torch.zeros((sum(map(len, last_tokens)), self.loaded.vocab_size), device=device)
        positions = np.concatenate([one.positions for one in arrays]).astype(np.int64)
        slots = np.concatenate([one.slot_mapping for one in arrays])
        parts = [(len(one.slot_mapping), self.backend.prepare(one)) for one in arrays if len(one.slot_mapping)]
        keep = np.minimum(np.concatenate(last_tokens), start - 1)
        return self.loaded.run(
            tokens,
            torch.from_numpy(positions).to(device).unsqueeze(0),
            torch.from_numpy(keep).to(device),
            PagedStep(self.cache, self.backend, self.cache.build_write_rows(slots), parts),
        )
