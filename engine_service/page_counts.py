"""How many pages requests need, as the engine counts them: shared pages once. The planner alone knows which pages."""

from collections.abc import Iterable

from engine_service.request import Request
from engine_service.validation import EngineLimits


def count_pages(request: Request, limits: EngineLimits) -> int:
    """Returns how many pages the tokens of a request take, samples that are still to be forked from it included.

    Args:
        request: the request.
        limits: what they have to fit.
    """
    own = _count_own_pages(request, limits)
    if not request.followers:
        return own
    num_waiting = sum(not follower.is_running for follower in request.followers)
    if not num_waiting:
        return own
    fork_lengths = tuple(len(stream.prompt_token_ids) - 1 for stream in request.streams)
    return own + num_waiting * (own - _count_shared_pages(request, fork_lengths, limits))


def count_held_pages(requests: Iterable[Request], limits: EngineLimits) -> int:
    """Returns how many pages the tokens of running requests take together."""
    num_pages = 0
    counted: set[int] = set()
    for request in requests:
        num_pages += count_pages(request, limits)
        if request.shared_with is not None:
            if request.shared_with in counted:
                num_pages -= _count_shared_pages(request, request.num_shared_tokens, limits)
            counted.add(request.shared_with)
    return num_pages


def _count_own_pages(request: Request, limits: EngineLimits) -> int:
    if len(request.streams) == 1:
        return limits.count_pages(len(request.token_ids))
    return sum(
        limits.count_pages(request.count_tokens(stream)) - stream.num_forked_tokens // limits.page_size
        for stream in request.streams
    )


def _count_shared_pages(request: Request, num_tokens: tuple[int, ...], limits: EngineLimits) -> int:
    """Returns the pages that so many tokens of each stream fill."""
    return sum(
        shared // limits.page_size - stream.num_forked_tokens // limits.page_size
        for stream, shared in zip(request.streams, num_tokens, strict=True)
    )
