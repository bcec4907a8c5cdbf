"""`tokenizer.py`: text in and out exactly as the model's own tokenizer has it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import PreTrainedTokenizerFast

from engine_service.errors import InvalidRequestError
from engine_service.tokenizer import ChatMessage, Tokenizer
from tests.engine_service.tiny_models import VOCAB_SIZE, build_tokenizer


@pytest.fixture(scope="module")
def backend() -> PreTrainedTokenizerFast:
    """The small tokenizer as transformers has it."""
    return build_tokenizer()


@pytest.fixture(scope="module")
def tokenizer(backend: PreTrainedTokenizerFast) -> Tokenizer:
    """The small tokenizer as the engine has it."""
    return Tokenizer(backend, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize(
    "text", ["the planner owns every page", "Zürich, 日本 🙂", " two  spaces ", "", "a\x00b", "<|end|>x"]
)
def test_text_is_encoded_as_transformers_does_and_comes_back(
    backend: PreTrainedTokenizerFast, tokenizer: Tokenizer, text: str
) -> None:
    """Token ids equal the tokenizer's own, and decode to the same text."""
    token_ids = tokenizer.encode(text)
    assert token_ids == backend(text).input_ids
    assert tokenizer.decode(token_ids) == text


def test_no_token_stands_for_more_characters_than_the_bound(tokenizer: Tokenizer) -> None:
    """So a text's length tells that it has too many tokens without making them."""
    longest = max(tokenizer.backend.get_vocab(), key=len)
    for text in (" planner" * 50, longest * 50, "日" * 50):
        assert len(text) <= len(tokenizer.encode(text)) * tokenizer.max_token_characters
    # Longer than any token here: some tokenizers leave out spaces, which then count with their neighbours.
    assert tokenizer.max_token_characters == 32 > len(longest)


def test_special_tokens_are_left_out_of_text_on_request(tokenizer: Tokenizer) -> None:
    """And only on request."""
    token_ids = tokenizer.encode("hello<|end|>")
    assert tokenizer.decode(token_ids) == "hello<|end|>"
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == "hello"


def test_a_conversation_is_rendered_with_the_models_own_template(
    backend: PreTrainedTokenizerFast, tokenizer: Tokenizer
) -> None:
    """The prompt ends where the answer begins."""
    token_ids = tokenizer.encode_chat([ChatMessage("system", "be brief"), ChatMessage("user", "hi")])
    expected = "<|start|>system\nbe brief<|end|>\n<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert backend.decode(token_ids) == expected


def test_what_the_template_refuses_is_the_requests_fault(tokenizer: Tokenizer) -> None:
    """The template's own words reach the caller, with the field."""
    with pytest.raises(InvalidRequestError, match="unknown role wizard") as caught:
        tokenizer.encode_chat([ChatMessage("wizard", "hi")])
    assert caught.value.field == "messages"


def test_a_conversation_needs_a_template_and_a_message(tokenizer: Tokenizer) -> None:
    """Both are named in the error."""
    with pytest.raises(InvalidRequestError, match="at least one message"):
        tokenizer.encode_chat([])
    bare = Tokenizer(build_tokenizer(), vocab_size=VOCAB_SIZE)
    bare.backend.chat_template = None
    assert tokenizer.has_chat_template
    assert not bare.has_chat_template
    with pytest.raises(InvalidRequestError, match="no chat template"):
        bare.encode_chat([ChatMessage("user", "hi")])


def test_a_lone_surrogate_is_refused_with_its_place(tokenizer: Tokenizer) -> None:
    """In text, and in a role or the content of a message."""
    with pytest.raises(InvalidRequestError, match=r"character 2 is the lone surrogate U\+D800") as caught:
        tokenizer.encode("ab\ud800")
    assert caught.value.field == "text"
    with pytest.raises(InvalidRequestError) as caught:
        tokenizer.encode_chat([ChatMessage("user", "fine"), ChatMessage("user", "\udfff")])
    assert caught.value.field == "messages[1].content"
    with pytest.raises(InvalidRequestError) as caught:
        tokenizer.encode_chat([ChatMessage("\udfff", "fine")])
    assert caught.value.field == "messages[0].role"


def test_several_threads_may_use_it_at_once() -> None:
    """Also a tokenizer whose file says to cut off and to pad: prompts are never cut."""
    backend = build_tokenizer()
    backend.backend_tokenizer.enable_truncation(4)
    backend.backend_tokenizer.enable_padding(length=16)
    tokenizer = Tokenizer(backend, vocab_size=VOCAB_SIZE)
    texts = [f"the planner owns page {index} of the pool" for index in range(200)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: tokenizer.decode(tokenizer.encode(text)), texts)) == texts
