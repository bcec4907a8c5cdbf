"""SmolLM2 from its GGUF file: greedy tokens equal those of transformers' own generate on the same weights."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from engine_service.attention import ATTENTION_NAME
from engine_service.model_cache import ModelCache
from engine_service.model_loading import LoadedModel, load_model
from engine_service.model_runner import ModelRunner
from engine_service.tokenizer import ChatMessage
from tests.engine_service.churn import ChurnRequest, run_churn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

# Question, tokens to generate, step at which it joins.
QUESTIONS = (
    ("What is the capital of France?", 12, 0),
    ("Write one sentence about the sea.", 16, 0),
    ("Count from one to ten.", 20, 2),
    ("Hi!", 5, 4),
    ("Why is the sky blue? Explain it to a child.", 16, 5),
    ("Translate 'good morning' into French.", 8, 9),
    ("Name three colours.", 10, 11),
    ("What is 2 + 2?", 8, 15),
)


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    """The packaged model."""
    return load_model()


def generate_reference(smollm2: LoadedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """What transformers answers, with its own attention on the same weights."""
    model = smollm2.model
    model.set_attn_implementation("sdpa")
    try:
        input_ids = torch.tensor([prompt])
        output = model.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=num_tokens, do_sample=False
        )
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    return output[0, len(prompt) :].tolist()


def test_its_facts_are_those_of_the_published_model(smollm2: LoadedModel) -> None:
    """30 layers, 3 key heads of 64, 49,152 tokens, 8,192 of context, `<|im_end|>` ends an answer."""
    assert smollm2.architecture == "LlamaForCausalLM"
    assert (smollm2.num_layers, smollm2.num_kv_heads, smollm2.head_dim) == (30, 3, 64)
    assert (smollm2.vocab_size, smollm2.max_context_tokens) == (49_152, 8_192)
    assert [smollm2.tokenizer.decode([token_id]) for token_id in smollm2.eos_token_ids] == ["<|im_end|>"]


def test_greedy_tokens_equal_transformers_while_requests_join_and_leave(smollm2: LoadedModel) -> None:
    """Eight real questions in one batch that changes all the time."""
    prompts = [smollm2.tokenizer.encode_chat([ChatMessage("user", question)]) for question, _, _ in QUESTIONS]
    requests = [
        ChurnRequest(prompt, num_tokens, joins_at)
        for prompt, (_, num_tokens, joins_at) in zip(prompts, QUESTIONS, strict=True)
    ]
    run_churn(ModelRunner(smollm2, num_pages=64, page_size=16), requests, chunk=24, num_padding=1)
    for request in requests:
        expected = generate_reference(smollm2, request.prompt, request.num_tokens)
        assert request.generated[: len(expected)] == expected
    assert "Paris" in smollm2.tokenizer.decode(requests[0].generated)


def test_its_converted_form_is_the_model_bit_by_bit(smollm2: LoadedModel) -> None:
    """So its tokens are the same too; the tokenizer gives the same for text and conversation."""
    # Not pytest's folder, which would keep half a gigabyte for the next runs to find.
    with TemporaryDirectory() as folder:
        cache = ModelCache(Path(folder))
        load_model(cache=cache)
        (entry,) = Path(folder).iterdir()
        weights_changed_at = (entry / "model.safetensors").stat().st_mtime_ns
        kept = load_model(cache=cache)
        assert (entry / "model.safetensors").stat().st_mtime_ns == weights_changed_at
        expected = smollm2.model.state_dict()
        found = kept.model.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        buffers = dict(kept.model.named_buffers())
        assert all(torch.equal(buffers[name], buffer) for name, buffer in smollm2.model.named_buffers())
        assert (kept.name, kept.eos_token_ids, kept.max_context_tokens) == (
            smollm2.name,
            smollm2.eos_token_ids,
            smollm2.max_context_tokens,
        )
        for text in (*[question for question, _, _ in QUESTIONS], "  dés  espaces\n\n\tet 🙂 12345 <|im_end|>"):
            chat = [ChatMessage("user", text)]
            assert kept.tokenizer.encode(text) == smollm2.tokenizer.encode(text)
            assert kept.tokenizer.encode_chat(chat) == smollm2.tokenizer.encode_chat(chat)
        del kept
