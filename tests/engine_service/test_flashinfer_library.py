"""`flashinfer_library.py`: FlashInfer is imported without a GPU, and its own wrappers run over kernels in torch.

What runs here is FlashInfer's Python, all of it: how it takes the arrays, where it keeps them, and what it hands to its
kernels. The kernels alone are torch. It holds for the release that is installed, and goes by what that one calls them.
"""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_service.attention_backends.flashinfer_library import FlashInferLibrary, load_flashinfer
from engine_service.attention_backends.flashinfer_schedule import Kernels
from tests.engine_service.fake_flashinfer import attend_row
from tests.engine_service.flashinfer_steps import LateSteps
from tests.engine_service.hand_plans import build_plan_arrays

CHECKED_RELEASES = ("0.6.6", "0.7.4")


class _DoneEvent:
    """An event of a device that is never late."""

    def record(self) -> None:
        """Nothing to do."""

    def query(self) -> bool:
        """It always is."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


class _Module:
    """The kernels that FlashInfer would have compiled: schedules are rows' spans and page counts, attention is torch.

    Args:
        page_size: tokens a page holds.
        kernels: "fa2" or "fa3".
    """

    def __init__(self, page_size: int, kernels: str) -> None:
        self._page_size = page_size
        self._kernels = kernels
        self.num_plans = 0
        self.num_runs = 0

    def plan(
        self, _float_workspace: torch.Tensor, workspace: torch.Tensor, pinned: torch.Tensor, *rest: Any
    ) -> list[int]:
        """As the decode module and the prefill module take it: an indptr, or spans, an indptr and lengths."""
        self.num_plans += 1
        is_prefill = isinstance(rest[1], torch.Tensor)
        indptr = rest[1] if is_prefill else rest[0]
        spans = rest[0].diff() if is_prefill else torch.ones(len(indptr) - 1, dtype=torch.int32)
        # FA2 reads no lengths here.
        lens = rest[2] if is_prefill and self._kernels == "fa3" else torch.zeros(len(spans), dtype=torch.int32)
        values = torch.cat([torch.tensor([len(spans)]), spans, indptr.diff(), lens]).to(torch.int32).view(torch.uint8)
        pinned[: len(values)] = values
        workspace[: len(values)] = pinned[: len(values)]
        return [len(values), 0]

    def run(self, _float: torch.Tensor, workspace: torch.Tensor, plan_info: list[int], *rest: Any) -> None:
        """The decode module's: query, keys, values, indptr, indices, last lengths, output, lse, ..., scale, ropes."""
        q, keys, values, indptr, indices, last, out, _lse, *_, scale, _rope_scale, _rope_theta = rest
        self._attend(workspace, plan_info, (q, keys, values, indptr, indices, last, out), scale, is_causal=False)

    def paged_run(self, _float: torch.Tensor, workspace: torch.Tensor, plan_info: list[int], *rest: Any) -> None:
        """The prefill module's, which has the spans' indptr too, and whether it is causal."""
        q, keys, values, _qo_indptr, indptr, indices, last, out, _lse, mask_mode = rest[:10]
        # Layout, window, dependent launch, mask, its indptr, slopes, prefix, positions, items, soft cap.
        scale = rest[20]
        arrays = (q, keys, values, indptr, indices, last, out)
        self._attend(workspace, plan_info, arrays, scale, is_causal=mask_mode == 1)

    def _attend(
        self,
        workspace: torch.Tensor,
        plan_info: list[int],
        arrays: tuple[torch.Tensor, ...],
        scale: float,
        *,
        is_causal: bool,
    ) -> None:
        self.num_runs += 1
        q, keys, values, indptr, indices, last, out = arrays
        num_rows, *schedule = workspace[: plan_info[0]].view(torch.int32).tolist()
        spans, counts, lens = schedule[:num_rows], schedule[num_rows : 2 * num_rows], schedule[2 * num_rows :]
        token = 0
        for row, (span, count) in enumerate(zip(spans, counts, strict=True)):
            length = lens[row] or max(0, count - 1) * self._page_size + int(last[row])
            pages = indices[int(indptr[row]) :][:count].long()
            part = slice(token, token + span)
            row_pages = torch.stack([keys[pages], values[pages]], dim=1)
            out[part] = attend_row(q[part], row_pages, length, scale, is_causal=is_causal)
            token += span


@pytest.fixture
def flashinfer() -> Any:
    """The package."""
    package = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    if package.__version__ not in CHECKED_RELEASES:
        pytest.skip(f"its insides are stood in for as {CHECKED_RELEASES} have them, not {package.__version__}")
    return package


@pytest.fixture
def modules(flashinfer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, _Module]]:
    """Stands in for the compiled modules and for what needs a GPU; the modules that were asked for, by kernel."""
    made: dict[str, _Module] = {}
    empty = torch.empty

    def make_pageable(*args: Any, **kwargs: Any) -> torch.Tensor:
        return empty(*args, **{**kwargs, "pin_memory": False})

    monkeypatch.setattr(torch, "empty", make_pageable)
    for name in ("decode", "prefill"):
        module = importlib.import_module(f"flashinfer.{name}")
        monkeypatch.setattr(module, "device_support_pdl", lambda _device: False)
        monkeypatch.setattr(
            module, "get_batch_prefill_module", lambda backend, *_: made.setdefault(backend, _Module(4, backend))
        )
    decode = importlib.import_module("flashinfer.decode")
    monkeypatch.setattr(decode, "get_batch_decode_module", lambda *_: made.setdefault("cores", _Module(4, "fa2")))
    return made


