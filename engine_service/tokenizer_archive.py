"""The model's tokenizer as one zip archive, so that a gateway needs no files of the model."""

import hashlib
import tempfile
import zipfile
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import NamedTuple, Protocol

# The earliest that a zip archive knows: equal files give equal archives, whenever they were made.
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)


class SavedTokenizer(Protocol):
    """A tokenizer that can be written to a folder."""

    def save(self, folder: Path) -> None:
        """Writes its files."""


class Archive(NamedTuple):
    """A zip archive.

    Args:
        data: its bytes.
        sha256: their SHA-256, in hexadecimal digits.
    """

    data: bytes
    sha256: str


class TokenizerArchive:
    """The tokenizer's archive, made when it is first asked for. Safe to use from several threads.

    Args:
        tokenizer: the tokenizer.
        configuration: further files that tell what the tokens mean to the model: their names and what they say.
    """

    def __init__(self, tokenizer: SavedTokenizer, configuration: dict[str, str]) -> None:
        self._tokenizer = tokenizer
        self._configuration = configuration
        self._lock = Lock()
        self._archive: Archive | None = None

    def get(self) -> Archive:
        """Returns the archive; the first call takes a moment."""
        with self._lock:
            if self._archive is None:
                self._archive = self._build()
            return self._archive

    def _build(self) -> Archive:
        buffer = BytesIO()
        with tempfile.TemporaryDirectory(prefix="ringplan-tokenizer-") as folder:
            self._tokenizer.save(Path(folder))
            files = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
        files |= {name: text.encode() for name, text in self._configuration.items()}
        with zipfile.ZipFile(buffer, "w") as archive:
            for name in sorted(files):
                archive.writestr(zipfile.ZipInfo(name, _TIMESTAMP), files[name], zipfile.ZIP_DEFLATED)
        data = buffer.getvalue()
        return Archive(data, hashlib.sha256(data).hexdigest())
