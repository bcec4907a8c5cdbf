"""Steps of a `FlashInferBackend` on a GPU that runs late, compared with `TorchBackend` on the same arrays."""

from collections.abc import Sequence

import numpy as np
import torch

from engine_service.attention_backends.flashinfer_backend import FlashInferBackend, FlashInferBatch
from engine_service.attention_backends.flashinfer_library import FlashInferLibrary
from engine_service.attention_backends.flashinfer_schedule import Kernels
from engine_service.attention_backends.torch_backend import TorchBackend
from engine_service.device_plan import DeviceArrays
from engine_service.kv_cache import KvShape
from planner_service.client import ARRAY_NAMES, PlanArrays
from tests.engine_service.fake_flashinfer import LateGpu
from tests.engine_service.hand_plans import build_plan_arrays
from tests.reference.naive_planner import Arrays, append_padding_row, append_row, empty_arrays

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 64
NUM_PAGES = 40
SHAPE = KvShape(num_layers=1, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32)
CPU = torch.device("cpu")

# (tokens before the step, span) of each row; None is a padding row.
Row = tuple[int, int] | None


class CountingObserver:
    """Notes what became of each schedule."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []

    def schedule_made(self) -> None:
        """See `ScheduleObserver`."""
        self.outcomes.append("made")

    def schedule_kept(self) -> None:
        """See `ScheduleObserver`."""
        self.outcomes.append("kept")

    def schedule_verified(self, *, is_equal: bool) -> None:
        """See `ScheduleObserver`."""
        self.outcomes.append("equal" if is_equal else "unequal")


class LateSteps:
    """Steps whose results are looked at when all have been put on the stream.

    Args:
        page_size: tokens a page holds.
        kernels: FlashInfer's.
        verifies: whether schedules that could be kept are compared with fresh ones.
        release: the FlashInfer release whose parameters the wrappers take.
        library: what to take in place of wrappers that run late.
        num_heads: query heads.
    """

    def __init__(
        self,
        page_size: int,
        kernels: Kernels = Kernels.FA2,
        *,
        verifies: bool = False,
        release: str = "0.7.4",
        library: FlashInferLibrary | None = None,
        num_heads: int = NUM_HEADS,
    ) -> None:
        self.gpu = LateGpu()
        self.observer = CountingObserver()
        self.page_size = page_size
        self._num_heads = num_heads
        self.backend = FlashInferBackend(
            library or self.gpu.build_library(release),
            SHAPE,
            num_heads=num_heads,
            page_size=page_size,
            device=CPU,
            workspace_bytes=64,
            kernels=kernels,
            observer=self.observer,
            verifies=verifies,
        )
        self._torch_backend = TorchBackend(SHAPE, page_size=page_size, device=CPU)
        self._random = np.random.default_rng(0)
        self._generator = torch.Generator().manual_seed(0)
        size = (NUM_PAGES, 2, page_size, NUM_KV_HEADS, HEAD_DIM)
        self.pages = torch.randn(size, generator=self._generator)
        self._results: list[tuple[torch.Tensor, torch.Tensor, list[int]]] = []

    def build_arrays(self, rows: Sequence[Row]) -> Arrays:
        """Builds the arrays of a plan label whose rows have any pages."""
        arrays = empty_arrays()
        for row in rows:
            if row is None:
                append_padding_row(arrays, self.page_size, 1)
            else:
                num_pages = -(-sum(row) // self.page_size)
                pages = self._random.permutation(np.arange(1, NUM_PAGES))[:num_pages]
                append_row(arrays, self.page_size, pages.tolist(), *row)
        return arrays

    def send(self, arrays: PlanArrays) -> DeviceArrays:
        """Returns a plan label's arrays on the device."""
        return DeviceArrays(
            arrays.name,
            **{name: self.gpu.adopt(torch.from_numpy(np.array(getattr(arrays, name)))) for name in ARRAY_NAMES},
        )

    def run(self, labels: Sequence[Sequence[Row]], *, is_sent: bool = True) -> None:
        """Puts a step on the stream: its schedules, then two layers, each over all plan labels.

        Args:
            labels: the rows of each plan label.
            is_sent: whether the plan's arrays have been copied to the device for it.
        """
        plans = [build_plan_arrays(f"label-{place}", self.build_arrays(rows)) for place, rows in enumerate(labels)]
        batches = [self.backend.prepare(arrays, self.send(arrays) if is_sent else None) for arrays in plans]
        for scale in (0.3, 0.5):
            for rows, arrays, batch in zip(labels, plans, batches, strict=True):
                query = self.draw_query(arrays)
                self.expect(self.backend.attend(self.pages, query, batch, scale), query, rows, arrays, scale)
        for arrays in plans:
            self.overwrite(arrays)

    def draw_query(self, arrays: PlanArrays) -> torch.Tensor:
        """Returns queries for a plan label's tokens, [num_tokens, heads, head_dim]; in memory heads come first."""
        size = (self._num_heads, len(arrays.slot_mapping), HEAD_DIM)
        return torch.randn(size, generator=self._generator).transpose(0, 1)

    @torch.inference_mode()
    def expect(
        self, found: torch.Tensor, query: torch.Tensor, rows: Sequence[Row], arrays: PlanArrays, scale: float
    ) -> None:
        """Notes what a result is to be, padding rows apart, once the stream has done its work."""
        starts = arrays.qo_indptr.tolist()
        real = [token for place, row in enumerate(rows) if row for token in range(starts[place], starts[place + 1])]
        expected = self._torch_backend.attend(self.pages, query, self._torch_backend.prepare(arrays), scale)
        self._results.append((found, expected.clone(), real))

    def overwrite(self, arrays: PlanArrays) -> None:
        """Writes another plan over a buffer set that has been released."""
        for name in ARRAY_NAMES:
            values = getattr(arrays, name)
            values.flags.writeable = True
            values[:] = 12_345

    def check(self) -> None:
        """Lets the stream do its work and compares every result."""
        self.gpu.finish()
        assert self._results
        for found, expected, real in self._results:
            torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-5)


