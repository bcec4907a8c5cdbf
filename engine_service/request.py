"""A request: what its caller asks for, what has become of it, and what its caller is told."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from engine_service.errors import EngineError, InvalidRequestError
from engine_service.sampling_params import MAX_LOGPROBS, SampledToken, SamplingParams

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 64


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
class StoppingParams:
    """When generation ends.

    Args:
        max_tokens: tokens to generate at most, or None for the engine's default.
        stop: texts that end it and are not returned.
        stop_token_ids: tokens that end it.
        ignore_eos: go on after the model's end-of-sequence token.

    Raises:
        InvalidRequestError: a value breaks its rule.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequestError("stopping.max_tokens", f"{self.max_tokens} is below 1")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError("stopping.stop", f"{len(self.stop)} texts are more than {MAX_STOP_STRINGS}")
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
                raise InvalidRequestError(
                    "stopping.stop", f"a text of {len(text)} characters is outside 1..{MAX_STOP_CHARACTERS}"
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                "stopping.stop_token_ids", f"{len(self.stop_token_ids)} tokens are more than {MAX_STOP_TOKEN_IDS}"
            )


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """A prompt and how to answer it.

    Args:
        request_id: for logs.
        prompt_token_ids: the prompt.
        sampling: how tokens are chosen.
        stopping: when generation ends.
        num_logprobs: how many of the likeliest tokens to report at each place, or None for no log-probabilities.

    Raises:
        InvalidRequestError: a value breaks its rule.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stopping: StoppingParams = field(default_factory=StoppingParams)
    num_logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.num_logprobs is not None and not 0 <= self.num_logprobs <= MAX_LOGPROBS:
            raise InvalidRequestError("logprobs", f"{self.num_logprobs} is outside 0..{MAX_LOGPROBS}")


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


@dataclass(frozen=True, slots=True)
class GenerationFailed:
    """What kept a request from ending well; its last event."""

    error: EngineError


GenerationEvent = GeneratedDelta | GenerationEnded | GenerationFailed
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
        num_computed_tokens: how many of them stand in the KV cache.
    """

    spec: GenerationSpec
    arrival: int
    max_tokens: int
    token_ids: list[int] = field(init=False)
    num_computed_tokens: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.token_ids = list(self.spec.prompt_token_ids)

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
