"""Runs one planned forward of the model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from engine_service.attention import PagedStep
from engine_service.attention_backends.base import AttentionBackend, GraphBackend
from engine_service.attention_backends.torch_backend import TorchBackend
from engine_service.cuda_graphs import DecodeGraphs, GraphCapturer
from engine_service.kv_cache import KvCache
from engine_service.model_loading import LoadedModel
from engine_service.plan_copies import PlanCopies
from planner_service.client import Plan


class ModelRunner:
    """A loaded model over a paged KV cache. Used by one thread.

    Args:
        loaded: the model.
        num_pages: pages of the cache, the sink page included.
        page_size: tokens a page holds.
        backend: what computes attention; None is torch.
        copies: copies plans to the device; None where the model reads them where they are, on a CPU.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_pages: int,
        page_size: int,
        backend: AttentionBackend[Any] | None = None,
        copies: PlanCopies | None = None,
    ) -> None:
        self.loaded = loaded
        self.num_pages = num_pages
        self.page_size = page_size
        self.kv_bytes_per_page = loaded.kv_shape.bytes_per_page(page_size)
        self.cache = KvCache(loaded.kv_shape, num_pages=num_pages, page_size=page_size, device=loaded.device)
        self.backend = backend or TorchBackend(loaded.kv_shape, page_size=page_size, device=loaded.device)
        self.graphs: DecodeGraphs | None = None
        self.copies = copies

    def use_graphs(self, capturer: GraphCapturer, on_decode: Callable[[bool], None]) -> bool:
        """Runs decode steps as graphs from now on, if the backend can be captured.

        Args:
            capturer: captures them.
            on_decode: told of each decode step of a request whether it was replayed.

        Returns:
            Whether it does.
        """
        if self.copies is not None and isinstance(self.backend, GraphBackend):
            self.graphs = DecodeGraphs(self.loaded, self.cache, self.backend, capturer, on_decode)
        return self.graphs is not None

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
        tokens = torch.cat([token_ids[one.name].to(device) for one in arrays])
        if not len(tokens):
            num_kept = sum(len(one.kv_lens) for one in arrays) + sum(len(some) for _, some in places)
            return torch.zeros((num_kept, self.loaded.vocab_size), device=device)
        if self.copies is not None:
            return self._run_copied(self.copies, tokens, plan, places)
        positions = np.concatenate([one.positions for one in arrays]).astype(np.int64)
        slots = np.concatenate([one.slot_mapping for one in arrays])
        parts = [(len(one.slot_mapping), self.backend.prepare(one)) for one in arrays if len(one.slot_mapping)]
        return self.loaded.run(
            tokens.unsqueeze(0),
            torch.from_numpy(positions).to(device).unsqueeze(0),
            torch.from_numpy(_find_kept_tokens(plan, places)).to(device),
            PagedStep(self.cache, self.backend, self.cache.build_write_rows(slots), parts),
        )

    def _run_copied(
        self, copies: PlanCopies, tokens: torch.Tensor, plan: Plan, places: Sequence[tuple[str, Sequence[int]]]
    ) -> torch.Tensor:
        """Runs the model on the plan's copy on the device; what is read on the host is read before it is launched."""
        with copies.reading(plan) as device_plan:
            keep = torch.from_numpy(_find_kept_tokens(plan, places))
            copies.wait(device_plan)
            step = self.graphs.try_fill(tokens, device_plan) if self.graphs is not None and not places else None
            if step is not None:
                copies.note_host_reads(device_plan)
                return step.run()
            parts = [
                (len(one.slot_mapping), self.backend.prepare(one, device_plan.labels[one.name]))
                for one in plan.labels.values()
                if len(one.slot_mapping)
            ]
            copies.note_host_reads(device_plan)
            arrays = device_plan.labels.values()
            slots = torch.cat([one.slot_mapping for one in arrays])
            return self.loaded.run(
                tokens.unsqueeze(0),
                torch.cat([one.positions for one in arrays]).long().unsqueeze(0),
                # This stream waits for the plan's copy: the host would too.
                keep.to(tokens.device, non_blocking=True),
                PagedStep(self.cache, self.backend, self.cache.find_write_rows(slots), parts),
            )


def _find_kept_tokens(
    plan: Plan, places: Sequence[tuple[str, Sequence[int]]]
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Returns the tokens whose logits are wanted: each row's last one, and those at further places."""
    kept, start = [], 0
    starts: dict[str, int] = {}
    for one in plan.labels.values():
        # A row without query tokens has no last one; any token's logits do for it.
        kept.append(np.maximum(one.qo_indptr[1:].astype(np.int64) - 1, 0) + start)
        starts[one.name] = start
        start += len(one.slot_mapping)
    kept += [np.array(some, dtype=np.int64) + starts[name] for name, some in places]
    tokens: np.ndarray[tuple[int], np.dtype[np.int64]] = np.minimum(np.concatenate(kept), start - 1)
    return tokens
