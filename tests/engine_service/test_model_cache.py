"""`model_cache.py`: a converted model is kept whole or not at all, and gives what the file itself gives."""

import json
import logging
import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_service import model_cache, model_loading
from engine_service.model_cache import ModelCache, build_key
from engine_service.model_files import ModelFiles, ModelParts
from engine_service.model_loading import LoadedModel, load_model
from engine_service.request import ChatMessage
from tests.engine_service.tiny_gguf import save_tiny_gguf
from tests.engine_service.tiny_models import save_tiny_checkpoint

PROMPT = "the page of thé engine 🙂"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GGUF file."""
    return save_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def gguf_file(original: Path, tmp_path: Path) -> Path:
    """A copy of it for one test."""
    return Path(shutil.copy(original, tmp_path / "tiny.gguf"))


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    """A cache whose folder does not exist yet."""
    return ModelCache(tmp_path / "some" / "cache")


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The paths that weights were read from, in order."""
    paths: list[Path] = []
    read_model = ModelFiles.read_model

    def record(self: ModelFiles, *arguments: object) -> object:
        paths.append(self.path)
        return read_model(self, *arguments)  # type: ignore[arg-type]  # As they came.

    monkeypatch.setattr(ModelFiles, "read_model", record)
    return paths


def find_entry(cache: ModelCache) -> Path:
    """The only entry, with nothing beside it."""
    (entry,) = cache.folder.iterdir()
    return entry


def generate(loaded: LoadedModel) -> list[int]:
    """What transformers' own attention answers on the loaded weights."""
    loaded.model.set_attn_implementation("sdpa")
    prompt = torch.tensor([loaded.tokenizer.encode(PROMPT)])
    model: Any = loaded.model
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False)
    token_ids: list[int] = output[0].tolist()
    return token_ids


def test_what_is_kept_gives_what_the_file_gives(gguf_file: Path, cache: ModelCache, conversions: list[Path]) -> None:
    """Weights bit by bit, tokens, chat template, end tokens and facts; only the first start converts."""
    expected = load_model(gguf_file)
    first = load_model(gguf_file, cache=cache)
    second = load_model(gguf_file, cache=cache)
    assert conversions == [gguf_file, gguf_file, find_entry(cache)]
    for loaded in (first, second):
        for name in ("name", "architecture", "kv_shape", "vocab_size", "max_context_tokens", "eos_token_ids"):
            assert getattr(loaded, name) == getattr(expected, name), name
        weights, expected_weights = loaded.model.state_dict(), expected.model.state_dict()
        assert weights.keys() == expected_weights.keys()
        assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)
        assert loaded.tokenizer.encode(PROMPT) == expected.tokenizer.encode(PROMPT)
        chat = [ChatMessage("user", PROMPT)]
        assert loaded.tokenizer.encode_chat(chat) == expected.tokenizer.encode_chat(chat)
    assert generate(second) == generate(expected)


def test_the_folder_is_the_users_own(gguf_file: Path, cache: ModelCache) -> None:
    """Nobody else can look into it or put weights there; where someone could, it is not used."""
    load_model(gguf_file, cache=cache)
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    key = build_key(gguf_file, "auto", "cpu")
    assert cache.try_find(key) == find_entry(cache)
    cache.folder.chmod(0o777)
    assert cache.try_find(key) is None


