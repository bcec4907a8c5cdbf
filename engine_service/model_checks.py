"""Refuses, by name, models that need what our attention does not do: nothing is ever silently ignored."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from engine_service.errors import UnsupportedModelError
from engine_service.kv_cache import KvShape

# Forms of RoPE whose angles depend on a token's position alone. The others look at how long the sequence is.
STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "proportional"})

_SINK_MODEL_TYPES = frozenset({"gpt_oss"})

# Settings of models that are not plain stacks of causal self-attention, and what they mean.
_OTHER_ATTENTION = {
    "layers_block_type": "layers without attention",
    "block_types": "layers without attention",
    "hybrid_override_pattern": "layers without attention",
    "attn_layer_period": "layers without attention",
    "attention_chunk_size": "chunked attention",
    "cross_attention_layers": "cross attention",
    "add_cross_attention": "cross attention",
    "alibi": "ALiBi position biases",
    "num_kv_shared_layers": "layers that share keys and values",
}

# Keyword arguments of attention calls that change the result, and what they mean.
_EXTRA_FEATURES = {
    "sliding_window": "sliding window attention",
    "softcap": "attention logit soft capping",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "position biases",
    "block_indices": "sparse attention",
    "indices": "sparse attention",
}

# Keyword arguments that say nothing our attention has to honour: it has the plan.
_HARMLESS_EXTRAS = frozenset(
    {"position_ids", "cache", "past_key_values", "use_cache", "cache_position", "output_attentions", "is_causal"}
    | {"output_hidden_states", "return_dict", "deterministic", "output_router_logits", "input_ids", "training"}
    | {"position_embeddings", "logits_to_keep", "num_items_in_batch"}
)


def check_config(config: PreTrainedConfig, name: str) -> None:
    """Checks a model's configuration, before its weights are read.

    Args:
        config: the configuration.
        name: the model's name, for the error.

    Raises:
        UnsupportedModelError: the model needs what this engine does not do; it names all of that.
    """
    features = list(dict.fromkeys(_find_unsupported(config)))
    if features:
        raise UnsupportedModelError(name, features)


def _find_unsupported(config: PreTrainedConfig) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "an encoder-decoder architecture"
    yield from _find_class_features(config)
    if getattr(config, "quantization_config", None) is not None:
        yield "quantized weights"
    text_config = config.get_text_config()
    yield from _find_layer_features(text_config)
    yield from _find_rope_features(text_config)
    for key, value in text_config.to_dict().items():
        # The one on the final logits is applied by the model itself, outside attention.
        if key in {"attn_logit_softcapping", "attn_logit_softcap"} and value:
            yield f"attention logit soft capping ({key} {value})"
        if key in _OTHER_ATTENTION and value:
            yield f"{_OTHER_ATTENTION[key]} ({key})"
    if text_config.model_type in _SINK_MODEL_TYPES:
        yield "attention sinks"


def _find_class_features(config: PreTrainedConfig) -> Iterator[str]:
    model_class = find_model_class(config)
    if model_class is None:
        yield f"model type {config.model_type!r}, which is no causal language model"
        return
    named = config.architectures or [model_class.__name__]
    if model_class.__name__ not in named:
        yield f"architecture {', '.join(named)}, which is no causal language model"
    if not model_class._supports_attention_backend:
        yield f"attention outside transformers' attention interface ({model_class.__name__})"


def find_model_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Returns the class that a causal language model with this configuration has, or None if there is none."""
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    first: type[PreTrainedModel] | None = found[0] if isinstance(found, tuple) else found
    return first


