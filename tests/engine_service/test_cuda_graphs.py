"""`cuda_graphs.py`: which steps are captured, once each, and what is replayed. No GPU: captured work is run again."""

import gc
import inspect
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine_service import cuda_graphs
from engine_service.cuda_graphs import describe_shapes, find_graph_shape, list_batch_sizes
from engine_service.model_loading import LoadedModel, load_model
from engine_service.model_runner import ModelRunner
from engine_service.step_layout import count_padding_rows
from engine_service.warm_up import build_padding_plan
from planner_service.client import Plan
from tests.engine_service.copied_backend import CopiedTorchBackend, RerunCapturer
from tests.engine_service.hand_plans import PAD, HandPlanner
from tests.engine_service.held_copies import HeldCopyEngine, build_held_copies
from tests.engine_service.tiny_models import save_tiny_checkpoint

PAGE_SIZE = 4
NUM_PAGES = 41


class ReadStorages(TorchDispatchMode):
    """Notes the memory that work reads and has not made itself."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[int, StorageWeakRef] = {}
        self._made: list[torch.UntypedStorage] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operation."""
        made = {storage._cdata for storage in self._made}
        for given in tree_leaves((args, kwargs)):
            if isinstance(given, torch.Tensor) and (storage := given.untyped_storage())._cdata not in made:
                self.read.setdefault(storage._cdata, StorageWeakRef(storage))
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor) and (storage := one.untyped_storage())._cdata not in self.read:
                self._made.append(storage)
        return result


class ForgetfulCapturer(RerunCapturer):
    """Holds nothing of what it has captured, as a graph does not; `read` lists the memory that the work reads."""

    read: Sequence[StorageWeakRef] = ()

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Runs the work once."""
        with ReadStorages() as mode:
            result = run()
        self.read = list(mode.read.values())
        return lambda: None, result


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A tiny model."""
    return load_model(save_tiny_checkpoint("llama", tmp_path_factory.mktemp("model")))


def open_runner(loaded: LoadedModel) -> ModelRunner:
    """Returns a model that reads copies of plans."""
    return ModelRunner(
        loaded,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        backend=CopiedTorchBackend(loaded.kv_shape, PAGE_SIZE),
        copies=build_held_copies(HeldCopyEngine()),
    )


def run_padding(runner: ModelRunner, num_rows: int, *, step_id: int = 0) -> torch.Tensor:
    """Runs a decode step of padding rows; with a step id it counts as a request's."""
    plan = build_padding_plan((1,) * num_rows, PAGE_SIZE)
    if step_id:
        plan.step_id, plan.region_id = step_id, 1
    return runner.forward({"main": torch.arange(num_rows)}, plan)["main"]


def plan_rows(*spans: int, num_padding: int = 0) -> Plan:
    """Returns the plan of these rows and of padding rows behind them."""
    rows = [(stream, span) for stream, span in enumerate(spans)] + [(PAD, 1)] * num_padding
    return HandPlanner(page_size=PAGE_SIZE, num_pages=NUM_PAGES).plan({"main": rows})


@pytest.mark.parametrize("num_rows", [1, 2, 4, 8, 16])
def test_a_decode_step_of_a_batch_size_is_captured(num_rows: int) -> None:
    """Rows of span 1, 1, 2, 4, 8, ... of them."""
    assert find_graph_shape(plan_rows(*[1] * num_rows)) == (("main", num_rows),)


def test_padding_rows_bring_a_step_to_its_size() -> None:
    """5 rows and 3 padding rows are a step of 8, as 8 rows are."""
    assert find_graph_shape(plan_rows(*[1] * 5, num_padding=3)) == (("main", 8),)


@pytest.mark.parametrize("spans", [(1, 1, 1), (5,), (2, 1), (2, 0), (0, 2, 1, 1), (3, 1, 1, 1)])
def test_other_steps_are_not_captured(spans: tuple[int, ...]) -> None:
    """Sizes between, prompts, and rows that have as many tokens as there are rows, though not one each."""
    assert find_graph_shape(plan_rows(*spans)) is None


def test_every_label_counts() -> None:
    """A step of several labels has the size of each, in their order; one label that is no decode batch is enough."""
    planner = HandPlanner(page_size=PAGE_SIZE, num_pages=NUM_PAGES)
    plan = planner.plan({"main": [(0, 1), (1, 1)], "cfg_text": [(2, 1)]})
    assert find_graph_shape(plan) == (("main", 2), ("cfg_text", 1))
    assert find_graph_shape(planner.plan({"main": [(0, 1), (1, 1)], "cfg_text": [(2, 3)]})) is None


@pytest.mark.parametrize("max_rows", [1, 2, 3, 7, 8, 9, 32, 100])
def test_the_sizes_are_those_that_batches_are_padded_to(max_rows: int) -> None:
    """Every batch that can come has its size in the list, and the list has no other; the largest comes first."""
    padded = {num_rows + count_padding_rows(num_rows) for num_rows in range(1, max_rows + 1)}
    assert list_batch_sizes(max_rows) == sorted(padded, reverse=True)