class GraphSteps(LateSteps):
    """Steps of a captured decode batch.

    Args:
        num_rows: rows of the batch.
        page_size: tokens a page holds.
        verifies: as `LateSteps` has it.
        release: the same.
    """

    def __init__(self, num_rows: int, page_size: int, *, verifies: bool = False, release: str = "0.7.4") -> None:
        super().__init__(page_size, verifies=verifies, release=release)
        self.batch: FlashInferBatch = self.backend.build_graph_batch(num_rows, 8 * num_rows)
        self.replan([None] * num_rows)
        self._query = torch.zeros((num_rows, NUM_HEADS, HEAD_DIM))
        self.gpu.graph = []
        self._output = self.backend.attend(self.pages, self._query, self.batch, 0.3)
        self._graph, self.gpu.graph = self.gpu.graph, None

    def replan(self, rows: Sequence[Row]) -> PlanArrays:
        """Plans the batch for a step, and returns the step's arrays."""
        # The backend's own copies between buffers of the device are torch's, which are not late here.
        self.gpu.finish()
        arrays = build_plan_arrays("main", self.build_arrays(rows))
        self.backend.replan(self.batch, arrays, self.send(arrays))
        return arrays

    def replay(self, rows: Sequence[Row]) -> None:
        """Puts a step on the stream and notes what it is to give."""
        arrays = self.replan(rows)
        query = self.draw_query(arrays)
        self.gpu.copy(self._query, query)
        self.gpu.replay(self._graph)
        found = torch.zeros_like(self._output)
        self.gpu.copy(found, self._output)
        self.expect(found, query, rows, arrays, 0.3)
        self.overwrite(arrays)