def test_nothing_is_kept_where_others_may_write(
    tmp_path: Path, gguf_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine starts all the same, and says so."""
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    load_model(gguf_file, cache=ModelCache(folder))
    assert list(folder.iterdir()) == []
    assert "others may write" in caplog.text


def change_content(path: Path) -> None:
    """Another model of the same name."""
    save_tiny_gguf(path, seed=1)


def touch(path: Path) -> None:
    """The same content, written again."""
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("change", [change_content, touch])
def test_a_file_that_has_changed_is_converted_again(
    gguf_file: Path, cache: ModelCache, conversions: list[Path], change: Callable[[Path], None]
) -> None:
    """What was made of the old one goes."""
    load_model(gguf_file, cache=cache)
    before = find_entry(cache).name
    change(gguf_file)
    loaded = load_model(gguf_file, cache=cache)
    assert conversions == [gguf_file, gguf_file]
    assert find_entry(cache).name != before
    assert generate(load_model(gguf_file, cache=cache)) == generate(loaded)


def test_another_version_of_what_converts_converts_again(
    gguf_file: Path, cache: ModelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may do so in another way; one entry stays."""
    load_model(gguf_file, cache=cache)
    before = find_entry(cache).name
    monkeypatch.setattr(model_cache, "FORMAT", model_cache.FORMAT + 1)
    load_model(gguf_file, cache=cache)
    assert find_entry(cache).name != before


def test_types_are_kept_side_by_side(gguf_file: Path, cache: ModelCache, conversions: list[Path]) -> None:
    """Each has its own entry."""
    for dtype in ("float32", "bfloat16", "float32", "bfloat16"):
        assert load_model(gguf_file, dtype=dtype, cache=cache).dtype == model_loading.DTYPES[dtype]
    assert [path == gguf_file for path in conversions] == [True, True, False, False]


def cut_weights(entry: Path) -> None:
    """A file that ends early."""
    path = entry / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def break_weights(entry: Path) -> None:
    """A file of the right size that is none."""
    path = entry / "model.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)


def empty_facts(entry: Path) -> None:
    """No facts."""
    (entry / "entry.json").write_text("")


def strange_facts(entry: Path) -> None:
    """Facts of another form."""
    (entry / "entry.json").write_text(json.dumps({"files": ["model.safetensors"]}))


def remove_tokenizer(entry: Path) -> None:
    """A file that is gone."""
    (entry / "tokenizer.json").unlink()


@pytest.mark.parametrize("damage", [cut_weights, break_weights, empty_facts, strange_facts, remove_tokenizer])
def test_a_damaged_entry_is_converted_again(
    gguf_file: Path, cache: ModelCache, conversions: list[Path], damage: Callable[[Path], None]
) -> None:
    """It costs the time and nothing else, once."""
    expected = generate(load_model(gguf_file, cache=cache))
    damage(find_entry(cache))
    assert generate(load_model(gguf_file, cache=cache)) == expected
    load_model(gguf_file, cache=cache)
    assert conversions[-1] == find_entry(cache)


@contextmanager
def limited_file_size(num_bytes: int) -> Iterator[None]:
    """Lets writing fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_up_leaves_nothing_behind(
    gguf_file: Path, cache: ModelCache, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine starts, the log says why the next one takes as long."""
    with limited_file_size(100_000):
        loaded = load_model(gguf_file, cache=cache)
    assert loaded.name == "tiny"
    assert list(cache.folder.iterdir()) == []
    assert "not kept" in caplog.text


def test_a_disk_with_little_room_is_left_alone(
    gguf_file: Path, cache: ModelCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Some of it stays free for what matters more."""
    usage = shutil.disk_usage(gguf_file)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=model_cache.MIN_FREE_BYTES))
    load_model(gguf_file, cache=cache)
    assert list(cache.folder.iterdir()) == []
    assert "lacks 1 MB" in caplog.text


def test_a_folder_that_cannot_be_made_is_done_without(
    gguf_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Here a file stands in its way."""
    (tmp_path / "file").write_text("")
    assert load_model(gguf_file, cache=ModelCache(tmp_path / "file" / "cache")).name == "tiny"
    assert [record.levelno for record in caplog.records if record.name == model_cache.__name__] == [logging.WARNING]


def test_what_killed_engines_left_half_written_goes(gguf_file: Path, cache: ModelCache) -> None:
    """Not what another one may be writing right now."""
    cache.folder.mkdir(mode=0o700, parents=True)
    old, new = cache.folder / ".tmp-old", cache.folder / ".tmp-new"
    for path in (old, new):
        path.mkdir()
        (path / "model.safetensors").write_text("half")
    os.utime(old, (1, 1))
    load_model(gguf_file, cache=cache)
    assert not old.exists()
    assert new.exists()


def test_what_another_engine_has_nearly_written_stays(gguf_file: Path, cache: ModelCache) -> None:
    """It has the facts of the very same model, and is not in its place yet."""
    load_model(gguf_file, cache=cache)
    entry = find_entry(cache)
    written = entry.rename(cache.folder / ".tmp-other")
    load_model(gguf_file, cache=cache)
    assert sorted(cache.folder.iterdir()) == sorted([entry, written])
    assert sorted(path.name for path in written.iterdir()) == sorted(path.name for path in entry.iterdir())


def test_two_engines_at_once_leave_one_whole_entry(
    gguf_file: Path, cache: ModelCache, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has written everything before either puts it in its place; both start, and a third reads what is there."""
    files = ModelFiles(gguf_file)
    # Each has a model of its own, as two engines have: a tokenizer must not be saved by two threads at once.
    engines = [
        (one, ModelParts(files.read_config(), files.read_tokenizer(), load_model(gguf_file).model))
        for one in (cache, ModelCache(cache.folder))
    ]
    key, barrier = build_key(gguf_file, "auto", "cpu"), threading.Barrier(2)
    put_in_place = ModelCache._put_in_place

    def meet_and_put(self: ModelCache, *arguments: object) -> None:
        barrier.wait(30)
        put_in_place(self, *arguments)  # type: ignore[arg-type]  # As they came.

    monkeypatch.setattr(ModelCache, "_put_in_place", meet_and_put)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda engine: engine[0].try_store(key, engine[1]), engines)) == [True, True]
    load_model(gguf_file, cache=cache)
    assert conversions[-1] == find_entry(cache)


def test_folders_are_not_kept(tmp_path: Path, cache: ModelCache) -> None:
    """They hold safetensors already."""
    load_model(save_tiny_checkpoint("llama", tmp_path / "model"), cache=cache)
    assert not cache.folder.exists()
