"""`device_setup.py`: which device is taken, and what is made ready there."""

import logging
from collections.abc import Iterator

import pytest
import torch

from engine_service import device_setup
from engine_service.device_setup import build_plan_copies, capture_decode_steps, choose_device, measure_step_bytes
from engine_service.errors import NoSuchDeviceError
from engine_service.model_loading import LoadedModel, load_model
from engine_service.model_runner import ModelRunner
from engine_service.warm_up import build_padding_plan
from tests.engine_service.copied_backend import CopiedTorchBackend, RerunCapturer
from tests.engine_service.held_copies import HeldCopyEngine, build_held_copies
from tests.engine_service.tiny_models import save_tiny_checkpoint

PAGE_SIZE = 4


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A tiny model."""
    return load_model(save_tiny_checkpoint("llama", tmp_path_factory.mktemp("model")))


@pytest.fixture(params=[True, False], ids=["gpu", "no gpu"])
def has_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether torch says that there is a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param)
    return bool(request.param)


def test_auto_takes_the_gpu_where_there_is_one(has_gpu: bool) -> None:
    """And the CPU where there is none, or where it is asked for."""
    assert choose_device("auto").type == ("cuda" if has_gpu else "cpu")
    assert choose_device("cpu").type == "cpu"


def test_a_gpu_that_is_not_there_is_an_error(has_gpu: bool) -> None:
    """It is not replaced by a CPU, which would only seem to work."""
    if has_gpu:
        assert choose_device("cuda").type == "cuda"
        return
    with pytest.raises(NoSuchDeviceError, match="give cpu, or auto"):
        choose_device("cuda")


def test_a_cpu_reads_plans_where_they_are() -> None:
    """Nothing is copied, pinned or fenced."""
    copies = build_plan_copies(
        torch.device("cpu"), pins=True, timeout_seconds=1.0, on_pinned_changed=lambda _is_pinned: None
    )
    assert copies is None


@pytest.mark.parametrize("pins", [True, False])
def test_a_gpu_gets_copies_of_plans_from_registered_memory(monkeypatch: pytest.MonkeyPatch, pins: bool) -> None:
    """Registered unless that is turned off; whoever counts is told of it."""
    registered: list[int] = []

    class Registrar:
        """Registers what it is given."""

        def __init__(self, device: torch.device) -> None:
            assert device.type == "cuda"

        def try_register(self, address: int, _num_bytes: int) -> None:
            registered.append(address)

        def unregister(self, address: int) -> None:
            registered.remove(address)

    monkeypatch.setattr(device_setup, "CudaRegistrar", Registrar)
    monkeypatch.setattr(device_setup, "CudaCopyEngine", lambda _device: HeldCopyEngine())
    told: list[bool] = []
    copies = build_plan_copies(torch.device("cuda"), pins=pins, timeout_seconds=1.0, on_pinned_changed=told.append)
    assert copies is not None
    plan = build_padding_plan((1, 1), PAGE_SIZE)
    plan.step_id = plan.region_id = 1
    with copies.reading(plan):
        assert registered == [plan.region_buffer.ctypes.data] * pins
    assert told == [pins]
    copies.end_session()
    assert registered == []


def open_runner(loaded: LoadedModel, *, is_graphed: bool = True) -> ModelRunner:
    """Returns a model that reads copies of plans."""
    return ModelRunner(
        loaded,
        num_pages=5,
        page_size=PAGE_SIZE,
        backend=CopiedTorchBackend(loaded.kv_shape, PAGE_SIZE) if is_graphed else None,
        copies=build_held_copies(HeldCopyEngine()),
    )


def test_every_batch_size_is_captured_at_the_start_and_told(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """The largest first; the line has the sizes and the memory, and no page but the sink page is written."""
    runner, capturer, decoded = open_runner(loaded), RerunCapturer(), list[bool]()
    runner.cache.pages.fill_(7.0)
    with caplog.at_level(logging.INFO):
        capture_decode_steps(runner, capturer, max_running_requests=6, on_decode=decoded.append)
    assert capturer.num_captured == 4
    assert "main 8, main 4, main 2, main 1; 4.0 MiB" in caplog.text
    assert decoded == []
    assert bool((runner.cache.pages[:, 1:] == 7.0).all())


def test_a_backend_without_graphs_is_told(loaded: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever expects graphs finds out why there are none."""
    capturer = RerunCapturer()
    with caplog.at_level(logging.INFO):
        capture_decode_steps(
            open_runner(loaded, is_graphed=False), capturer, max_running_requests=6, on_decode=lambda _is_hit: None
        )
    assert capturer.num_captured == 0
    assert "without CUDA graphs" in caplog.text


def test_a_step_takes_what_the_largest_one_takes_above_what_stays(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak of the largest step, counted after everything has run once, less what was allocated before it."""
    runner = open_runner(loaded)
    sizes: list[tuple[int, int]] = []
    forward = runner.forward

    def note(token_ids: dict[str, torch.Tensor], plan: object) -> dict[str, torch.Tensor]:
        logits = forward(token_ids, plan)  # type: ignore[arg-type]  # As it came.
        sizes.append((len(token_ids["main"]), len(logits["main"])))
        return logits

    figures: Iterator[int] = iter([100, 350])
    num_steps_before_peak: list[int] = []
    monkeypatch.setattr(runner, "forward", note)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _device: num_steps_before_peak.append(len(sizes)))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: next(figures))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: next(figures))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert measure_step_bytes(runner, max_step_tokens=40, max_running_requests=6) == 250
    assert num_steps_before_peak == [len(sizes) - 1]
    assert len(sizes) > 1
    assert sizes[-1] == (40, 6)
