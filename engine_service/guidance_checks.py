"""Checks the further contexts and the samples of a request against the model and the KV cache."""

from bisect import bisect_right
from collections.abc import Sequence

from engine_service.errors import InvalidRequestError, RequestTooLargeError
from engine_service.request import GenerationSpec
from engine_service.streams import RequestStream, build_streams
from engine_service.validation import EngineLimits, check_token_ids, count_tokens_left


def check_places(spec: GenerationSpec, max_running_requests: int) -> None:
    """Checks that all contexts of all samples can run at once.

    Args:
        spec: what is asked for.
        max_running_requests: how many of them a step takes.

    Raises:
        InvalidRequestError: they cannot.
    """
    num_places = spec.num_samples * spec.num_streams
    if num_places > max_running_requests:
        raise InvalidRequestError(
            "n" if spec.num_samples > 1 else "guidance",
            f"{spec.num_samples} samples of {spec.num_streams} contexts each are more than the {max_running_requests} "
            "that run at once (the engine's max_running_requests setting)",
        )


def settle_guided_tokens(spec: GenerationSpec, max_tokens: int, limits: EngineLimits, fields: Sequence[str]) -> int:
    """Checks that further contexts fit beside the prompt, and settles how many tokens may follow them all.

    Args:
        spec: what is asked for.
        max_tokens: how many tokens may follow the prompt by itself.
        limits: what they have to fit.
        fields: the contexts' names in the request.

    Returns:
        Tokens to generate at most, 1 to `max_tokens`.

    Raises:
        InvalidRequestError: a context is empty, has tokens that are none, or leaves no room for an answer.
        RequestTooLargeError: the KV cache could never hold prompt, contexts and answer.
    """
    if not spec.guidance:
        return max_tokens
    for context, field in zip(spec.guidance, fields, strict=True):
        check_token_ids(context.token_ids, limits, field)
        if not context.token_ids:
            raise InvalidRequestError(field, "the context is empty")
        max_tokens = min(max_tokens, count_tokens_left(len(context.token_ids), limits, field, "context"))
    streams = build_streams(spec.prompt_token_ids, [context.token_ids for context in spec.guidance])

    def count(num_tokens: int) -> int:
        return _count_pages(streams, num_tokens, limits)

    if spec.stopping.max_tokens is None:
        num_fitting = bisect_right(range(1, max_tokens + 1), limits.num_usable_pages, key=count)
        max_tokens = max(1, num_fitting)
    if count(max_tokens) > limits.num_usable_pages:
        too_long = count(1) > limits.num_usable_pages
        field = "guidance" if too_long else "stopping.max_tokens"
        raise RequestTooLargeError(field, count(max_tokens), limits.num_usable_pages)
    return max_tokens


def _count_pages(streams: Sequence[RequestStream], num_generated: int, limits: EngineLimits) -> int:
    """Returns the pages that the streams take; the last generated token never enters the KV cache."""
    return sum(
        limits.count_pages(len(stream.prompt_token_ids) + num_generated - 1)
        - stream.num_forked_tokens // limits.page_size
        for stream in streams
    )
