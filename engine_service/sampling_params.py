"""How a request wants its tokens chosen, and what a choice is: plain values, without torch."""

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

from engine_service.errors import InvalidRequestError

MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 100.0
MAX_TOP_K = 2**31 - 1
MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 20
MAX_COUNT_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIASES = 1_024


def check_num_biases(num_biases: int) -> None:
    """Checks that a request has no more biases than it may.

    Args:
        num_biases: how many it has.

    Raises:
        InvalidRequestError: they are too many.
    """
    if num_biases > MAX_LOGIT_BIASES:
        raise InvalidRequestError("sampling.logit_bias", f"{num_biases} tokens are more than {MAX_LOGIT_BIASES}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen; the ranges are those of `inference.proto`.

    Args:
        temperature: 0 is greedy; at most 100.
        top_k: keep so many of the likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens whose probabilities reach this sum; above 0, at most 1.
        min_p: keep tokens at least this fraction as likely as the likeliest; 0 to 1.
        seed: makes sampling repeatable, whatever else runs; None is random.
        repetition_penalty: divides the positive and multiplies the negative logits of tokens seen in prompt and
            answer; above 0, at most 100.
        presence_penalty: taken from the logits of tokens that the answer already has; -2 to 2.
        frequency_penalty: taken from the logits of tokens as often as the answer already has them; -2 to 2.
        logit_bias: token ids, each once, and what is added to their logits before any penalty, -100 to 100.

    Raises:
        InvalidRequestError: a value is out of range; the field is named as in the proto, `sampling.<name>`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise InvalidRequestError(f"sampling.{field.name}", f"{value} is not a finite number")
        self._require("temperature", 0 <= self.temperature <= MAX_TEMPERATURE, "must be 0 to 100")
        self._require("top_k", 0 <= self.top_k <= MAX_TOP_K, f"must be 1 to {MAX_TOP_K}, or 0 to keep all")
        self._require("top_p", 0 < self.top_p <= 1, "must be above 0 and at most 1")
        self._require("min_p", 0 <= self.min_p <= 1, "must be 0 to 1")
        self._require("seed", self.seed is None or 0 <= self.seed <= MAX_SEED, "must be 0 to 2^64 - 1")
        self._require(
            "repetition_penalty", 0 < self.repetition_penalty <= MAX_REPETITION_PENALTY, "must be above 0, at most 100"
        )
        for name in ("presence_penalty", "frequency_penalty"):
            self._require(name, abs(getattr(self, name)) <= MAX_COUNT_PENALTY, "must be -2 to 2")
        self._check_logit_bias()

    def _check_logit_bias(self) -> None:
        check_num_biases(len(self.logit_bias))
        for token_id, bias in self.logit_bias:
            # Written so that a NaN is refused too.
            if not abs(bias) <= MAX_LOGIT_BIAS:
                raise InvalidRequestError(
                    "sampling.logit_bias", f"must be -100 to 100, not {bias} as for token {token_id}"
                )

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise InvalidRequestError(f"sampling.{name}", f"{rule}, not {getattr(self, name)}")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0


class TokenLogprob(NamedTuple):
    """A token and the natural logarithm of its probability under the model's own distribution."""

    token_id: int
    logprob: float


class SampledToken(NamedTuple):
    """What the sampler chose for one row.

    Args:
        token_id: the token.
        logprob: its log-probability (before temperature, penalties and truncation), or None where not asked for.
        top_logprobs: the likeliest tokens, the likeliest first; as many as asked for.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()
