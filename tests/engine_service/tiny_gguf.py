"""A tiny Llama with random weights as a GGUF file, some of them quantized."""

import json
from pathlib import Path

import gguf
import numpy as np

from tests.engine_service.tiny_models import CHAT_TEMPLATE, VOCAB_SIZE, build_tokenizer

_HIDDEN, _FEED_FORWARD, _LAYERS, _HEADS, _KV_HEADS = 64, 96, 2, 4, 2


def save_tiny_gguf(path: Path, *, seed: int = 0) -> Path:
    """Writes the model and the small tokenizer.

    Args:
        path: the file.
        seed: decides the weights.

    Returns:
        The file, which `load_model` and transformers read.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(_HIDDEN)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_FEED_FORWARD)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(VOCAB_SIZE)
    _add_tokenizer(writer)
    _add_weights(writer, np.random.default_rng(seed))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    tokens += [f"<|unused{number}|>" for number in range(len(tokens), VOCAB_SIZE)]
    kinds = [3 if token.startswith("<|") else 1 for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_weights(writer: gguf.GGUFWriter, random: np.random.Generator) -> None:
    kv_size = _HIDDEN // _HEADS * _KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCAB_SIZE, _HIDDEN)}
    for layer in range(_LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm": (_HIDDEN,),
            f"blk.{layer}.attn_q": (_HIDDEN, _HIDDEN),
            f"blk.{layer}.attn_k": (kv_size, _HIDDEN),
            f"blk.{layer}.attn_v": (kv_size, _HIDDEN),
            f"blk.{layer}.attn_output": (_HIDDEN, _HIDDEN),
            f"blk.{layer}.ffn_norm": (_HIDDEN,),
            f"blk.{layer}.ffn_gate": (_FEED_FORWARD, _HIDDEN),
            f"blk.{layer}.ffn_up": (_FEED_FORWARD, _HIDDEN),
            f"blk.{layer}.ffn_down": (_HIDDEN, _FEED_FORWARD),
        }
    shapes["output_norm"] = (_HIDDEN,)
    for name, shape in shapes.items():
        spread = random.standard_normal(shape).astype(np.float32)
        weight = 1 + 0.1 * spread if "norm" in name else 0.3 * spread
        if "ffn" in name and len(shape) == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", weight)
