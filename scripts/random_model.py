"""A model with random weights, and a tokenizer that knows one word: what benchmarks run where no model can be had."""

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer as CompiledTokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from engine_service.attention import ATTENTION_NAME, register_attention
from engine_service.model_checks import check_attention_calls
from engine_service.model_loading import LoadedModel
from engine_service.tokenizer import Tokenizer

MAX_CONTEXT_TOKENS = 4_096


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a Qwen3 model.

    Args:
        name: what figures are told under.
        vocab_size: tokens.
        hidden_size: elements of a token's state.
        intermediate_size: elements in the middle of the other layers.
        num_layers: attention layers.
        num_heads: query heads.
        num_kv_heads: key heads.
        head_dim: elements of a head.
    """

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


# Source: config.json of Qwen/Qwen3-0.6B.
QWEN3_0_6B = ModelShape("random-qwen3-0.6b", 151_936, 1_024, 3_072, 28, 16, 8, 128)
TINY = ModelShape("random-tiny", 512, 64, 64, 2, 2, 1, 32)


def build_model(device: torch.device, shape: ModelShape) -> LoadedModel:
    """Returns a model with random weights, the same ones each time, in bfloat16."""
    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=MAX_CONTEXT_TOKENS,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    register_attention()
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)
    model = model.to(device).eval()
    backend = PreTrainedTokenizerFast(tokenizer_object=CompiledTokenizer(WordLevel({"a": 0}, unk_token="a")))
    return LoadedModel(
        name=shape.name,
        architecture=type(model).__name__,
        model=model,
        tokenizer=Tokenizer(backend, vocab_size=shape.vocab_size),
        kv_shape=check_attention_calls(model, shape.name),
        vocab_size=shape.vocab_size,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        eos_token_ids=(),
    )
