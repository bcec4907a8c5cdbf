"""The side of an engine that is a GPU's, and what stands in for it on the CPU, so that these tests run anywhere."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from engine_service import device_setup
from engine_service.attention_backends import flashinfer_library
from engine_service.attention_backends.base import AttentionBackend
from engine_service.attention_backends.flashinfer_backend import FlashInferBackend
from engine_service.attention_backends.torch_backend import TorchBackend
from engine_service.copy_fence import CopyFence, Event
from engine_service.cuda_graphs import CudaCapturer, GraphCapturer
from engine_service.kv_cache import KvShape
from engine_service.pinned_memory import CudaRegistrar, PinnedRegions
from engine_service.plan_copies import CudaCopyEngine, PlanCopies
from tests.engine_service.copied_backend import CopiedSide, CopiedTorchBackend, RerunCapturer
from tests.engine_service.held_copies import HeldCopyEngine, build_held_copies

# Some milliseconds of a GPU: longer than the host takes for a step.
SLEEP_CYCLES = 10_000_000
NUM_HELD_QUERIES = 6
WORKSPACE_BYTES = 128 << 20
COPY_TIMEOUT_SECONDS = 20.0


class LateCudaCopyEngine(CudaCopyEngine):
    """Copies that come late: something else keeps their stream busy before each."""

    def start(self, source: torch.Tensor, target: torch.Tensor, after: Event | None) -> Event:
        """Starts a copy behind the other work."""
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(SLEEP_CYCLES)
        return super().start(source, target, after)


@dataclass(frozen=True)
class Side:
    """Where models run.

    Args:
        device: a GPU, or the CPU with what stands in for one.
    """

    device: torch.device

    @property
    def is_gpu(self) -> bool:
        """Whether it is the real thing."""
        return self.device.type == "cuda"

    def build_backend(self, name: str, shape: KvShape, *, num_heads: int, page_size: int) -> AttentionBackend[Any]:
        """Returns attention by "torch" or "flashinfer"; on the CPU the second is torch on nothing but copies."""
        if name == "torch":
            return TorchBackend(shape, page_size=page_size, device=self.device)
        if not self.is_gpu:
            return CopiedTorchBackend(shape, page_size)
        return FlashInferBackend(
            flashinfer_library.load_flashinfer(),
            shape,
            num_heads=num_heads,
            page_size=page_size,
            device=self.device,
            workspace_bytes=WORKSPACE_BYTES,
        )

    def build_capturer(self) -> GraphCapturer:
        """Returns what captures work."""
        return CudaCapturer(self.device) if self.is_gpu else RerunCapturer()

    def build_late_copies(
        self, on_pinned_changed: Callable[[bool], None], *, timeout_seconds: float = COPY_TIMEOUT_SECONDS
    ) -> PlanCopies:
        """Returns copies that are made later than the host would need them."""
        if not self.is_gpu:
            on_pinned_changed(True)
            return build_held_copies(HeldCopyEngine(NUM_HELD_QUERIES, is_read=False), timeout_seconds=timeout_seconds)
        regions = PinnedRegions(CudaRegistrar(self.device), on_pinned_changed)
        return PlanCopies(LateCudaCopyEngine(self.device), regions, CopyFence(timeout_seconds))

    def prepare_engines(self, monkeypatch: pytest.MonkeyPatch, *, is_late: bool) -> dict[str, object]:
        """Makes engines that are assembled from now on run here; returns the settings that they need.

        Args:
            monkeypatch: undoes it.
            is_late: whether copies of plans come late.
        """
        if not self.is_gpu:
            CopiedSide(HeldCopyEngine(NUM_HELD_QUERIES if is_late else 0)).take_part(monkeypatch)
        elif is_late:
            monkeypatch.setattr(device_setup, "CudaCopyEngine", LateCudaCopyEngine)
        return {"device": self.device.type, "flashinfer_workspace_bytes": WORKSPACE_BYTES}