def test_a_size_is_captured_once_and_replayed_after_that(loaded: LoadedModel) -> None:
    """The first step of a size is a miss and is captured, later ones are hits; warming up counts as neither."""
    runner, capturer, hits = open_runner(loaded), RerunCapturer(), list[bool]()
    assert runner.use_graphs(capturer, hits.append)
    run_padding(runner, 4)
    assert hits == []
    for number, num_rows in enumerate((4, 2, 2, 4), 1):
        run_padding(runner, num_rows, step_id=number)
    assert hits == [True, False, True, True]
    assert runner.graphs is not None
    assert runner.graphs.shapes == [(("main", 4),), (("main", 2),)]
    assert (capturer.num_captured, capturer.num_replayed) == (2, 5)


def test_a_replayed_step_gives_what_an_eager_one_gives(loaded: LoadedModel) -> None:
    """Logits of the same tokens and plan, with graphs and without."""
    eager, graphed = open_runner(loaded), open_runner(loaded)
    graphed.use_graphs(RerunCapturer(), lambda _was_replayed: None)
    for _ in range(3):
        torch.testing.assert_close(run_padding(graphed, 4), run_padding(eager, 4), rtol=0, atol=0)


def test_all_that_a_captured_step_reads_outlives_the_capture(loaded: LoadedModel) -> None:
    """A graph keeps addresses and no tensors: memory that is freed after the capture would be others' at the replay."""
    capturer = ForgetfulCapturer()
    runner = open_runner(loaded)
    runner.use_graphs(capturer, lambda _was_replayed: None)
    run_padding(runner, 4)
    gc.collect()
    assert len(capturer.read) > 10, "weights, the cache and the step's own"
    assert not any(storage.expired() for storage in capturer.read)


def test_what_was_captured_goes_with_its_model(loaded: LoadedModel) -> None:
    """Without a cycle, which would keep the device's memory until Python happens to look for one."""
    runner = open_runner(loaded)
    runner.use_graphs(ForgetfulCapturer(), lambda _was_replayed: None)
    run_padding(runner, 4)
    cache, graphs = weakref.ref(runner.cache), weakref.ref(runner.graphs)
    gc.disable()
    try:
        del runner
        assert cache() is None
        assert graphs() is None
    finally:
        gc.enable()


def test_steps_with_further_places_run_without_graphs(loaded: LoadedModel) -> None:
    """A graph keeps one logit a row; who wants more gets them."""
    runner, capturer = open_runner(loaded), RerunCapturer()
    runner.use_graphs(capturer, lambda _was_replayed: None)
    plan = build_padding_plan((1, 1), PAGE_SIZE)
    rows, further = runner.forward_with_places({"main": torch.arange(2)}, plan, [("main", [1, 0])])
    assert capturer.num_captured == 0
    torch.testing.assert_close(further, rows["main"].flip(0), rtol=0, atol=0)


def test_no_more_shapes_are_captured_than_the_limit(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it steps run as they would without graphs, and those that were captured are still replayed."""
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 2)
    runner, capturer, hits = open_runner(loaded), RerunCapturer(), list[bool]()
    runner.use_graphs(capturer, hits.append)
    for number, num_rows in enumerate((1, 2, 4, 4, 2), 1):
        assert run_padding(runner, num_rows, step_id=number).isfinite().all()
    assert hits == [False, False, False, False, True]
    assert capturer.num_captured == 2


def test_a_failure_turns_graphs_off(loaded: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    """The step runs without a graph, and so do all later ones; the log says which one it was."""
    runner = open_runner(loaded)
    runner.use_graphs(RerunCapturer(RuntimeError("not permitted")), lambda _was_replayed: None)
    for number in range(1, 4):
        assert run_padding(runner, 2, step_id=number).isfinite().all()
    assert caplog.text.count("after one with main 2") == 1


def test_a_backend_that_cannot_be_captured_uses_no_graphs(loaded: LoadedModel) -> None:
    """Attention in torch has other shapes each step."""
    runner = ModelRunner(loaded, num_pages=NUM_PAGES, page_size=PAGE_SIZE, copies=build_held_copies(HeldCopyEngine()))
    assert not runner.use_graphs(RerunCapturer(), lambda _was_replayed: None)
    assert runner.graphs is None


def test_room_is_made_for_the_longest_context(loaded: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    """A row's pages at the model's longest context, so that no step outgrows its graph; the log tells what it took."""
    runner = open_runner(loaded)
    runner.use_graphs(RerunCapturer(), lambda _was_replayed: None)
    with caplog.at_level(logging.INFO):
        run_padding(runner, 2)
    assert runner.graphs is not None
    ((_, _, batch),) = next(iter(runner.graphs._steps.values())).parts
    assert batch.max_indices == 2 * (512 // PAGE_SIZE)
    assert "main 2, 1.0 MiB" in caplog.text


def test_shapes_are_told_in_a_line() -> None:
    """Sizes by label."""
    assert describe_shapes([(("main", 8),), (("main", 4), ("cfg_text", 2))]) == "main 8, main 4 + cfg_text 2"
    assert describe_shapes([]) == "none"


def test_torch_takes_what_is_given_to_its_capture() -> None:
    """The keywords exist in the torch that is installed."""
    inspect.signature(torch.cuda.graph).bind(object(), pool=None, stream=None, capture_error_mode="thread_local")