def find_max_context_tokens(config: PreTrainedConfig) -> int:
    """Returns how many tokens of prompt and answer together the model is made for."""
    text_config = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
        value = getattr(text_config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise UnsupportedModelError(config.model_type, ["a context without a limit (no max_position_embeddings)"])


def _find_layer_features(config: PreTrainedConfig) -> Iterator[str]:
    window = getattr(config, "sliding_window", None)
    # A window as long as the context never cuts anything off.
    is_window_active = window is not None and window < find_max_context_tokens(config)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        if is_window_active and getattr(config, "use_sliding_window", True):
            yield f"sliding window attention (sliding_window {window})"
        return
    for kind in dict.fromkeys(layer_types):
        if kind == "sliding_attention":
            if is_window_active or window is None:
                yield f"sliding window attention (sliding_window {window})"
        elif kind != "full_attention":
            yield kind.replace("_", " ")


def _find_rope_features(config: PreTrainedConfig) -> Iterator[str]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(parameters, Mapping):
        return
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    for one in nested or [parameters]:
        rope_type = one.get("rope_type", one.get("type", "default"))
        if rope_type not in STATIC_ROPE_TYPES:
            yield f"RoPE of type {rope_type!r}, which depends on more than positions"
        if "mrope_section" in one:
            yield "RoPE over several position axes (mrope_section)"


class _ProbeStep:
    """Records the attention calls of a forward; see `AttentionStep`."""

    def __init__(self) -> None:
        self.layers: list[object] = []
        self.shapes: set[tuple[int, int, int, int]] = set()
        self.extras: dict[str, Any] = {}
        self.has_non_causal = False
        self.queries: list[torch.Tensor] = []
        self.keys: list[torch.Tensor] = []

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,  # noqa: ARG002 - any scale is honoured.
        extras: dict[str, Any],
    ) -> torch.Tensor:
        self.layers.append(getattr(module, "layer_idx", None))
        self.shapes.add((key.shape[1], key.shape[2], value.shape[1], value.shape[2]))
        self.extras.update({name: given for name, given in extras.items() if given is not None})
        is_causal = extras.get("is_causal")
        self.has_non_causal |= not (getattr(module, "is_causal", True) if is_causal is None else is_causal)
        self.has_non_causal |= query.shape[0] != key.shape[0]
        self.queries.append(query.clone())
        self.keys.append(key.clone())
        return query.new_zeros((*query.shape[:2], value.shape[2]))


@torch.inference_mode()
def run_two_tokens(model: PreTrainedModel) -> torch.Tensor:
    """Runs a loaded model on two tokens whose attention gives zeros; returns their logits [2, vocab_size]."""
    return _run_two_tokens(model, (7, 5), _ProbeStep())


def _run_two_tokens(model: PreTrainedModel, positions: tuple[int, int], step: _ProbeStep) -> torch.Tensor:
    # From the middle of the vocabulary: padding and unused tokens may have embeddings of zeros, which nothing rotates.
    embeddings: Any = model.get_input_embeddings()
    middle = embeddings.weight.shape[0] // 2
    output = model(
        input_ids=torch.tensor([[middle, middle - 1]], device=model.device),
        position_ids=torch.tensor([positions], device=model.device),
        use_cache=False,
        ringplan_step=step,
    )
    logits: torch.Tensor = output.logits[0]
    return logits


@torch.inference_mode()
def check_attention_calls(model: PreTrainedModel, name: str) -> KvShape:
    """Runs a loaded model on two tokens and looks at what reaches our attention.

    Args:
        model: a model whose attention is ours, in evaluation mode.
        name: the model's name, for the error.

    Returns:
        What its attention keeps of a token.

    Raises:
        UnsupportedModelError: the calls are not those of a plain stack of causal self-attention over given positions.
    """
    # The second token's position differs and nothing else.
    first, second = _ProbeStep(), _ProbeStep()
    try:
        _run_two_tokens(model, (7, 0), first)
        _run_two_tokens(model, (7, 5), second)
    except (TypeError, AttributeError, KeyError, ValueError, RuntimeError) as error:
        raise UnsupportedModelError(name, [f"another forward than a packed one ({error})"]) from error
    max_context_tokens = find_max_context_tokens(model.config)
    features = list(dict.fromkeys(_find_call_features(first, max_context_tokens)))
    if not features and not _has_moved(first.queries + first.keys, second.queries + second.keys):
        features = ["positions that are not the ones given"]
    if features:
        raise UnsupportedModelError(name, features)
    num_kv_heads, head_dim, _, _ = next(iter(first.shapes))
    return KvShape(len(first.layers), num_kv_heads, head_dim, first.keys[0].dtype)


def _find_call_features(probe: _ProbeStep, max_context_tokens: int) -> Iterator[str]:
    if not probe.layers:
        yield "attention outside transformers' attention interface"
        return
    if probe.layers != list(range(len(probe.layers))):
        yield f"attention layers that are not called once each, in order ({probe.layers})"
    if probe.has_non_causal:
        yield "attention that is not causal self-attention"
    if len(probe.shapes) > 1:
        yield "layers with keys and values of different sizes"
    if any(shape[:2] != shape[2:] for shape in probe.shapes):
        yield "keys and values of different sizes"
    for extra, value in probe.extras.items():
        is_idle_window = extra == "sliding_window" and isinstance(value, int) and value >= max_context_tokens
        if extra not in _HARMLESS_EXTRAS and value is not False and not is_idle_window:
            yield _EXTRA_FEATURES.get(extra, f"attention with the argument {extra!r}")


def _has_moved(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Whether the second token changed and the first did not."""
    pairs = list(zip(first, second, strict=True))
    is_first_same = all(torch.equal(one[0], other[0]) for one, other in pairs)
    return is_first_same and any(not torch.equal(one[1], other[1]) for one, other in pairs)
