"""The tokenizer's archive: everything that a gateway needs of a model."""

import hashlib
import json
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from engine_service.tokenizer import Tokenizer
from engine_service.tokenizer_archive import Archive, TokenizerArchive
from tests.engine_service.tiny_models import VOCAB_SIZE, build_tokenizer

TOKENIZER = Tokenizer(build_tokenizer(), vocab_size=VOCAB_SIZE)
MESSAGES = [{"role": "user", "content": "once upon a time, ü"}]


class BrokenTokenizer:
    """Cannot be written the first time."""

    def __init__(self) -> None:
        self.num_calls = 0

    def save(self, folder: Path) -> None:
        """Fails once."""
        self.num_calls += 1
        if self.num_calls == 1:
            raise OSError("no room")
        (folder / "tokenizer.json").write_text("{}")


def unpack(archive: Archive, folder: Path) -> Path:
    """Writes the archive's files into a folder."""
    with zipfile.ZipFile(BytesIO(archive.data)) as opened:
        opened.extractall(folder)
    return folder


def test_archive_holds_the_tokenizer_and_its_chat_template(tmp_path: Path) -> None:
    """transformers reads it back: the same tokens for a conversation, the same text for tokens."""
    folder = unpack(TokenizerArchive(TOKENIZER, {"config.json": '{"model_type": "llama"}'}).get(), tmp_path)
    loaded = AutoTokenizer.from_pretrained(folder)
    expected = build_tokenizer().apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert loaded.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False) == expected
    assert json.loads((folder / "config.json").read_text()) == {"model_type": "llama"}


def test_equal_tokenizers_give_equal_archives() -> None:
    """Replicas of one model have one fingerprint, which is that of the bytes."""
    archives = [TokenizerArchive(TOKENIZER, {"config.json": "{}"}).get() for _ in range(2)]
    assert archives[0] == archives[1]
    with zipfile.ZipFile(BytesIO(archives[0].data)) as opened:
        # Neither the order in which a file system lists files nor the time shows.
        assert opened.namelist() == sorted(opened.namelist())
        assert {info.date_time for info in opened.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    assert archives[0].sha256 == hashlib.sha256(archives[0].data).hexdigest()


def test_archive_is_made_once() -> None:
    """Every gateway that comes gets the same bytes."""
    archive = TokenizerArchive(TOKENIZER, {})
    assert archive.get() is archive.get()


def test_archive_that_could_not_be_made_is_tried_again() -> None:
    """A full disk for a moment does not cost the engine its tokenizer for good."""
    archive = TokenizerArchive(BrokenTokenizer(), {})
    with pytest.raises(OSError, match="no room"):
        archive.get()
    with zipfile.ZipFile(BytesIO(archive.get().data)) as opened:
        assert opened.namelist() == ["tokenizer.json"]
