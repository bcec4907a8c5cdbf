"""What came of each request of a load, as it is measured and as a line of JSON."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from ringplan_cli.load.schedule import LoadRequest

_DIGITS = 6


class Outcome(Enum):
    """How a request of a load ended."""

    # Not yet sent.
    PENDING = "not_sent"
    # Sent; it has not ended, or had not when the load test was cut off.
    RUNNING = "cut_off"
    # Every sample has its final message.
    COMPLETED = "completed"
    # The engine would not take it: no token came.
    REFUSED = "refused"
    # It was taken, or never reached the engine, and broke.
    FAILED = "failed"


@dataclass(slots=True)
class SampleTimes:
    """When the tokens of one sample came: a message each, in seconds from the start of the load."""

    seconds: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)

    def read_gaps(self) -> npt.NDArray[np.float64]:
        """Returns the time of each token after the first message's; tokens of a message share the time it took."""
        counts = np.asarray(self.num_tokens[1:], np.int64)
        return np.repeat(np.diff(self.seconds) / counts, counts)

    @property
    def longest_gap_seconds(self) -> float | None:
        """The longest time between two messages with tokens, or None if there are no two."""
        return float(np.diff(self.seconds).max()) if len(self.seconds) > 1 else None


@dataclass(slots=True)
class RequestRecord:
    """A request of a load and what came of it. Times are seconds from the start of the load.

    Args:
        number: its place in the load.
        request: what was asked, and when it was due.
        outcome: how it ended.
        sent_seconds: when it was sent.
        ended_seconds: when its last message or its error came.
        reason: why it was refused or failed, in the engine's machine-readable word or as a gRPC status.
        details: the same for people.
        finish_reasons: why each sample ended.
        usage_prompt_tokens: tokens of the prompt, as the engine counts them.
        samples: when tokens came, by sample.
    """

    number: int
    request: LoadRequest
    outcome: Outcome = Outcome.PENDING
    sent_seconds: float | None = None
    ended_seconds: float | None = None
    reason: str = ""
    details: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    usage_prompt_tokens: int | None = None
    samples: dict[int, SampleTimes] = field(default_factory=dict)

    def add_tokens(self, sample: int, num_tokens: int, now: float) -> None:
        """Takes note of tokens that have come.

        Args:
            sample: of which sample.
            num_tokens: how many; messages without any are no matter.
            now: seconds from the start of the load.
        """
        if num_tokens:
            times = self.samples.setdefault(sample, SampleTimes())
            times.seconds.append(now)
            times.num_tokens.append(num_tokens)

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that came, of all samples."""
        return sum(sum(times.num_tokens) for times in self.samples.values())

    @property
    def lag_seconds(self) -> float | None:
        """How late it was sent, or None if it was not."""
        return None if self.sent_seconds is None else self.sent_seconds - self.request.arrival_seconds

    @property
    def ttft_seconds(self) -> float | None:
        """Time from when it was due to its first token, or None if none came."""
        firsts = [times.seconds[0] for times in self.samples.values()]
        return min(firsts) - self.request.arrival_seconds if firsts else None

    @property
    def end_to_end_seconds(self) -> float | None:
        """Time from when it was due to its end, or None if it was not completed."""
        if self.outcome is not Outcome.COMPLETED or self.ended_seconds is None:
            return None
        return self.ended_seconds - self.request.arrival_seconds

    @property
    def inter_token_seconds(self) -> float | None:
        """Time a token after the first message's, on average, or None if there were no more."""
        gaps = self.read_gaps()
        return float(gaps.mean()) if gaps.size else None

    @property
    def longest_gap_seconds(self) -> float | None:
        """The longest time that a sample stood still between two tokens, or None if there were no two."""
        gaps = [gap for times in self.samples.values() if (gap := times.longest_gap_seconds) is not None]
        return max(gaps, default=None)

    def read_gaps(self) -> npt.NDArray[np.float64]:
        """Returns the times between tokens, of all samples."""
        return np.concatenate([np.empty(0), *(times.read_gaps() for times in self.samples.values())])

    def as_json(self) -> dict[str, Any]:
        """Returns a line of the requests file: the keys of a trace, then what was measured."""
        request = self.request
        prompt = {"prompt_tokens": request.prompt_tokens} if request.text is None else {"text": request.text}
        return {
            "arrival_seconds": round(request.arrival_seconds, _DIGITS),
            **prompt,
            "max_tokens": request.max_tokens,
            "n": request.n,
            "guidance_tokens": list(request.guidance_tokens),
            "seed": request.seed,
            "number": self.number,
            "outcome": self.outcome.value,
            "reason": self.reason or None,
            "details": self.details or None,
            "finish_reasons": self.finish_reasons,
            "sent_seconds": _round(self.sent_seconds),
            "ended_seconds": _round(self.ended_seconds),
            "ttft_seconds": _round(self.ttft_seconds),
            "inter_token_seconds": _round(self.inter_token_seconds),
            "longest_gap_seconds": _round(self.longest_gap_seconds),
            "end_to_end_seconds": _round(self.end_to_end_seconds),
            "usage_prompt_tokens": self.usage_prompt_tokens,
            "answer_tokens": self.num_answer_tokens,
        }


def build_records(requests: Sequence[LoadRequest]) -> list[RequestRecord]:
    """Returns an empty record for each request of a load."""
    return [RequestRecord(number, request) for number, request in enumerate(requests)]


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, _DIGITS)
