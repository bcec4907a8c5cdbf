"""What a GPU's side of an engine does, on the CPU: attention that reads copied arrays, and steps that are replayed."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from engine_service import assembly
from engine_service.attention_backends.torch_backend import TorchBackend, TorchBatch
from engine_service.device_plan import DeviceArrays
from engine_service.kv_cache import KvShape
from engine_service.model_loading import LoadedModel
from planner_service.client import ARRAY_NAMES, PlanArrays
from tests.engine_service.held_copies import HeldCopyEngine, build_held_copies


@dataclass(eq=False)
class GraphBatch:
    """A batch that another step's rows can be put in."""

    num_rows: int
    max_indices: int
    inner: TorchBatch | None = None


@dataclass
class BackendCalls:
    """What was asked of a backend."""

    num_prepared: int = 0
    num_replanned: int = 0
    built: list[int] = field(default_factory=list)


class CopiedTorchBackend:
    """Attention in torch that looks at nothing but the arrays on the "device", and can be captured.

    Args:
        shape: what the cache keeps of a token.
        page_size: tokens a page holds.
    """

    def __init__(self, shape: KvShape, page_size: int) -> None:
        self.calls = BackendCalls()
        self._inner = TorchBackend(shape, page_size=page_size, device=torch.device("cpu"))

    def prepare(self, arrays: PlanArrays, device_arrays: DeviceArrays | None = None) -> GraphBatch:
        """Takes the arrays from the device."""
        assert device_arrays is not None
        self.calls.num_prepared += 1
        return GraphBatch(len(arrays.kv_lens), len(arrays.paged_kv_indices), self._build(arrays, device_arrays))

    def build_graph_batch(self, num_rows: int, max_indices: int) -> GraphBatch:
        """Returns an empty batch."""
        self.calls.built.append(num_rows)
        return GraphBatch(num_rows, max_indices)

    def replan(self, batch: GraphBatch, arrays: PlanArrays, device_arrays: DeviceArrays) -> None:
        """Puts a step's rows in; the sizes must be those it was made for."""
        assert len(device_arrays.kv_lens) == batch.num_rows
        assert len(device_arrays.paged_kv_indices) <= batch.max_indices
        self.calls.num_replanned += 1
        batch.inner = self._build(arrays, device_arrays)

    def attend(self, pages: torch.Tensor, query: torch.Tensor, batch: GraphBatch, scale: float) -> torch.Tensor:
        """Attends."""
        assert batch.inner is not None
        return self._inner.attend(pages, query, batch.inner, scale)

    def _build(self, arrays: PlanArrays, device_arrays: DeviceArrays) -> TorchBatch:
        columns = {name: getattr(device_arrays, name).numpy() for name in ARRAY_NAMES}
        return self._inner.prepare(PlanArrays(name=arrays.name, rows=arrays.rows, extent=arrays.extent, **columns))


@dataclass
class RerunCapturer:
    """Captures nothing: what is to be replayed is run again, and its result put where the first one was.

    Args:
        failure: raised instead of a capture.
    """

    failure: RuntimeError | None = None
    num_captured: int = 0
    num_replayed: int = 0

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Runs it as a capture does, the result being nothing until it is replayed."""
        if self.failure is not None:
            raise self.failure
        run()
        result = torch.full_like(run(), torch.nan)
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            result.copy_(run())

        return replay, result

    def read_memory_bytes(self) -> int:
        """Returns a figure that grows with the captures."""
        return self.num_captured << 20


@dataclass
class CopiedSide:
    """What stands in for the GPU's side of an engine.

    Args:
        copies: how copies are made.
        capturer: how steps are captured.
    """

    copies: HeldCopyEngine = field(default_factory=HeldCopyEngine)
    capturer: RerunCapturer = field(default_factory=RerunCapturer)

    def take_part(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Lets engines that are assembled from now on run on copies."""
        plan_copies = build_held_copies(self.copies)

        def choose(_wanted: str, loaded: LoadedModel, *, page_size: int, **_others: object) -> CopiedTorchBackend:
            return CopiedTorchBackend(loaded.kv_shape, page_size)

        monkeypatch.setattr(assembly, "build_plan_copies", lambda *_args, **_given: plan_copies)
        monkeypatch.setattr(assembly, "choose_attention_backend", choose)
        monkeypatch.setattr(assembly, "CudaCapturer", lambda _device: self.capturer)
