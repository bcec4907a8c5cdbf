"""What a load test came to: throughput, goodput, latencies, refusals, and whether the load was what was asked for."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ringplan_cli.load.options import LatencyTargets
from ringplan_cli.load.records import Outcome, RequestRecord

PERCENTILES = (50, 90, 95, 99)
LATE_SECONDS = 0.01
MAX_LATE_SHARE = 0.01
# The latencies that a report has, by their names in it, and what people call them.
LATENCY_NAMES = {
    "ttft": "first token",
    "inter_token": "inter-token",
    "longest_gap": "longest gap",
    "end_to_end": "end to end",
}


@dataclass(frozen=True, slots=True)
class Spread:
    """How values lie: how many there are, their mean, percentiles and the largest."""

    count: int
    mean: float
    percentiles: tuple[float, ...]
    largest: float

    def as_json(self) -> dict[str, Any]:
        """Returns the figures by name, in seconds."""
        named = {f"p{rank}": value for rank, value in zip(PERCENTILES, self.percentiles, strict=True)}
        return {"count": self.count, "mean": self.mean, **named, "max": self.largest}


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that kept the latency targets.

    Args:
        num_good: how many were completed within all targets.
        share: of all requests that were sent.
        requests_per_second: over the run.
        missed: completed requests that missed a target, by the target's name; one may miss several.
    """

    num_good: int
    share: float
    requests_per_second: float
    missed: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        """Returns the figures by name."""
        return {
            "requests": self.num_good,
            "share": self.share,
            "requests_per_second": self.requests_per_second,
            "missed": self.missed,
        }


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The figures of a load test.

    Args:
        seconds: from the start to the last end, or to where it was cut off.
        num_planned: requests in the schedule.
        counts: requests by outcome.
        refusals: refused requests by reason.
        failures: failed requests by reason.
        num_prompt_tokens: prompt tokens of completed requests.
        num_answer_tokens: tokens that came, of all requests.
        max_in_flight: requests under way at once, at most.
        latencies: by the names of `LATENCY_NAMES`; None where there is nothing to tell.
        lag: how late requests were sent.
        num_late: requests sent more than 10 ms late.
        goodput: None without targets.
        was_stopped: whether a signal cut it off.
    """

    seconds: float
    num_planned: int
    counts: dict[Outcome, int]
    refusals: dict[str, int]
    failures: dict[str, int]
    num_prompt_tokens: int
    num_answer_tokens: int
    max_in_flight: int
    latencies: dict[str, Spread | None]
    lag: Spread | None
    num_late: int
    goodput: Goodput | None
    was_stopped: bool

    @property
    def num_sent(self) -> int:
        """Requests that were sent."""
        return self.num_planned - self.counts[Outcome.PENDING]

    @property
    def kept_schedule(self) -> bool:
        """Whether the generator sent requests when they were due: at most one, or one in a hundred, 10 ms late."""
        return self.num_late <= max(1, MAX_LATE_SHARE * self.num_sent)

    def per_second(self, count: int) -> float:
        """Returns a count over the run's length."""
        return count / self.seconds if self.seconds > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        """Returns all figures by name, times in seconds."""
        return {
            "seconds": self.seconds,
            "was_stopped": self.was_stopped,
            "requests": {
                "planned": self.num_planned,
                "sent": self.num_sent,
                **{outcome.value: count for outcome, count in self.counts.items()},
            },
            "refusals": self.refusals,
            "failures": self.failures,
            "requests_per_second": self.per_second(self.counts[Outcome.COMPLETED]),
            "answer_tokens": self.num_answer_tokens,
            "answer_tokens_per_second": self.per_second(self.num_answer_tokens),
            "prompt_tokens": self.num_prompt_tokens,
            "prompt_tokens_per_second": self.per_second(self.num_prompt_tokens),
            "max_in_flight": self.max_in_flight,
            "latency_seconds": {name: spread and spread.as_json() for name, spread in self.latencies.items()},
            "goodput": self.goodput and self.goodput.as_json(),
            "schedule": {
                "kept": self.kept_schedule,
                "late": self.num_late,
                "lag_seconds": self.lag and self.lag.as_json(),
            },
        }


