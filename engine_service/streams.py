"""What the engine knows of a request's KV sequences, and how much of them a step computes. Pure: numbers only."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine_service.labels import GUIDANCE_LABELS, MAIN_LABEL

# A context that shares fewer tokens with the prompt is computed with the rest of it: a step of its own, which a fork
# needs to wait for, would cost more.
MIN_FORKED_TOKENS = 8


@dataclass(eq=False, slots=True)
class RequestStream:
    """One KV sequence of a request: a prompt, and after it the tokens that are generated.

    Args:
        label: its name.
        prompt_token_ids: the prompt of the request, or a further context of it.
        num_forked_tokens: how many of them it gets by a fork from the request's first stream; 0 for none.
        num_computed_tokens: how many of its tokens stand in the KV cache.
    """

    label: str
    prompt_token_ids: tuple[int, ...]
    num_forked_tokens: int = 0
    num_computed_tokens: int = 0

    @property
    def waits_for_fork(self) -> bool:
        """Whether it is still to be forked."""
        return bool(self.num_forked_tokens) and not self.num_computed_tokens


class StreamFork(NamedTuple):
    """A fork that gives a stream of a request its first tokens.

    Args:
        source: the `arrival` of the request it is forked from.
        source_label: the label of that request.
        target_label: the label that becomes equal to it.
        num_tokens: how many tokens that gives.
    """

    source: int
    source_label: str
    target_label: str
    num_tokens: int


class Shares(NamedTuple):
    """What a step computes of a request.

    Args:
        num_tokens: how many tokens of each stream.
        forks: the forks that come before.
    """

    num_tokens: tuple[int, ...]
    forks: tuple[StreamFork, ...]


def build_streams(prompt_token_ids: tuple[int, ...], contexts: Sequence[tuple[int, ...]]) -> tuple[RequestStream, ...]:
    """Returns the streams of a new request.

    Args:
        prompt_token_ids: its prompt.
        contexts: its further contexts.
    """
    labels = GUIDANCE_LABELS[: len(contexts)]
    return (
        RequestStream(MAIN_LABEL, prompt_token_ids),
        *[
            RequestStream(label, context, _count_forked_tokens(prompt_token_ids, context))
            for label, context in zip(labels, contexts, strict=True)
        ],
    )


def share_tokens(
    arrival: int,
    streams: Sequence[RequestStream],
    num_generated_tokens: int,
    num_tokens: int,
    *,
    keeps_last: bool = False,
) -> Shares:
    """Returns how many tokens of a request's streams a step computes.

    The last tokens of all streams are computed in one step, so that what follows them is known at once.

    Args:
        arrival: the request's.
        streams: its streams; the first is the one that others are forked from.
        num_generated_tokens: the tokens that come after each stream's prompt.
        num_tokens: tokens that may be computed, at most.
        keeps_last: whether the last token of each stream is left for a later step in any case.

    Returns:
        The shares; all 0 where nothing can be computed yet.
    """
    main = streams[0]
    forks = tuple(
        StreamFork(arrival, main.label, stream.label, stream.num_forked_tokens)
        for stream in streams[1:]
        if stream.waits_for_fork and stream.num_forked_tokens == main.num_computed_tokens
    )
    num_missing = [
        len(stream.prompt_token_ids) + num_generated_tokens - find_start(stream, forks) for stream in streams
    ]
    forked = {fork.target_label for fork in forks}
    stops = [s.num_forked_tokens for s in streams if s.waits_for_fork and s.label not in forked]
    if not stops and not keeps_last and sum(num_missing) <= num_tokens:
        return Shares(tuple(num_missing), forks)
    limits = [missing - 1 for missing in num_missing]
    if stops:
        # The first stream holds still where others are to be forked from it; those have nothing to go on from yet.
        limits[0] = min(limits[0], min(stops) - main.num_computed_tokens)
        for place, stream in enumerate(streams):
            if stream.waits_for_fork and stream.label not in forked:
                limits[place] = 0
    shares = []
    for limit in limits:
        shares.append(min(limit, num_tokens))
        num_tokens -= shares[-1]
    return Shares(tuple(shares), forks if any(shares) else ())


def find_start(stream: RequestStream, forks: Sequence[StreamFork]) -> int:
    """Returns how many of a stream's tokens stand in the KV cache once a step's forks are done."""
    for fork in forks:
        if fork.target_label == stream.label:
            return fork.num_tokens
    return stream.num_computed_tokens


def _count_forked_tokens(prompt: Sequence[int], context: Sequence[int]) -> int:
    """Returns how many tokens a context takes over from the prompt; its last token is always its own."""
    num_common = 0
    for ours, theirs in zip(prompt[:-1], context[:-1], strict=False):
        if ours != theirs:
            break
        num_common += 1
    return num_common if num_common >= MIN_FORKED_TOKENS else 0
