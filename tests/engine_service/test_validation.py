"""Rules for prompts and lengths."""

import pytest

from engine_service.errors import InvalidRequestError, RequestTooLargeError
from engine_service.validation import (
    EngineLimits,
    check_min_tokens,
    check_num_characters,
    check_token_ids,
    count_tokens_left,
    settle_max_tokens,
)

# 4 usable pages of 4 tokens: 16 slots; answers of 10 tokens where nothing is said.
LIMITS = EngineLimits(vocab_size=100, max_context_tokens=14, page_size=4, num_pages=5, default_max_tokens=10)
SMALL_POOL = EngineLimits(vocab_size=100, max_context_tokens=1_000, page_size=4, num_pages=5, default_max_tokens=10)


@pytest.mark.parametrize("token_ids", [[-1], [5, 100], [0, 99, 2**31 - 1]])
def test_token_ids_out_of_range_are_refused_with_value_and_place(token_ids: list[int]) -> None:
    """The message names the token, where it stands and the range."""
    with pytest.raises(
        InvalidRequestError, match=rf"{token_ids[-1]}, at place {len(token_ids) - 1}, .*0\.\.99"
    ) as caught:
        check_token_ids(token_ids, LIMITS, "token_ids")
    assert caught.value.field == "token_ids"


@pytest.mark.parametrize("token_ids", [[], [0], [99, 0, 50]])
def test_token_ids_of_the_model_pass(token_ids: list[int]) -> None:
    """Every id from 0 to vocab_size - 1 is allowed, and so are none."""
    check_token_ids(token_ids, LIMITS, "token_ids")


def test_text_that_no_tokens_of_the_context_can_hold_is_refused() -> None:
    """14 tokens of at most 3 characters are 42 characters; the message has all figures."""
    check_num_characters(42, 3, LIMITS, "text")
    with pytest.raises(InvalidRequestError, match=r"43 characters are more than 42.*14 tokens") as caught:
        check_num_characters(43, 3, LIMITS, "text")
    assert caught.value.field == "text"


def test_what_a_prompt_leaves_is_counted_or_refused_by_its_name() -> None:
    """At least one token has to be left."""
    assert count_tokens_left(13, LIMITS, "text") == 1
    with pytest.raises(InvalidRequestError, match=r"a context of 14 tokens leaves no room.*14 tokens"):
        count_tokens_left(14, LIMITS, "guidance[0].text", "context")


def test_empty_prompt_is_refused() -> None:
    """There is nothing to continue."""
    with pytest.raises(InvalidRequestError, match="empty"):
        settle_max_tokens(0, None, LIMITS, "text")


@pytest.mark.parametrize("num_prompt_tokens", [14, 15, 10_000])
def test_prompt_that_leaves_no_room_in_the_context_is_refused(num_prompt_tokens: int) -> None:
    """Prompt and at least one token must fit the model's context; the message has both figures."""
    with pytest.raises(InvalidRequestError, match=rf"{num_prompt_tokens} tokens.*14 tokens") as caught:
        settle_max_tokens(num_prompt_tokens, 1, LIMITS, "messages")
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "settled"),
    [(1, None, 10), (6, None, 8), (13, None, 1), (1, 5, 5), (6, 100, 8), (13, 1, 1)],
)
def test_answer_is_bounded_by_default_and_context(num_prompt_tokens: int, max_tokens: int | None, settled: int) -> None:
    """What is asked for counts, else the default; the model's context bounds both."""
    assert settle_max_tokens(num_prompt_tokens, max_tokens, LIMITS, "text") == settled


@pytest.mark.parametrize(("num_prompt_tokens", "settled"), [(7, 10), (10, 7), (16, 1)])
def test_default_answer_is_bounded_by_the_pool(num_prompt_tokens: int, settled: int) -> None:
    """A request that says nothing gets what the KV cache can hold; the last token needs no slot."""
    assert settle_max_tokens(num_prompt_tokens, None, SMALL_POOL, "text") == settled


def test_request_that_just_fits_the_pool_is_taken() -> None:
    """16 slots hold a prompt of 10 and 7 tokens, of which the last is never stored."""
    assert settle_max_tokens(10, 7, SMALL_POOL, "text") == 7


def test_request_that_can_never_fit_is_refused_with_the_figures() -> None:
    """Pages needed and pages there are in the error; the field is what asks for too much."""
    with pytest.raises(RequestTooLargeError, match=r"5 pages.*which has 4.*num_pages") as caught:
        settle_max_tokens(10, 8, SMALL_POOL, "text")
    assert (caught.value.num_pages_needed, caught.value.num_pages_usable) == (5, 4)
    assert caught.value.field == "stopping.max_tokens"


def test_prompt_larger_than_the_pool_is_refused_as_such() -> None:
    """Where the prompt alone does not fit, the prompt is the field at fault."""
    with pytest.raises(RequestTooLargeError) as caught:
        settle_max_tokens(17, None, SMALL_POOL, "text")
    assert caught.value.field == "text"


def test_fewest_tokens_above_the_most_are_refused_with_both() -> None:
    """The most may come from the request, the default, or what the context leaves."""
    check_min_tokens(5, 5)
    with pytest.raises(InvalidRequestError, match="6 is above 5") as caught:
        check_min_tokens(6, 5)
    assert caught.value.field == "stopping.min_tokens"
