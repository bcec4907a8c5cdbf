"""What a caller asks for: a prompt, how to answer it, and when to stop."""

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from engine_service.errors import InvalidRequestError
from engine_service.labels import GUIDANCE_LABELS
from engine_service.sampling_params import MAX_LOGPROBS, MAX_SEED, SamplingParams

MAX_GUIDANCE_SCALE = 100.0
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 64


@dataclass(frozen=True, slots=True)
class StoppingParams:
    """When generation ends.

    Args:
        max_tokens: tokens to generate at most, or None for the engine's default.
        stop: texts that end it and are not returned.
        stop_token_ids: tokens that end it.
        ignore_eos: go on after the model's end-of-sequence token.
        min_tokens: tokens to generate before a token or a stop string may end it.

    Raises:
        InvalidRequestError: a value breaks its rule.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequestError("stopping.max_tokens", f"{self.max_tokens} is below 1")
        if self.min_tokens < 0:
            raise InvalidRequestError("stopping.min_tokens", f"{self.min_tokens} is below 0")
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


def check_num_contexts(num_contexts: int) -> None:
    """Checks that a request has no more further contexts than there are labels for.

    Args:
        num_contexts: how many it has.

    Raises:
        InvalidRequestError: they are too many.
    """
    if num_contexts > len(GUIDANCE_LABELS):
        raise InvalidRequestError("guidance", f"{num_contexts} contexts are more than {len(GUIDANCE_LABELS)}")


class GuidanceContext(NamedTuple):
    """A further context of a request, which its answer is guided away from.

    Args:
        token_ids: the context.
        scale: how far to go from it towards the prompt: 1 leaves it out of account; 0 to 100.
    """

    token_ids: tuple[int, ...]
    scale: float


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """A prompt and how to answer it.

    Args:
        request_id: for logs.
        prompt_token_ids: the prompt.
        sampling: how tokens are chosen.
        stopping: when generation ends.
        num_logprobs: how many of the likeliest tokens to report at each place, or None for no log-probabilities.
        guidance: further contexts, at most two.
        num_samples: how many answers, 1 or more.
        num_prompt_logprobs: as `num_logprobs`, for the prompt's tokens.
        echoes_prompt: whether the caller is told the prompt before the answer.

    Raises:
        InvalidRequestError: a value breaks its rule.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stopping: StoppingParams = field(default_factory=StoppingParams)
    num_logprobs: int | None = None
    guidance: tuple[GuidanceContext, ...] = ()
    num_samples: int = 1
    num_prompt_logprobs: int | None = None
    echoes_prompt: bool = False

    def __post_init__(self) -> None:
        check_num_contexts(len(self.guidance))
        for number, context in enumerate(self.guidance):
            if not (math.isfinite(context.scale) and 0 <= context.scale <= MAX_GUIDANCE_SCALE):
                raise InvalidRequestError(
                    f"guidance[{number}].scale", f"must be 0 to {MAX_GUIDANCE_SCALE:g}, not {context.scale}"
                )
        if self.num_samples < 1:
            raise InvalidRequestError("n", f"{self.num_samples} is below 1")
        for name, count in (("logprobs", self.num_logprobs), ("prompt_logprobs", self.num_prompt_logprobs)):
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise InvalidRequestError(name, f"{count} is outside 0..{MAX_LOGPROBS}")

    @property
    def tells_prompt(self) -> bool:
        """Whether the caller is told of the prompt, by an event before the first token."""
        return self.echoes_prompt or self.num_prompt_logprobs is not None

    @property
    def num_streams(self) -> int:
        """KV sequences of one sample."""
        return 1 + len(self.guidance)

    def split_samples(self) -> "list[GenerationSpec]":
        """Returns a spec for each sample; a seed rises by one from each to the next."""
        if self.num_samples == 1:
            return [self]
        return [self._build_sample(number) for number in range(self.num_samples)]

    def _build_sample(self, number: int) -> "GenerationSpec":
        seed = self.sampling.seed
        return replace(
            self,
            request_id=f"{self.request_id}#{number}",
            sampling=replace(self.sampling, seed=None if seed is None else (seed + number) % (MAX_SEED + 1)),
            num_samples=1,
            # The samples have one prompt: the first of them tells of it.
            num_prompt_logprobs=None if number else self.num_prompt_logprobs,
            echoes_prompt=self.echoes_prompt and not number,
        )
