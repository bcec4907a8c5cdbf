"""Keeps converted GGUF models on disk: the next start loads safetensors, in a fraction of the time.

An entry is a Hugging Face folder that `ModelFiles` reads like any other. It is written beside its place and renamed, so
that it is whole or not there; what goes wrong costs the time it would have saved and nothing else.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from safetensors import SafetensorError

from engine_service.model_files import ModelParts, save_model_parts

# To be raised whenever entries written before must not be read any more.
FORMAT = 1
# An entry is not worth a disk that is full.
MIN_FREE_BYTES = 1 << 30
# What an engine that was killed left half-written goes once it is this old.
ABANDONED_SECONDS = 3_600.0

_FACTS_FILE = "entry.json"
_TEMPORARY_PREFIX = ".tmp-"
# Another version of these may convert in another way.
_CONVERTERS = ("transformers", "tokenizers", "gguf")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelKey:
    """What an entry is the conversion of; another value of any of these is another entry.

    Args:
        path: the GGUF file.
        num_bytes: its size.
        modified_ns: when it was last changed.
        dtype: the type asked for.
        device_type: "cpu" or "cuda", which decides what "auto" is.
        versions: what converts it.
    """

    path: str
    num_bytes: int
    modified_ns: int
    dtype: str
    device_type: str
    versions: tuple[str, ...]

    @property
    def name(self) -> str:
        """The entry's folder name."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:32]


def build_key(path: Path, dtype: str, device: str) -> ModelKey:
    """Returns the key of a GGUF file as it is now.

    Args:
        path: the file.
        dtype: the type asked for.
        device: the device asked for.
    """
    status = path.stat()
    versions = (f"ringplan {FORMAT}", *[f"{name} {metadata.version(name)}" for name in _CONVERTERS])
    return ModelKey(str(path.resolve()), status.st_size, status.st_mtime_ns, dtype, device.partition(":")[0], versions)


class ModelCache:
    """Converted models in a folder. Several engines may use one folder at once.

    Args:
        folder: the folder; it need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def try_find(self, key: ModelKey) -> Path | None:
        """Returns the entry of a key, or None if there is none that could be read.

        Args:
            key: the key.
        """
        entry = self.folder / key.name
        try:
            facts = json.loads((entry / _FACTS_FILE).read_text())
            is_whole = all((entry / name).stat().st_size == size for name, size in facts["files"].items())
            is_ours = all(_is_ours(path) for path in (self.folder, entry))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        if not is_ours:
            _logger.warning("%s is not used: others may write to it", entry)
        return entry if is_whole and is_ours else None

    def remove(self, entry: Path) -> None:
        """Removes an entry that turned out to be of no use."""
        # An engine that has the entry's files open goes on with them.
        with suppress(OSError):
            doomed = Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX, dir=self.folder))
            entry.rename(doomed / entry.name)
            shutil.rmtree(doomed, ignore_errors=True)

    def try_store(self, key: ModelKey, parts: ModelParts) -> bool:
        """Writes the entry of a key; what it replaces goes.

        Args:
            key: the key, taken before the model was read.
            parts: the model.

        Returns:
            Whether there is an entry now. If not, a line in the log says why.
        """
        temporary: Path | None = None
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_ours(self.folder):
                _logger.warning("the converted model is not kept: others may write to %s", self.folder)
                return False
            self._remove_abandoned()
            self._remove_replaced(key)
            num_missing = parts.num_bytes + MIN_FREE_BYTES - shutil.disk_usage(self.folder).free
            if num_missing > 0:
                _logger.warning("the converted model is not kept: %s lacks %d MB", self.folder, -(-num_missing >> 20))
                return False
            temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX, dir=self.folder))
            if not save_model_parts(parts, temporary):
                _logger.info("the converted model is not kept: its tokenizer does not come back as it was")
                return False
            _write_facts(key, temporary)
            _write_through(temporary)
            self._put_in_place(temporary, key)
            return True
        except (OSError, SafetensorError) as error:
            _logger.warning("the converted model is not kept in %s: %s", self.folder, error)
            return False
        finally:
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)

    def _put_in_place(self, temporary: Path, key: ModelKey) -> None:
        entry = self.folder / key.name
        if entry.exists() and self.try_find(key) is None:
            self.remove(entry)
        try:
            temporary.rename(entry)
        except OSError:
            # Another engine may have been faster; what it wrote is the same.
            if self.try_find(key) is None:
                raise
        _synchronize(self.folder)

    def _remove_abandoned(self) -> None:
        for path in self.folder.glob(f"{_TEMPORARY_PREFIX}*"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)

    def _remove_replaced(self, key: ModelKey) -> None:
        """Removes what was made of the same file when it, or a converter, was another one."""
        for facts_path in self.folder.glob(f"*/{_FACTS_FILE}"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                known = json.loads(facts_path.read_text())["key"]
                is_same = all(known[name] == getattr(key, name) for name in ("path", "dtype", "device_type"))
                entry = facts_path.parent
                # Another engine may be writing the same entry right now.
                is_written = entry.name.startswith(_TEMPORARY_PREFIX)
                if is_same and entry.name != key.name and not is_written:
                    self.remove(entry)


def _is_ours(path: Path) -> bool:
    status = path.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _write_facts(key: ModelKey, folder: Path) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / _FACTS_FILE).write_text(json.dumps({"key": asdict(key), "files": files}, indent=1))


def _write_through(folder: Path) -> None:
    for path in folder.iterdir():
        _synchronize(path)
    _synchronize(folder)


def _synchronize(path: Path) -> None:
    """Returns once the disk has it: a crash of the machine must not leave an entry with holes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
