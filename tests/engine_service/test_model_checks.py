"""`model_checks.py`: what our attention does not do is refused by name."""

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from engine_service.attention import ATTENTION_NAME, register_attention
from engine_service.errors import UnsupportedModelError
from engine_service.model_checks import check_attention_calls, check_config, find_max_context_tokens
from tests.engine_service.tiny_models import ARCHITECTURES, build_tiny_config

DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": [1.0] * 4,
    "short_factor": [1.0] * 4,
    "original_max_position_embeddings": 128,
    "factor": 4.0,
}


def shrink(name: str, **given: Any) -> PreTrainedConfig:
    """A real configuration class with tiny sizes."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "pad_token_id": None,
    }
    config = getattr(transformers, name)(**(sizes | given))
    assert isinstance(config, PreTrainedConfig)
    return config


@pytest.mark.parametrize(
    ("config", "feature"),
    [
        (lambda: shrink("MistralConfig", sliding_window=64), "sliding window attention"),
        (
            lambda: shrink("Qwen2Config", use_sliding_window=True, sliding_window=64, max_window_layers=1),
            "sliding window attention",
        ),
        (lambda: shrink("Starcoder2Config", sliding_window=100), "sliding window attention"),
        (lambda: shrink("Gemma2Config", sliding_window=64), "sliding window attention"),
        (lambda: shrink("Gemma2Config", sliding_window=64), "attention logit soft capping"),
        (lambda: shrink("GptOssConfig", num_local_experts=2, num_experts_per_tok=1), "attention sinks"),
        (lambda: shrink("GptOssConfig", num_local_experts=2, num_experts_per_tok=1), "sliding window attention"),
        (lambda: shrink("LlamaConfig", rope_parameters=DYNAMIC_ROPE), "RoPE of type 'dynamic'"),
        (lambda: shrink("Phi3Config", rope_parameters=LONG_ROPE), "RoPE of type 'longrope'"),
        (lambda: shrink("Qwen3NextConfig", num_hidden_layers=4), "linear attention"),
        (transformers.T5Config, "encoder-decoder"),
        (transformers.MllamaConfig, "cross attention"),
        (lambda: transformers.GPT2Config(add_cross_attention=True), "cross attention"),
        (transformers.BloomConfig, "attention outside transformers' attention interface"),
        (transformers.ViTConfig, "no causal language model"),
        (lambda: shrink("LlamaConfig", architectures=["LlamaForSequenceClassification"]), "no causal language model"),
        (lambda: shrink("LlamaConfig", quantization_config={"quant_method": "gptq", "bits": 4}), "quantized weights"),
    ],
)
def test_a_feature_that_attention_does_not_honour_is_refused_by_name(config: Any, feature: str) -> None:
    """The configuration alone is enough: no weights are read."""
    with pytest.raises(UnsupportedModelError, match=feature) as caught:
        check_config(config(), "a-model")
    assert any(feature in one for one in caught.value.features)
    assert "a-model" in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        *[lambda name=name: build_tiny_config(name) for name in ARCHITECTURES],
        lambda: shrink("MistralConfig", sliding_window=None),
        lambda: shrink("MistralConfig", sliding_window=512),
        lambda: shrink("Qwen2Config", use_sliding_window=False, sliding_window=64),
        lambda: shrink("LlamaConfig", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
        lambda: shrink(
            "LlamaConfig",
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
        ),
        lambda: shrink("Qwen3Config", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}),
    ],
)
def test_a_plain_model_passes(config: Any) -> None:
    """A sliding window that is off or as long as the context is no obstacle, nor is RoPE by positions alone."""
    check_config(config(), "a-model")


def build_model(config: PreTrainedConfig) -> Any:
    """A random model whose attention is ours."""
    register_attention()
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    "config",
    [
        *[lambda name=name: build_tiny_config(name) for name in ARCHITECTURES],
        lambda: transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=64, n_positions=64),
        lambda: shrink("GPTNeoXConfig", num_key_value_heads=4),
        lambda: shrink("Olmo2Config"),
        lambda: shrink("GemmaConfig"),
        lambda: shrink("MixtralConfig", num_local_experts=2, num_experts_per_tok=1),
        lambda: shrink("Qwen3MoeConfig", num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16),
        lambda: shrink("SmolLM3Config"),
    ],
)
def test_the_probe_finds_the_shape_of_what_attention_keeps(config: Any) -> None:
    """Layers, key heads and their size are those of the configuration."""
    built = config()
    shape = check_attention_calls(build_model(built), "a-model")
    assert shape.num_layers == built.num_hidden_layers
    assert shape.num_kv_heads == getattr(built, "num_key_value_heads", built.num_attention_heads)
    head_dim = getattr(built, "head_dim", None) or built.hidden_size // built.num_attention_heads
    assert (shape.head_dim, shape.dtype) == (head_dim, torch.float32)


@pytest.mark.parametrize(
    ("config", "feature"),
    [
        (lambda: shrink("MistralConfig", sliding_window=64), "sliding window attention"),
        (lambda: shrink("Gemma2Config", sliding_window=64), "attention logit soft capping"),
        (lambda: shrink("GptOssConfig", num_local_experts=2, num_experts_per_tok=1), "attention sinks"),
        (
            lambda: shrink(
                "DeepseekV3Config",
                num_key_value_heads=4,
                n_routed_experts=2,
                num_experts_per_tok=1,
                n_group=1,
                topk_group=1,
                q_lora_rank=None,
                kv_lora_rank=16,
                qk_rope_head_dim=8,
                qk_nope_head_dim=8,
                v_head_dim=12,
                head_dim=8,
            ),
            "keys and values of different sizes",
        ),
    ],
)
def test_the_probe_refuses_what_a_model_asks_of_attention_beyond_the_plain(config: Any, feature: str) -> None:
    """What the configuration did not give away shows in the calls themselves."""
    with pytest.raises(UnsupportedModelError, match=feature):
        check_attention_calls(build_model(config()), "a-model")


def build_odd_llama(change: Any) -> Any:
    """A tiny Llama whose attention modules were tampered with."""
    model = build_model(shrink("LlamaConfig"))
    change(model)
    return model


def swap_layers(model: LlamaForCausalLM) -> None:
    """Calls the layers in another order."""
    model.model.layers[0].self_attn.layer_idx = 1
    model.model.layers[1].self_attn.layer_idx = 0


def look_both_ways(model: LlamaForCausalLM) -> None:
    """Makes attention bidirectional."""
    model.model.layers[1].self_attn.is_causal = False


def bypass_attention(model: LlamaForCausalLM) -> None:
    """Computes attention without the interface."""
    for layer in model.model.layers:
        layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)


def ignore_positions(model: LlamaForCausalLM) -> None:
    """Counts positions by itself."""
    rotary = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, **_: rotary(x, torch.arange(x.shape[1])[None])


@pytest.mark.parametrize(
    ("change", "feature"),
    [
        (swap_layers, "not called once each, in order"),
        (look_both_ways, "not causal"),
        (bypass_attention, "attention outside transformers' attention interface"),
        (ignore_positions, "positions that are not the ones given"),
    ],
)
def test_a_model_that_is_no_plain_stack_of_causal_attention_is_refused(change: Any, feature: str) -> None:
    """Order of layers, causality, the attention interface and positions are all looked at."""
    with pytest.raises(UnsupportedModelError, match=feature):
        check_attention_calls(build_odd_llama(change), "a-model")


def test_the_context_is_what_the_configuration_says() -> None:
    """Whatever the setting is called."""
    assert find_max_context_tokens(LlamaConfig(max_position_embeddings=77)) == 77
    assert find_max_context_tokens(transformers.GPT2Config(n_positions=99)) == 99
    with pytest.raises(UnsupportedModelError, match="without a limit"):
        find_max_context_tokens(transformers.BloomConfig())