def build_report(
    records: Sequence[RequestRecord], targets: LatencyTargets, seconds: float, *, was_stopped: bool = False
) -> LoadReport:
    """Works out the figures.

    Args:
        records: of every request of the load.
        targets: what counts as goodput.
        seconds: length of the run.
        was_stopped: whether a signal cut it off.
    """
    outcomes = Counter(record.outcome for record in records)
    sent = [record for record in records if record.outcome is not Outcome.PENDING]
    completed = [record for record in records if record.outcome is Outcome.COMPLETED]
    lags = _known(record.lag_seconds for record in sent)
    return LoadReport(
        seconds=seconds,
        num_planned=len(records),
        counts={outcome: outcomes[outcome] for outcome in Outcome},
        refusals=_count_reasons(records, Outcome.REFUSED),
        failures=_count_reasons(records, Outcome.FAILED),
        num_prompt_tokens=sum(record.usage_prompt_tokens or 0 for record in completed),
        num_answer_tokens=sum(record.num_answer_tokens for record in records),
        max_in_flight=max((num for _, num in count_in_flight(records, seconds)), default=0),
        latencies={
            # The first tokens of a request that broke later came all the same.
            "ttft": measure_spread(_known(record.ttft_seconds for record in sent)),
            "inter_token": measure_spread(np.concatenate([np.empty(0), *(record.read_gaps() for record in sent)])),
            "longest_gap": measure_spread(_known(record.longest_gap_seconds for record in sent)),
            "end_to_end": measure_spread(_known(record.end_to_end_seconds for record in completed)),
        },
        lag=measure_spread(lags),
        num_late=int((lags > LATE_SECONDS).sum()),
        goodput=_measure_goodput(completed, len(sent), targets, seconds) if targets.is_set else None,
        was_stopped=was_stopped,
    )


def measure_spread(values: npt.NDArray[np.float64]) -> Spread | None:
    """Returns how values lie, percentiles interpolated between neighbours; None if there are none."""
    if not values.size:
        return None
    percentiles = tuple(float(value) for value in np.percentile(values, PERCENTILES))
    return Spread(values.size, float(values.mean()), percentiles, float(values.max()))


def count_in_flight(records: Sequence[RequestRecord], seconds: float) -> list[tuple[float, int]]:
    """Returns how many requests are under way from each time on at which that changes.

    Args:
        records: of the requests.
        seconds: when those that had not ended were cut off.
    """
    changes: Counter[float] = Counter()
    for record in records:
        if record.sent_seconds is not None:
            changes[record.sent_seconds] += 1
            changes[seconds if record.ended_seconds is None else record.ended_seconds] -= 1
    times = sorted(changes)
    return list(zip(times, np.cumsum([changes[time] for time in times]).tolist(), strict=True))


def find_missed_targets(record: RequestRecord, targets: LatencyTargets) -> list[str]:
    """Returns the names of the targets that a completed request missed; what it has no figure for it kept."""
    pairs = {
        "ttft": (record.ttft_seconds, targets.ttft_target_seconds),
        "inter_token": (record.inter_token_seconds, targets.inter_token_target_seconds),
        "end_to_end": (record.end_to_end_seconds, targets.end_to_end_target_seconds),
    }
    return [name for name, (have, most) in pairs.items() if have is not None and most is not None and have > most]


def _measure_goodput(
    completed: Sequence[RequestRecord], num_sent: int, targets: LatencyTargets, seconds: float
) -> Goodput:
    missed = [find_missed_targets(record, targets) for record in completed]
    num_good = sum(not names for names in missed)
    return Goodput(
        num_good=num_good,
        share=num_good / num_sent if num_sent else 0.0,
        requests_per_second=num_good / seconds if seconds > 0 else 0.0,
        missed=dict(Counter(name for names in missed for name in names)),
    )


def _count_reasons(records: Iterable[RequestRecord], outcome: Outcome) -> dict[str, int]:
    return dict(Counter(record.reason for record in records if record.outcome is outcome).most_common())


def _known(values: Iterable[float | None]) -> npt.NDArray[np.float64]:
    return np.asarray([value for value in values if value is not None], np.float64)
