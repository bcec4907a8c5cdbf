"""Turns tokens into text as they come, without ever cutting a character in two."""

from collections.abc import Sequence

from engine_service.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"

# Tokens kept before the held ones: a word piece needs its neighbour to know whether a space goes before it.
_MAX_CONTEXT_TOKENS = 8

# A character has at most four bytes and a token at least one, so more held tokens are bytes that never become one.
_MAX_HELD_TOKENS = 16


class IncrementalDetokenizer:
    """The text of one answer, token by token; each token costs the same however long the answer is.

    Args:
        tokenizer: the model's tokenizer.
        prompt_token_ids: the prompt, whose last tokens decide whether the answer starts with a space.
        skip_special_tokens: leave special tokens out of the text.
    """

    __slots__ = ("_context", "_context_text", "_held", "_skip_special_tokens", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []
        self._context_text = ""
        self._held: list[int] = []
        self._start_after(prompt_token_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes new tokens and returns the text they complete; what could still be part of a character is held back.

        Args:
            token_ids: the tokens, in order.

        Returns:
            The text to append; may be empty.
        """
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """Ends the answer and returns the text still held back; broken characters come as U+FFFD."""
        return self._release(self._decode(self._context + self._held)) if self._held else ""

    def _start_after(self, prompt_token_ids: Sequence[int]) -> None:
        """Takes the shortest end of the prompt that has text and does not start inside a character, or the longest."""
        for num_tokens in range(1, min(_MAX_CONTEXT_TOKENS, len(prompt_token_ids)) + 1):
            self._context = list(prompt_token_ids[-num_tokens:])
            self._context_text = self._decode(self._context)
            if self._context_text and not self._context_text.startswith(REPLACEMENT):
                return

    def _push_one(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._decode(self._context + self._held)
        if text.endswith(REPLACEMENT) and len(self._held) <= _MAX_HELD_TOKENS:
            return ""
        return self._release(text)

    def _release(self, text: str) -> str:
        # Not simply the lengths: a prompt that ends inside a character reads otherwise once the answer completes it.
        new_text = text[_count_common(self._context_text, text) :]
        if new_text:
            self._context, self._context_text = self._held, self._decode(self._held)
        else:
            # Tokens without text, such as special ones, say nothing about spaces: the older context stays.
            self._context = (self._context + self._held)[-_MAX_CONTEXT_TOKENS:]
            self._context_text = self._decode(self._context)
        self._held = []
        return new_text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens) if token_ids else ""


def _count_common(first: str, second: str) -> int:
    """Returns how many characters two texts have in common at their start."""
    if second.startswith(first):
        return len(first)
    pairs = zip(first, second, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
