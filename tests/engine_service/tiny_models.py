"""Tiny models with random weights and a small tokenizer, as Hugging Face folders: what tests load and generate with."""

from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 384
EOS_TOKEN = "<|end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

_TRAINING_TEXT = (
    "the engine runs the model and owns the pages, the planner owns every page table",
    "a step layout says which rows the next forward has, and the plan says where their keys and values stand",
    "once upon a time there was a small model that could say very little, but said it fast and in order",
)

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}

# Every one with grouped queries, each in its own way.
_CONFIGS: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": lambda **given: LlamaConfig(**_SIZES, num_key_value_heads=2, **given),
    "qwen2": lambda **given: Qwen2Config(**_SIZES, num_key_value_heads=1, **given),
    "qwen3": lambda **given: Qwen3Config(**_SIZES, num_key_value_heads=2, head_dim=32, **given),
    "mistral": lambda **given: MistralConfig(
        **(_SIZES | {"num_attention_heads": 8}), num_key_value_heads=2, sliding_window=None, **given
    ),
}
ARCHITECTURES = tuple(_CONFIGS)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer on a few sentences: every text can be encoded, most characters in pieces."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 8,
        special_tokens=[EOS_TOKEN, "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS_TOKEN)
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def build_tiny_config(architecture: str) -> PreTrainedConfig:
    """Returns the configuration of one of `ARCHITECTURES`."""
    return _CONFIGS[architecture](bos_token_id=None, eos_token_id=0, pad_token_id=None)


def randomize(model: PreTrainedModel, seed: int) -> None:
    """Gives a model weights that make its choices clear and its answers varied: far from ties, and from repeating."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            spread = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.1 * spread if "norm" in name else 0.3 * spread)


def save_tiny_model(config: PreTrainedConfig, folder: Path, *, seed: int = 0) -> Path:
    """Writes a model with random weights and the small tokenizer.

    Args:
        config: its configuration.
        folder: where to.
        seed: decides the weights.

    Returns:
        The folder, which `load_model` and transformers read.
    """
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, seed)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def save_tiny_checkpoint(architecture: str, folder: Path, *, seed: int = 0) -> Path:
    """Writes a tiny model of one of `ARCHITECTURES`; see `save_tiny_model`."""
    return save_tiny_model(build_tiny_config(architecture), folder, seed=seed)
