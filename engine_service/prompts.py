"""Turns prompts, in whatever form they come, into tokens."""

import asyncio
from typing import TYPE_CHECKING

from engine_service.errors import InvalidRequestError
from engine_service.validation import EngineLimits, check_num_characters, count_tokens_left
from engine_service.wire import Prompt

if TYPE_CHECKING:
    # It brings transformers, which takes seconds to import; the server listens before.
    from engine_service.tokenizer import Tokenizer


async def encode_prompt(prompt: Prompt, tokenizer: "Tokenizer", limits: EngineLimits) -> list[int]:
    """Returns a prompt's tokens; a long text does not hold up the other calls.

    Args:
        prompt: the prompt.
        tokenizer: the model's.
        limits: what the prompt has to fit.

    Raises:
        InvalidRequestError: it is empty, cannot be read, or can never fit.
    """
    field = prompt.full_field
    check_num_characters(prompt.num_characters, tokenizer.max_token_characters, limits, field=field)
    if prompt.field == "token_ids":
        count_tokens_left(len(prompt.token_ids), limits, field, "context" if prompt.path else "prompt")
        return list(prompt.token_ids)
    if prompt.field == "messages":
        return await asyncio.to_thread(tokenizer.encode_chat, prompt.messages, field=field)
    if not prompt.text:
        raise InvalidRequestError(field, "the prompt is empty")
    return await asyncio.to_thread(tokenizer.encode, prompt.text, field=field)