@pytest.fixture
def library(flashinfer: Any) -> FlashInferLibrary:
    """The wrappers, with events that are never waited for."""
    return FlashInferLibrary(
        flashinfer.__version__,
        flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        _DoneEvent,
    )


@pytest.mark.parametrize("num_heads", [4, 8])
@pytest.mark.parametrize("kernels", Kernels)
@pytest.mark.parametrize("verifies", [False, True])
def test_the_wrappers_give_what_the_reference_gives(
    num_heads: int, kernels: Kernels, verifies: bool, modules: dict[str, _Module], library: FlashInferLibrary
) -> None:
    """Kept schedules and fresh ones, decode and prefill, each layer with a scale of its own."""
    steps = LateSteps(4, kernels, verifies=verifies, library=library, num_heads=num_heads)
    for length in range(3, 10):
        # Whether the caller is in inference mode makes no difference.
        with torch.inference_mode(length % 2 == 1):
            steps.run([[(length, 1), (7, 1), None]])
    for place, rows in enumerate(([(0, 9)], [(3, 5), (6, 0), None, (8, 1)], [(5, 3), (2, 4), None, (6, 3)])):
        with torch.inference_mode(place < 2):
            steps.run([rows, [(2, 1)]])
    steps.check()
    assert "unequal" not in steps.observer.outcomes
    num_spared = steps.observer.outcomes.count("kept")
    assert sum(module.num_plans for module in modules.values()) == len(steps.observer.outcomes) - num_spared
    # Of lengths 4 to 10 those from 6 to 8 and 10; and the second label's row, twice, which is all that serves FA3 too.
    assert num_spared == (0 if verifies else {Kernels.FA2: 6, Kernels.FA3: 2}[kernels])
    # Two query heads a key head decode without tensor cores, four with them, by the same kernels as prefill.
    expected = {kernels.value} if kernels is Kernels.FA3 or num_heads == 8 else {"fa2", "cores"}
    assert modules.keys() == expected


@pytest.mark.parametrize("num_heads", [4, 8])
def test_a_wrapper_for_graphs_gives_what_the_reference_gives(
    num_heads: int, modules: dict[str, _Module], library: FlashInferLibrary
) -> None:
    """From buffers that stay where they are, as a replay would read them, whether a schedule was kept or made."""
    steps = LateSteps(4, library=library, num_heads=num_heads)
    batch = steps.backend.build_graph_batch(3, 24)
    places = batch.indices.data_ptr(), batch.last_page_len.data_ptr()
    for length in range(3, 10):
        rows = [(length, 1), None if length > 7 else (6, 1), (2, 1)]
        arrays = build_plan_arrays("main", steps.build_arrays(rows))
        steps.backend.replan(batch, arrays, steps.send(arrays))
        query = steps.draw_query(arrays)
        steps.expect(steps.backend.attend(steps.pages, query, batch, 0.3), query, rows, arrays, 0.3)
        wrapper = batch.wrapper._wrapper
        found = wrapper._paged_kv_indices_buf.data_ptr(), wrapper._paged_kv_last_page_len_buf.data_ptr()
        assert found == places
        assert wrapper._paged_kv_indptr_buf.tolist() == arrays.paged_kv_indptr.tolist()
    steps.check()
    assert steps.observer.outcomes == ["made", "made", "kept", "kept", "kept", "made", "kept"]
    assert modules.keys() == ({"fa2"} if num_heads == 8 else {"cores"})


def test_flashinfer_is_imported_only_when_it_is_asked_for() -> None:
    """An engine on a CPU starts as fast as before, and where FlashInfer is not installed it starts at all."""
    program = (
        "import sys\n"
        "import engine_service.attention_backends.flashinfer_backend\n"
        "assert 'torch' in sys.modules\n"
        "assert 'flashinfer' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=50)


def test_flashinfer_is_imported_without_a_gpu() -> None:
    """It is asked for its wrappers alone, and those are classes."""
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    library = load_flashinfer()
    assert isinstance(library.decode_wrapper, type)
    assert isinstance(library.prefill_wrapper, type)
    assert library.version
    assert library.make_event is torch.cuda.Event


def test_a_package_that_does_not_load_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python does."""
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ImportError):
        load_flashinfer()


def test_a_library_is_what_the_package_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names that FlashInfer gives them."""
    package = SimpleNamespace(
        __version__="1.2", BatchDecodeWithPagedKVCacheWrapper=int, BatchPrefillWithPagedKVCacheWrapper=str
    )
    monkeypatch.setitem(sys.modules, "flashinfer", package)  # type: ignore[arg-type]
    library = load_flashinfer()
    assert (library.version, library.decode_wrapper, library.prefill_wrapper) == ("1.2", int, str)
