"""Checks a prompt against the model and the KV cache before it enters the engine."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine_service.errors import InvalidRequestError, RequestTooLargeError


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the loaded model and the KV cache can take.

    Args:
        vocab_size: token ids are 0 to `vocab_size - 1`.
        max_context_tokens: tokens of prompt and answer together.
        page_size: tokens a page holds.
        num_pages: pages in the pool, the sink page included.
        default_max_tokens: tokens to generate for a request that does not say.
    """

    vocab_size: int
    max_context_tokens: int
    page_size: int
    num_pages: int
    default_max_tokens: int = 256

    @property
    def num_usable_pages(self) -> int:
        """Pages that requests can hold: all but the sink page."""
        return self.num_pages - 1

    def count_pages(self, num_tokens: int) -> int:
        """Returns how many pages so many tokens take."""
        return -(-num_tokens // self.page_size)


def check_token_ids(token_ids: Sequence[int], limits: EngineLimits, field: str) -> None:
    """Checks that token ids are the model's.

    Args:
        token_ids: what to check.
        limits: whose `vocab_size` bounds them.
        field: their name in the request.

    Raises:
        InvalidRequestError: one is out of range.
    """
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < limits.vocab_size):
        place, wrong = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < limits.vocab_size)
        raise InvalidRequestError(field, f"{wrong}, at place {place}, is outside 0..{limits.vocab_size - 1}")


def check_num_characters(num_characters: int, max_token_characters: int, limits: EngineLimits, field: str) -> None:
    """Checks that a text can fit the model's context at all, before it is turned into tokens.

    That takes seconds a megabyte, keeps the tokenizer from everybody else, and cannot be broken off.

    Args:
        num_characters: the text's length.
        max_token_characters: the most characters that a token stands for.
        limits: what it has to fit.
        field: its name in the request.

    Raises:
        InvalidRequestError: it cannot.
    """
    num_fitting = limits.max_context_tokens * max_token_characters
    if num_characters > num_fitting:
        raise InvalidRequestError(
            field,
            f"{num_characters} characters are more than {num_fitting}, which is what the model's context of "
            f"{limits.max_context_tokens} tokens can hold at the very most",
        )


def count_tokens_left(num_tokens: int, limits: EngineLimits, field: str, what: str = "prompt") -> int:
    """Returns how many tokens of the model's context a prompt leaves for an answer.

    Args:
        num_tokens: tokens of the prompt.
        limits: what it has to fit.
        field: its name in the request.
        what: what it is, for the error.

    Raises:
        InvalidRequestError: it leaves none.
    """
    num_left = limits.max_context_tokens - num_tokens
    if num_left < 1:
        raise InvalidRequestError(
            field,
            f"a {what} of {num_tokens} tokens leaves no room for an answer in the model's context of "
            f"{limits.max_context_tokens} tokens",
        )
    return num_left


def settle_max_tokens(num_prompt_tokens: int, max_tokens: int | None, limits: EngineLimits, field: str) -> int:
    """Checks that a prompt fits, and settles how many tokens may follow it.

    The last generated token never enters the KV cache, so prompt and answer take one slot less than their tokens.

    Args:
        num_prompt_tokens: tokens of the prompt.
        max_tokens: tokens asked for, or None for the default.
        limits: what they have to fit.
        field: the prompt's name in the request.

    Returns:
        Tokens to generate at most, 1 or more; no more than the model's context leaves.

    Raises:
        InvalidRequestError: the prompt is empty, or leaves no room for an answer in the model's context.
        RequestTooLargeError: the KV cache could never hold prompt and answer.
    """
    if num_prompt_tokens == 0:
        raise InvalidRequestError(field, "the prompt is empty")
    num_left = count_tokens_left(num_prompt_tokens, limits, field)
    num_slots = limits.num_usable_pages * limits.page_size
    if max_tokens is None:
        # At least 1, so that a prompt which does not fit by itself is refused below.
        settled = max(1, min(limits.default_max_tokens, num_left, num_slots + 1 - num_prompt_tokens))
    else:
        settled = min(max_tokens, num_left)
    num_needed = limits.count_pages(num_prompt_tokens + settled - 1)
    if num_needed > limits.num_usable_pages:
        too_long = num_prompt_tokens > num_slots
        raise RequestTooLargeError(field if too_long else "stopping.max_tokens", num_needed, limits.num_usable_pages)
    return settled


def check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    """Checks that a request may generate the tokens that it must.

    Args:
        min_tokens: tokens to generate at least.
        max_tokens: tokens to generate at most, settled.

    Raises:
        InvalidRequestError: it may not.
    """
    if min_tokens > max_tokens:
        raise InvalidRequestError(
            "stopping.min_tokens", f"{min_tokens} is above {max_tokens}, the most tokens that may be generated"
        )
