"""The model's own tokenizer and chat template, behind what the engine needs of them."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from engine_service.errors import InvalidRequestError
from engine_service.request import ChatMessage

# What a token may stand for even if the longest is shorter: some tokenizers leave out spaces, or join unknown letters.
_MIN_TOKEN_CHARACTERS = 32


class Tokenizer:
    """Text to token ids and back, as the model's tokenizer does it. Safe to call from several threads.

    Args:
        backend: the tokenizer that came with the model.
        vocab_size: the model's number of token ids, which may exceed the tokenizer's.

    Attributes:
        max_token_characters: the most characters of a text that one token stands for.
    """

    def __init__(self, backend: PreTrainedTokenizerBase, *, vocab_size: int) -> None:
        self.backend = backend
        self.vocab_size = vocab_size
        self.max_token_characters = max(_MIN_TOKEN_CHARACTERS, *map(len, backend.get_vocab()))
        # The compiled tokenizer where there is one: the Python layers above it cost more than a decode itself.
        self._compiled = getattr(backend, "backend_tokenizer", None)
        # transformers may change settings of the compiled tokenizer at the first call, which fails while others use it.
        self._lock = threading.Lock()
        self.encode("")

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self.backend.chat_template)

    def encode(self, text: str, *, field: str = "text") -> list[int]:
        """Turns text into token ids, with the special tokens the model expects around a prompt.

        Args:
            text: the text.
            field: the request's field it came from, for the error.

        Returns:
            The token ids.

        Raises:
            InvalidRequestError: the text is not valid Unicode.
        """
        _require_unicode(text, field)
        with self._lock:
            token_ids: list[int] = self.backend(text, return_attention_mask=False)["input_ids"]
        return token_ids

    def encode_chat(self, messages: Sequence[ChatMessage], *, field: str = "messages") -> list[int]:
        """Renders a conversation with the model's own chat template, ready for the answer.

        Args:
            messages: the conversation.
            field: the request's field it came from, for the error.

        Returns:
            The token ids.

        Raises:
            InvalidRequestError: there are no messages, the model has no template, or the template refuses them.
        """
        if not messages:
            raise InvalidRequestError(field, "must hold at least one message")
        if not self.has_chat_template:
            raise InvalidRequestError(field, "the model has no chat template; give text or token_ids instead")
        for index, message in enumerate(messages):
            _require_unicode(message.role, f"{field}[{index}].role")
            _require_unicode(message.content, f"{field}[{index}].content")
        conversation = [message._asdict() for message in messages]
        try:
            with self._lock:
                rendered: Any = self.backend.apply_chat_template(
                    conversation, add_generation_prompt=True, tokenize=True, return_dict=False
                )
        except Exception as error:
            # A template is a program that came with the model: it may raise anything.
            raise InvalidRequestError(field, f"the model's chat template refuses them: {error}") from error
        token_ids: list[int] = rendered
        return token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Turns token ids into text; an incomplete character becomes U+FFFD.

        Args:
            token_ids: the tokens.
            skip_special_tokens: leave special tokens out.

        Returns:
            The text, with spaces as the tokens have them.
        """
        if self._compiled is not None:
            text: str = self._compiled.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
            return text
        decoded = self.backend.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(decoded, str)
        return decoded

    def save(self, folder: Path) -> None:
        """Writes the tokenizer's files, chat template included, as `transformers` and others read them.

        Args:
            folder: where to.
        """
        with self._lock:
            self.backend.save_pretrained(folder)


def _require_unicode(text: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code_point = ord(text[error.start])
        raise InvalidRequestError(
            field, f"must be valid Unicode; character {error.start} is the lone surrogate U+{code_point:04X}"
        ) from error
