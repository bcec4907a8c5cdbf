"""One request's part in a step."""

from dataclasses import dataclass

from engine_service.labels import MAIN_LABEL
from engine_service.request import Request
from engine_service.streams import StreamFork, find_start


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """One request's part in a step.

    Args:
        request: the request.
        num_tokens: how many missing tokens of its prompt and answer the step computes.
        num_context_tokens: the same for each of its further contexts.
        forks: the forks that give its streams their first tokens before the step.
    """

    request: Request
    num_tokens: int
    num_context_tokens: tuple[int, ...] = ()
    forks: tuple[StreamFork, ...] = ()

    @property
    def num_stream_tokens(self) -> tuple[int, ...]:
        """How many tokens of each stream the step computes."""
        return (self.num_tokens, *self.num_context_tokens)

    @property
    def is_sampled(self) -> bool:
        """Whether the step computes the last token of each stream, so that the next one can be chosen."""
        request = self.request
        if not self.forks and not self.num_context_tokens:
            return self.num_tokens == request.num_missing_tokens
        return all(
            find_start(stream, self.forks) + num_tokens == request.count_tokens(stream)
            for stream, num_tokens in zip(request.streams, self.num_stream_tokens, strict=True)
        )

    @property
    def is_decode(self) -> bool:
        """Whether the step computes one token of each stream, and forks none."""
        return self.num_tokens == 1 and not self.forks and all(count == 1 for count in self.num_context_tokens)

    @property
    def token_ids(self) -> list[int]:
        """The tokens of prompt and answer that the step computes."""
        return self.read_tokens(0)

    @property
    def parts(self) -> list[tuple[str, int]]:
        """The label and the number of tokens of each stream that the step computes tokens of."""
        if not self.num_context_tokens:
            return [(MAIN_LABEL, self.num_tokens)]
        pairs = zip(self.request.streams, self.num_stream_tokens, strict=True)
        return [(stream.label, num_tokens) for stream, num_tokens in pairs if num_tokens]

    def read_tokens(self, place: int) -> list[int]:
        """Returns the tokens that the step computes of the stream at this place."""
        stream = self.request.streams[place]
        start = find_start(stream, self.forks) if self.forks else stream.num_computed_tokens
        num_tokens = self.num_context_tokens[place - 1] if place else self.num_tokens
        return self.request.read_tokens(stream, start, num_tokens)

    def complete(self) -> None:
        """Counts the step's tokens as computed."""
        request = self.request
        if not self.forks and not self.num_context_tokens:
            request.streams[0].num_computed_tokens += self.num_tokens
            return
        for stream, num_tokens in zip(request.streams, self.num_stream_tokens, strict=True):
            stream.num_computed_tokens = find_start(stream, self.forks) + num_tokens


def build_forked_row(request: Request, leader: Request) -> ScheduledRow:
    """Returns the first row of a sample: its streams are forked, and the last token of each prompt is computed.

    Args:
        request: the sample.
        leader: the one whose streams it gets; it has computed all but the last token of each prompt.
    """
    forks = [
        StreamFork(leader.arrival, stream.label, stream.label, stream.num_computed_tokens)
        for stream in leader.streams
        if stream.num_computed_tokens
    ]
    return ScheduledRow(request, 1, (1,) * (len(request.streams) - 1), tuple(forks))
