"""Rules of the answer builder: text, ends, and which of several ends is reported."""

from collections.abc import Sequence

from engine_service.answer import AnswerBuilder
from engine_service.request import FinishReason, GenerationEnded, GenerationSpec, Request, StoppingParams
from engine_service.sampling_params import SampledToken

EOS = 99


class LetterDetokenizer:
    """Token n is the n-th letter; the end-of-sequence token and token 50, both special, have no text."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the tokens' letters."""
        return "".join(chr(ord("a") + token_id) for token_id in token_ids if token_id < 26)

    def flush(self) -> str:
        """Returns what stands for a broken character at the end."""
        return "?"


def _answer(token_ids: Sequence[int], stopping: StoppingParams, max_tokens: int = 10) -> tuple[str, GenerationEnded]:
    """Feeds tokens until the answer ends; returns its text and its end."""
    request = Request(GenerationSpec("r", (1, 2, 3), stopping=stopping), 1, max_tokens)
    builder = AnswerBuilder(request, LetterDetokenizer(), [EOS])
    text = ""
    for token_id in token_ids:
        request.token_ids.append(token_id)
        delta, ended = builder.append(SampledToken(token_id))
        text += delta.text
        assert [token.token_id for token in delta.tokens] == [token_id]
        if ended is not None:
            return text, ended
    raise AssertionError("the answer did not end")


def test_answer_ends_at_its_most_tokens() -> None:
    """The last allowed token ends it, and text that was held back comes out."""
    text, ended = _answer([0, 1, 2, 3], StoppingParams(), max_tokens=3)
    assert text == "abc?"
    assert ended == GenerationEnded(FinishReason.LENGTH, num_prompt_tokens=3, num_completion_tokens=3)


def test_end_of_sequence_token_is_counted_and_has_no_text() -> None:
    """Usage has the end token; the text has not."""
    text, ended = _answer([0, 1, EOS], StoppingParams())
    assert text == "ab?"
    assert ended == GenerationEnded(FinishReason.STOP, 3, 3, matched_token_id=EOS)


def test_end_of_sequence_token_can_be_ignored() -> None:
    """With ignore_eos the answer goes on."""
    text, ended = _answer([0, EOS, 1], StoppingParams(ignore_eos=True), max_tokens=3)
    assert (text, ended.finish_reason) == ("ab?", FinishReason.LENGTH)


def test_stop_token_named_by_the_caller_ends_even_where_eos_is_ignored() -> None:
    """A stop token is a stop token, whatever else is said about it."""
    _, ended = _answer([0, EOS, 1], StoppingParams(ignore_eos=True, stop_token_ids=(EOS,)), max_tokens=3)
    assert (ended.finish_reason, ended.matched_token_id) == (FinishReason.STOP, EOS)


def test_stop_token_brings_its_text() -> None:
    """The answer ends after a stop token, not before it."""
    text, ended = _answer([0, 2, 1], StoppingParams(stop_token_ids=(2,)))
    assert (text, ended.matched_token_id) == ("ac?", 2)


def test_stop_string_ends_the_answer_before_it() -> None:
    """A stop string across two tokens is found and not returned."""
    text, ended = _answer([0, 1, 2, 3, 4], StoppingParams(stop=("cd",)))
    assert text == "ab"
    assert ended == GenerationEnded(FinishReason.STOP, 3, 4, matched_stop="cd")


def test_stop_string_is_reported_where_the_last_token_completes_it() -> None:
    """A stop string wins over the length limit and over a stop token that come with it."""
    _, ended = _answer([0, 1], StoppingParams(stop=("ab",), stop_token_ids=(1,)), max_tokens=2)
    assert ended == GenerationEnded(FinishReason.STOP, 3, 2, matched_stop="ab")


def test_held_text_comes_out_when_the_answer_ends_otherwise() -> None:
    """Half a stop string at the end of the answer is text."""
    text, ended = _answer([0, 1, EOS], StoppingParams(stop=("bc",)))
    assert (text, ended.matched_stop) == ("ab?", None)


def test_stop_token_is_reported_before_the_length() -> None:
    """Where the last allowed token is a stop token, the answer ended by itself."""
    _, ended = _answer([0, EOS], StoppingParams(), max_tokens=2)
    assert ended.finish_reason is FinishReason.STOP


def test_aborted_answer_says_what_it_took() -> None:
    """An abort reports the tokens generated until then."""
    request = Request(GenerationSpec("r", (1, 2)), 1, 10)
    builder = AnswerBuilder(request, LetterDetokenizer(), [])
    request.token_ids.append(0)
    builder.append(SampledToken(0))
    assert builder.abort() == GenerationEnded(FinishReason.ABORT, 2, 1)
