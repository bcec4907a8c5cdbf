"""A request: what has become of it, and what its caller is told."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from engine_service.errors import EngineError
from engine_service.generation_spec import GenerationSpec, GuidanceContext, StoppingParams
from engine_service.sampling_params import SampledToken
from engine_service.streams import RequestStream, build_streams

__all__ = [
    "ChatMessage",
    "FinishReason",
    "GeneratedDelta",
    "GenerationEnded",
    "GenerationEvent",
    "GenerationFailed",
    "GenerationSpec",
    "GuidanceContext",
    "OnEvent",
    "PromptComputed",
    "Request",
    "StoppingParams",
]


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class ChatMessage(NamedTuple):
    """One message of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class PromptComputed:
    """The prompt stands in the KV cache; comes before the first token, where it is asked for.

    Args:
        logprobs: its tokens but the first and how likely each was; empty where not asked for.
    """

    logprobs: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class GeneratedDelta:
    """Newly generated tokens, and the text that is now certain."""

    text: str
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class GenerationEnded:
    """How a request ended; its last event."""

    finish_reason: FinishReason
    num_prompt_tokens: int
    num_completion_tokens: int
    matched_stop: str | None = None
    matched_token_id: int | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GenerationFailed:
    """What kept a request from ending well; its last event."""

    error: EngineError


GenerationEvent = PromptComputed | GeneratedDelta | GenerationEnded | GenerationFailed
OnEvent = Callable[[GenerationEvent], None]


@dataclass(eq=False, slots=True)
class Request:
    """A request in the engine, owned by its thread.

    Args:
        spec: what was asked for.
        arrival: its place in the order of arrival.
        max_tokens: tokens to generate at most, settled.

    Attributes:
        token_ids: the tokens of the prompt and those generated so far.
        streams: its KV sequences; the first is the prompt's, the others its further contexts'.
        leader: the sample whose streams this one is to be forked from, until it is.
        followers: the samples that are to be forked from this one.
        num_shared_tokens: how many tokens of each stream it got, or gave, by such a fork.
        shared_with: the `arrival` of the sample that all those who share them were forked from.
        is_running: whether the scheduler has let it run.
        num_cached_tokens: tokens of its prompt that it got by a fork from another request.
        prompt_logprobs: what is known of the log-probabilities of its prompt's tokens, from the second token on.
    """

    spec: GenerationSpec
    arrival: int
    max_tokens: int
    token_ids: list[int] = field(init=False)
    streams: tuple[RequestStream, ...] = field(init=False)
    leader: "Request | None" = field(init=False, default=None)
    followers: "list[Request]" = field(init=False, default_factory=list)
    num_shared_tokens: tuple[int, ...] = field(init=False, default=())
    shared_with: int | None = field(init=False, default=None)
    is_running: bool = field(init=False, default=False)
    num_cached_tokens: int = field(init=False, default=0)
    prompt_logprobs: list[SampledToken] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        spec = self.spec
        self.token_ids = list(spec.prompt_token_ids)
        self.streams = build_streams(spec.prompt_token_ids, [context.token_ids for context in spec.guidance])

    @property
    def num_computed_tokens(self) -> int:
        """How many of `token_ids` stand in the KV cache."""
        return self.streams[0].num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether each of its streams misses one token."""
        if self.num_missing_tokens != 1:
            return False
        return len(self.streams) == 1 or all(self.count_missing(stream) == 1 for stream in self.streams)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.spec.prompt_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.spec.prompt_token_ids)

    @property
    def num_missing_tokens(self) -> int:
        """Tokens that do not stand in the KV cache yet; 1 for a request that decodes."""
        return len(self.token_ids) - self.num_computed_tokens

    def count_tokens(self, stream: RequestStream) -> int:
        """Returns how many tokens a stream of it has, those that are not computed yet included."""
        return len(stream.prompt_token_ids) + self.num_generated_tokens

    def count_missing(self, stream: RequestStream) -> int:
        """Returns how many tokens of a stream do not stand in the KV cache yet."""
        return self.count_tokens(stream) - stream.num_computed_tokens

    def read_tokens(self, stream: RequestStream, start: int, num_tokens: int) -> list[int]:
        """Returns so many tokens of a stream from `start` on."""
        if stream is self.streams[0]:
            return self.token_ids[start : start + num_tokens]
        prompt = stream.prompt_token_ids
        offset = self.num_prompt_tokens - len(prompt)
        end = start + num_tokens
        return [*prompt[start:end], *self.token_ids[max(start, len(prompt)) + offset : max(end, len(prompt)) + offset]]

    def forget_computed(self) -> None:
        """Notes that nothing of it stands in the KV cache any more."""
        for stream in self.streams:
            stream.num_computed_tokens = 0
        self.num_shared_tokens = ()
        self.num_cached_tokens = 0
        self.shared_with = None

    def follow(self, leader: "Request") -> None:
        """Makes this a sample that is to be forked from another one."""
        self.leader = leader
        leader.followers.append(self)

    def leave_samples(self) -> None:
        """Lets the samples that belong with it go their own way."""
        self.unfollow()
        for follower in list(self.followers):
            follower.unfollow()

    def unfollow(self) -> None:
        """Makes this a request like any other: it computes its prompt itself."""
        if self.leader is not None:
            self.leader.followers.remove(self)
            self.leader = None
