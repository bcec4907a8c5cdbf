"""Reads what a model is made of through transformers, and turns what can go wrong into our errors."""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from engine_service.attention import ATTENTION_NAME, register_attention
from engine_service.errors import InvalidModelError, UnsupportedModelError
from engine_service.model_progress import Report, gguf_parsed_once, reported_progress

GGUF_MAGIC = b"GGUF"
WEIGHTS_STAGE = "loading the weights"
_INDEX_FILE = "model.safetensors.index.json"

# What transformers says of models it cannot build, as against files it cannot read.
_UNKNOWN_ARCHITECTURE_WORDS = ("does not recognize this architecture", "is not supported yet", "Unrecognized model")


class ModelParts(NamedTuple):
    """A model as it was read."""

    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel

    @property
    def num_bytes(self) -> int:
        """What its weights take."""
        return sum(weight.nbytes for weight in _find_own_weights(self.model).values())


class ModelFiles:
    """A model on disk: a folder with safetensors weights, or a GGUF file.

    Args:
        path: the folder or the file, which exists.

    Raises:
        InvalidModelError: it is neither, or a part of it is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name.removesuffix(".gguf")
        if path.is_file():
            _check_gguf(path)
            self._folder, self._gguf_arguments = path.parent, {"gguf_file": path.name}
        else:
            _check_folder(path)
            self._folder, self._gguf_arguments = path, {}

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file, which takes long to convert."""
        return bool(self._gguf_arguments)

    def read_config(self) -> PreTrainedConfig:
        """Reads the configuration.

        Raises:
            InvalidModelError: it cannot be read.
            UnsupportedModelError: it is of a kind that transformers does not know.
        """
        config = self._read("its configuration", AutoConfig.from_pretrained, trust_remote_code=False)
        assert isinstance(config, PreTrainedConfig)
        return config

    def read_tokenizer(self) -> PreTrainedTokenizerBase:
        """Reads the tokenizer.

        Raises:
            InvalidModelError: there is none, or it cannot be read.
        """
        tokenizer = self._read("its tokenizer", AutoTokenizer.from_pretrained, trust_remote_code=False)
        assert isinstance(tokenizer, PreTrainedTokenizerBase)
        return tokenizer

    def read_model(self, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        """Reads the weights into a model whose attention is ours.

        Args:
            config: the configuration.
            dtype: the type of the weights in memory.

        Raises:
            InvalidModelError: the weights cannot be read or do not fit the configuration.
        """
        register_attention()
        model, info = self._read(
            "its weights",
            AutoModelForCausalLM.from_pretrained,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
        # transformers would go on with random numbers in their place.
        missing = sorted(info["missing_keys"])
        if missing:
            names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            raise InvalidModelError(str(self.path), f"{len(missing)} weights are missing: {names}")
        assert isinstance(model, PreTrainedModel)
        return model

    @contextmanager
    def reading(self, report: Report) -> Iterator[None]:
        """While it lasts, reading the weights shows through `report`, and a GGUF file is parsed once for all parts.

        Args:
            report: called with what is being done and how far it is, 0 to 1.
        """
        with reported_progress(report, WEIGHTS_STAGE), gguf_parsed_once() if self._gguf_arguments else nullcontext():
            yield

    def _read(self, what: str, read: Callable[..., Any], **arguments: Any) -> Any:
        try:
            return read(str(self._folder), local_files_only=True, **self._gguf_arguments, **arguments)
        except Exception as error:
            # Readers of files that anyone may have made, Python and compiled ones, raise whatever comes to hand.
            reason = " ".join(str(error).split())
            if any(words in reason for words in _UNKNOWN_ARCHITECTURE_WORDS):
                feature = f"an architecture that transformers cannot load ({reason})"
                raise UnsupportedModelError(self.name, [feature]) from error
            if "trust_remote_code" in reason:
                raise UnsupportedModelError(self.name, ["code of its own"]) from error
            reason = reason or type(error).__name__
            raise InvalidModelError(str(self.path), f"{what} cannot be read: {reason}") from error


def save_model_parts(parts: ModelParts, folder: Path) -> bool:
    """Writes a model as a folder that `ModelFiles` reads.

    Args:
        parts: the model.
        folder: where to; it exists.

    Returns:
        Whether the tokenizer comes back from there as it is.

    Raises:
        OSError: it cannot be written.
        safetensors.SafetensorError: its weights cannot be written.
    """
    config = copy.deepcopy(parts.config)
    if hasattr(config, "quantization_config"):
        # The weights are converted: they are to be read as they are.
        del config.quantization_config
    config.architectures = [type(parts.model).__name__]
    config.dtype = parts.model.dtype
    config.save_pretrained(folder)
    if parts.model.generation_config is not None:
        parts.model.generation_config.save_pretrained(folder)
    parts.tokenizer.save_pretrained(folder)
    save_file(_find_own_weights(parts.model), folder / "model.safetensors", metadata={"format": "pt"})
    again = ModelFiles(folder).read_tokenizer()
    return _describe_tokenizer(again) == _describe_tokenizer(parts.tokenizer)


def _find_own_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns each weight once, by its first name: the others are tied to it again when it is read."""
    weights: dict[int, tuple[str, torch.Tensor]] = {}
    for name, weight in model.state_dict().items():
        weights.setdefault(weight.data_ptr(), (name, weight.contiguous()))
    return dict(weights.values())


def _describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> tuple[object, ...]:
    compiled = getattr(tokenizer, "backend_tokenizer", None)
    # One that is not compiled cannot be compared.
    content = object() if compiled is None else compiled.to_str()
    return content, tokenizer.chat_template, tokenizer.special_tokens_map


def _check_gguf(path: Path) -> None:
    with path.open("rb") as file:
        magic = file.read(len(GGUF_MAGIC))
    if magic != GGUF_MAGIC:
        raise InvalidModelError(str(path), "is not a GGUF file (it does not start with 'GGUF'); or give a model folder")


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        gguf_files = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"; give the path of {gguf_files[0]} itself" if gguf_files else ""
        raise InvalidModelError(str(folder), f"has no config.json, so it is not a Hugging Face model folder{hint}")
    if not any(folder.glob("*.safetensors")) and not (folder / _INDEX_FILE).is_file():
        others = sorted(path.name for path in folder.glob("*.bin"))
        hint = f"; {others[0]} is a pickle, which is not read" if others else ""
        raise InvalidModelError(str(folder), f"has no *.safetensors weights{hint}")
    if (folder / _INDEX_FILE).is_file():
        _check_shards(folder)


def _check_shards(folder: Path) -> None:
    try:
        names = set(json.loads((folder / _INDEX_FILE).read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise InvalidModelError(str(folder), f"{_INDEX_FILE} cannot be read: {error}") from error
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise InvalidModelError(
            str(folder), f"{len(missing)} of {len(names)} weight files are missing, such as {missing[0]}"
        )
