"""`attention_choice.py`: FlashInfer where it is asked for or there to be had, torch elsewhere, and never in silence."""

import logging
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_service import attention_choice
from engine_service.attention_backends import flashinfer_library
from engine_service.attention_backends.flashinfer_backend import FlashInferBackend
from engine_service.attention_backends.torch_backend import TorchBackend
from engine_service.attention_choice import choose_attention_backend, find_capability, find_num_heads
from engine_service.errors import MissingPackageError, UnsupportedAttentionError
from engine_service.kv_cache import KvShape
from engine_service.model_loading import LoadedModel, load_model
from tests.engine_service.fake_flashinfer import FakeDecodeWrapper, FakePrefillWrapper, FakeWrapper, LateGpu
from tests.engine_service.tiny_models import save_tiny_checkpoint

GOOD_SHAPE = KvShape(num_layers=1, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A model with heads of 16 elements, in float32, on the CPU."""
    return load_model(save_tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> LateGpu:
    """A GPU as far as the choice sees one, with FlashInfer on it."""
    gpu = LateGpu()
    monkeypatch.setattr(attention_choice, "find_capability", lambda _device: (9, 0))
    monkeypatch.setattr(flashinfer_library, "load_flashinfer", gpu.build_library)
    return gpu


def choose(wanted: Any, loaded: LoadedModel, **options: Any) -> object:
    """Chooses with small figures."""
    return choose_attention_backend(wanted, loaded, page_size=4, workspace_bytes=256, **options)


def fit(loaded: LoadedModel) -> LoadedModel:
    """Returns the model as if it had heads that FlashInfer serves."""
    return replace(loaded, kv_shape=GOOD_SHAPE)


@pytest.mark.parametrize("wanted", ["auto", "torch"])
def test_a_cpu_runs_torch(wanted: str, tiny: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    """Without a word: there is nothing else."""
    with caplog.at_level(logging.INFO):
        assert isinstance(choose(wanted, tiny), TorchBackend)
    assert not caplog.records


def test_flashinfer_is_refused_with_all_that_is_in_the_way(tiny: LoadedModel) -> None:
    """The engine does not start, and one try shows every reason."""
    with pytest.raises(UnsupportedAttentionError) as caught:
        choose("flashinfer", tiny)
    assert len(caught.value.features) == 3
    assert "heads of dimension" in str(caught.value)
    assert "float32" in str(caught.value)
    assert "does not run on a CUDA device" in str(caught.value)


@pytest.mark.parametrize("wanted", ["auto", "flashinfer"])
def test_a_gpu_runs_flashinfer(wanted: str, tiny: LoadedModel, gpu: LateGpu, caplog: pytest.LogCaptureFixture) -> None:
    """With the settings' figures, for the model's heads."""
    with caplog.at_level(logging.INFO):
        backend = choose(wanted, fit(tiny), verifies=True)
    assert isinstance(backend, FlashInferBackend)
    assert [record.getMessage()[:34] for record in caplog.records] == ["attention runs in FlashInfer 0.7.4"]
    batch = backend.build_graph_batch(2, 8)
    made = gpu.wrappers[0].calls[0][1]
    assert len(made["float_workspace_buffer"]) == 256
    assert len(batch.last_page_len) == 2


def test_torch_is_taken_on_a_gpu_if_it_is_asked_for(tiny: LoadedModel, gpu: LateGpu) -> None:
    """FlashInfer is not even imported."""
    assert isinstance(choose("torch", fit(tiny)), TorchBackend)
    assert not gpu.wrappers


def test_auto_says_why_a_gpu_runs_torch(tiny: LoadedModel, gpu: LateGpu, caplog: pytest.LogCaptureFixture) -> None:
    """A slower engine than could be had is not a secret."""
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose("auto", tiny), TorchBackend)
    (record,) = caplog.records
    assert "attention runs in torch" in record.getMessage()
    assert "heads of dimension" in record.getMessage()


@pytest.mark.parametrize(
    ("missing", "package"), [("flashinfer", "flashinfer-python"), ("pynvml", "pynvml"), (None, "flashinfer-python")]
)
def test_a_missing_package_is_named(
    missing: str | None,
    package: str,
    tiny: LoadedModel,
    gpu: LateGpu,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """FlashInfer's own, or one that it needs: an error where it was asked for, a warning where it was not."""

    def fail() -> None:
        raise ImportError("no such package", name=missing)

    monkeypatch.setattr(flashinfer_library, "load_flashinfer", fail)
    with pytest.raises(MissingPackageError, match="ringplan\\[cuda\\]") as caught:
        choose("flashinfer", fit(tiny))
    assert caught.value.package == package
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose("auto", fit(tiny)), TorchBackend)
    assert "FlashInfer does not load (no such package)" in caplog.records[-1].getMessage()


def test_a_library_that_is_not_there_is_no_crash(
    tiny: LoadedModel, gpu: LateGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver's library that does not load counts as FlashInfer that does not."""

    def fail() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(flashinfer_library, "load_flashinfer", fail)
    assert isinstance(choose("auto", fit(tiny)), TorchBackend)


@pytest.mark.parametrize("kind", [FakeDecodeWrapper, FakePrefillWrapper])
@pytest.mark.parametrize("error", [RuntimeError("Could not find nvcc"), FileNotFoundError("ninja")], ids=repr)
def test_kernels_that_cannot_be_compiled_are_found_at_the_start(
    error: Exception,
    kind: type[FakeWrapper],
    tiny: LoadedModel,
    gpu: LateGpu,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Those for prompts and those for decode steps: an engine that may choose runs torch, and says why."""

    def fail(*_args: object, **_kwargs: object) -> None:
        raise error

    monkeypatch.setattr(kind, "plan", fail)
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose("auto", fit(tiny)), TorchBackend)
    assert "FlashInfer does not run here" in caplog.records[-1].getMessage()
    assert str(error) in caplog.records[-1].getMessage()
    with pytest.raises(UnsupportedAttentionError, match="does not run here"):
        choose("flashinfer", fit(tiny))


def test_query_heads_come_from_the_configuration(tiny: LoadedModel) -> None:
    """Those of the text model; a number for each layer, or none, is not known."""
    assert find_num_heads(tiny) == tiny.model.config.num_attention_heads
    for value in ([4, 8], None):
        text = SimpleNamespace() if value is None else SimpleNamespace(num_attention_heads=value)
        model: Any = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda text=text: text))
        assert find_num_heads(replace(tiny, model=model)) is None


def test_a_cpu_has_no_compute_capability() -> None:
    """And is asked for none: torch without CUDA would raise."""
    assert find_capability(torch.device("cpu")) is None


def test_the_real_loader_is_what_is_called(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where FlashInfer is not installed, asking for it names it."""
    monkeypatch.setattr(attention_choice, "find_capability", lambda _device: (9, 0))
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(MissingPackageError, match="needs the package flashinfer"):
        choose("flashinfer", fit(tiny))
