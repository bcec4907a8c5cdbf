"""Prompts become tokens in whatever form they come, and what cannot fit is refused before that costs anything."""

import asyncio

import pytest

from engine_service.errors import InvalidRequestError
from engine_service.prompts import encode_prompt
from engine_service.request import ChatMessage
from engine_service.tokenizer import Tokenizer
from engine_service.validation import EngineLimits
from engine_service.wire import Prompt
from tests.engine_service.tiny_models import VOCAB_SIZE, build_tokenizer

TOKENIZER = Tokenizer(build_tokenizer(), vocab_size=VOCAB_SIZE)
LIMITS = EngineLimits(VOCAB_SIZE, max_context_tokens=20, page_size=4, num_pages=9)
HI = ChatMessage("user", "hi")


def encode(prompt: Prompt) -> list[int]:
    """Returns a prompt's tokens."""
    return asyncio.run(encode_prompt(prompt, TOKENIZER, LIMITS))


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (Prompt("text", text="the planner"), "the planner"),
        (Prompt("messages", messages=(HI,)), "<|start|>user\nhi<|end|>\n<|start|>assistant\n"),
    ],
)
def test_text_and_messages_become_the_models_tokens(prompt: Prompt, text: str) -> None:
    """A conversation in the model's own chat template."""
    assert encode(prompt) == build_tokenizer()(text)["input_ids"]


def test_token_ids_stay_as_they_are() -> None:
    """As a list of plain numbers."""
    assert encode(Prompt("token_ids", token_ids=(3, 5, 3))) == [3, 5, 3]


@pytest.mark.parametrize(
    ("prompt", "field", "rule"),
    [
        (Prompt("text"), "text", "the prompt is empty"),
        (Prompt("text", text="a" * 641), "text", "641 characters are more than 640"),
        (Prompt("messages", messages=(ChatMessage("user", "a" * 640),)), "messages", "644 characters"),
        (Prompt("token_ids", token_ids=[1] * 20), "token_ids", "a prompt of 20 tokens"),
        (
            Prompt("token_ids", token_ids=[1] * 20, path="guidance[1]."),
            "guidance[1].token_ids",
            "a context of 20",
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_its_field(prompt: Prompt, field: str, rule: str) -> None:
    """A context of 20 tokens of at most 32 characters each."""
    with pytest.raises(InvalidRequestError) as caught:
        encode(prompt)
    assert caught.value.field == field
    assert rule in caught.value.rule
