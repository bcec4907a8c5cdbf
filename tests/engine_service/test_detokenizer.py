"""`detokenizer.py`: deltas that add up to the text, and never half a character."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as CompiledTokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from engine_service.detokenizer import REPLACEMENT, IncrementalDetokenizer
from engine_service.tokenizer import Tokenizer
from tests.engine_service.tiny_models import VOCAB_SIZE, build_tokenizer

BYTE_LEVEL = Tokenizer(build_tokenizer(), vocab_size=VOCAB_SIZE)


def build_byte_fallback() -> Tokenizer:
    """A tokenizer of the SentencePiece kind: words start with a space sign, unknown characters come as byte tokens."""
    words = ["▁", "▁the", "▁page", "s", "a", "b", "▁a", "é"]
    vocab = {"<unk>": 0, "<s>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    vocab |= {word: len(vocab) + index for index, word in enumerate(words)}
    compiled = CompiledTokenizer(BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    compiled.normalizer = normalizers.Replace(" ", "▁")
    compiled.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    compiled.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    compiled.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=compiled), vocab_size=len(vocab))


BYTE_FALLBACK = build_byte_fallback()


def push_all(tokenizer: Tokenizer, token_ids: list[int], prompt: list[int] | None = None) -> list[str]:
    """The delta of each token, and what the end brings."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt or ())
    return [detokenizer.push([token_id]) for token_id in token_ids] + [detokenizer.flush()]


@given(text=st.text(max_size=30))
def test_deltas_of_a_text_add_up_to_it_and_none_ends_in_half_a_character(text: str) -> None:
    """Every delta is part of the text as it is: no character is replaced, however many tokens it comes in."""
    deltas = push_all(BYTE_LEVEL, BYTE_LEVEL.encode(text.replace("<|", "")))
    assert "".join(deltas) == text.replace("<|", "")
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in delta for delta in deltas)


@given(token_ids=st.lists(st.integers(2, 300), max_size=12))
def test_deltas_of_any_tokens_add_up_to_their_text(token_ids: list[int]) -> None:
    """Tokens that are no valid text too: broken characters come as the tokenizer has them."""
    assert "".join(push_all(BYTE_LEVEL, token_ids)) == BYTE_LEVEL.decode(token_ids)


@given(prompt=st.text(alphabet="theé 🙂日", min_size=1, max_size=6), text=st.text(alphabet="pagesé 🙂日", max_size=12))
def test_byte_tokens_and_word_signs_add_up_too(prompt: str, text: str) -> None:
    """With byte fallback and leading spaces, prompt and deltas together are the text of all tokens."""
    prompt_ids, token_ids = BYTE_FALLBACK.encode(prompt), BYTE_FALLBACK.encode(text)
    deltas = push_all(BYTE_FALLBACK, token_ids, prompt_ids)
    whole = BYTE_FALLBACK.decode(prompt_ids + token_ids)
    assert BYTE_FALLBACK.decode(prompt_ids) + "".join(deltas) == whole
    assert not any(REPLACEMENT in delta for delta in deltas)


def test_a_word_after_a_prompt_starts_with_its_space() -> None:
    """The tokenizer alone would strip it, taking the answer for a text of its own."""
    prompt = BYTE_FALLBACK.encode("the")
    page = BYTE_FALLBACK.backend.convert_tokens_to_ids("▁page")
    assert isinstance(page, int)
    assert BYTE_FALLBACK.decode([page]) == "page"
    assert push_all(BYTE_FALLBACK, [page], prompt) == [" page", ""]


def test_a_character_is_held_back_until_it_is_whole() -> None:
    """Four byte tokens of one emoji bring one delta."""
    deltas = push_all(BYTE_LEVEL, BYTE_LEVEL.encode("🙂"))
    assert deltas == ["", "", "", "🙂", ""]


def test_what_is_half_at_the_end_comes_with_the_flush() -> None:
    """An answer that stops inside a character ends in the replacement character."""
    assert push_all(BYTE_LEVEL, BYTE_LEVEL.encode("a🙂")[:-1]) == ["a", "", "", "", REPLACEMENT]


def test_an_answer_may_complete_the_prompts_last_character() -> None:
    """A prompt of token ids can end anywhere."""
    token_ids = BYTE_LEVEL.encode("ab🙂c")
    deltas = push_all(BYTE_LEVEL, token_ids[4:], token_ids[:4])
    assert "".join(deltas) == "🙂c"


def test_special_tokens_bring_no_text_and_keep_the_spaces() -> None:
    """Whatever stands between two words."""
    start = BYTE_FALLBACK.backend.convert_tokens_to_ids("<s>")
    the, page = (BYTE_FALLBACK.backend.convert_tokens_to_ids(word) for word in ("▁the", "▁page"))
    assert push_all(BYTE_FALLBACK, [the, start, start, page]) == ["the", "", "", " page", ""]


@pytest.mark.parametrize("num_tokens", [100, 400])
def test_bytes_that_never_become_a_character_are_not_held_for_ever(num_tokens: int) -> None:
    """Text goes on coming, so that the work for each token stays the same."""
    continuation = BYTE_LEVEL.encode("🙂")[-1]
    deltas = push_all(BYTE_LEVEL, [continuation] * num_tokens)
    assert "".join(deltas).count(REPLACEMENT) == num_tokens
    assert sum(1 for delta in deltas if delta) > num_tokens // 20
