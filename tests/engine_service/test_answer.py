"""Rules of the answer builder: text, ends, and which of several ends is reported."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from engine_service.answer import AnswerBuilder
from engine_service.detokenizer import IncrementalDetokenizer
from engine_service.request import FinishReason, GenerationEnded, GenerationSpec, Request, StoppingParams
from engine_service.sampling_params import SampledToken
from engine_service.tokenizer import Tokenizer
from tests.engine_service.tiny_models import VOCAB_SIZE, build_tokenizer

EOS = 99
TOKENIZER = Tokenizer(build_tokenizer(), vocab_size=VOCAB_SIZE)


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


def test_stop_string_counts_only_after_min_tokens() -> None:
    """A stop string that is complete before is text like any other; one that the next token completes ends it."""
    text, ended = _answer([0, 1, 0, 1], StoppingParams(stop=("ab",), min_tokens=3))
    assert text == "ab"
    assert ended == GenerationEnded(FinishReason.STOP, 3, 4, matched_stop="ab")
    text, ended = _answer([0, 0, 0, 0], StoppingParams(stop=("aa",), min_tokens=2))
    assert (text, ended.num_completion_tokens) == ("a", 3)


def test_stop_string_that_came_too_early_is_returned_at_the_end() -> None:
    """Nothing that was held back for it is lost."""
    text, ended = _answer([0, 1, 2], StoppingParams(stop=("bc",), min_tokens=3), max_tokens=3)
    assert (text, ended.finish_reason) == ("abc?", FinishReason.LENGTH)


def test_end_says_which_tokens_of_the_prompt_came_from_elsewhere() -> None:
    """Usage has the cached tokens."""
    request = Request(GenerationSpec("r", (1, 2, 3)), 1, 10)
    request.num_cached_tokens = 2
    assert AnswerBuilder(request, LetterDetokenizer(), []).abort().num_cached_tokens == 2


def _cut_naively(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Searches the whole text: the first stop string to be complete ends it, the longest of those."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    text=st.text(alphabet="ae\u00e9\u65e5\U0001f642\u200d ", min_size=1, max_size=12),
    cut=st.tuples(st.integers(0, 11), st.integers(1, 5)),
    others=st.lists(st.text(alphabet="ae\u00e9\u65e5\U0001f642", min_size=1, max_size=3), max_size=2),
)
def test_characters_and_stop_strings_across_tokens_come_out_as_in_the_whole_text(
    text: str, cut: tuple[int, int], others: list[str]
) -> None:
    """Most characters here take several tokens; no delta holds half a one; a stop string is found wherever it is."""
    token_ids = TOKENIZER.encode(text)
    stops = [stop for stop in (text[cut[0] : sum(cut)], *others) if stop]
    request = Request(GenerationSpec("r", (1,), stopping=StoppingParams(stop=tuple(stops))), 1, len(token_ids))
    builder = AnswerBuilder(request, IncrementalDetokenizer(TOKENIZER), [])
    deltas: list[str] = []
    ended = None
    for token_id in token_ids:
        request.token_ids.append(token_id)
        delta, ended = builder.append(SampledToken(token_id))
        deltas.append(delta.text)
        if ended is not None:
            break
    assert ended is not None
    assert ("".join(deltas), ended.matched_stop) == _cut_naively(text, stops)
    assert not any("\ufffd" in delta for delta in deltas)
