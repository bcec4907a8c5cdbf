"""A report's figures, against ones worked out by hand and by the standard library."""

import statistics

import numpy as np
import pytest

from ringplan_cli.load.options import LatencyTargets
from ringplan_cli.load.records import Outcome, RequestRecord
from ringplan_cli.load.report import PERCENTILES, build_report, count_in_flight, measure_spread
from ringplan_cli.load.schedule import LoadRequest


def build_record(
    due: float,
    *,
    first: float | None = None,
    end: float | None = None,
    num_tokens: int = 3,
    outcome: Outcome = Outcome.COMPLETED,
    reason: str = "",
    late: float = 0.0,
) -> RequestRecord:
    """Builds a record: the first token comes at `first`, the last at `end`."""
    request = LoadRequest(due, 1, num_tokens, prompt_tokens=10)
    is_sent = outcome is not Outcome.PENDING
    record = RequestRecord(0, request, outcome, sent_seconds=due + late if is_sent else None, reason=reason)
    if first is not None and end is not None:
        record.add_tokens(0, 1, first)
        record.add_tokens(0, num_tokens - 1, end)
        record.usage_prompt_tokens = 10
    record.ended_seconds = end
    return record


def test_percentiles_are_those_of_the_standard_library() -> None:
    """Interpolated between neighbours, as `statistics.quantiles` with method "inclusive" does."""
    values = np.random.default_rng(3).exponential(size=257)
    spread = measure_spread(values)
    assert spread is not None
    cuts = statistics.quantiles(values.tolist(), n=100, method="inclusive")
    assert spread.percentiles == pytest.approx([cuts[rank - 1] for rank in PERCENTILES])
    assert (spread.count, spread.mean, spread.largest) == (257, pytest.approx(values.mean()), values.max())


def test_nothing_measured_has_no_spread() -> None:
    """No zeros where there is nothing to tell."""
    assert measure_spread(np.empty(0)) is None
    report = build_report([build_record(0.0, outcome=Outcome.PENDING)], LatencyTargets(), 0.0)
    assert set(report.latencies.values()) == {None}
    assert (report.lag, report.num_sent, report.per_second(3)) == (None, 0, 0.0)


def test_throughput_counts_what_came_over_the_length_of_the_run() -> None:
    """Requests that were completed; tokens of all, also of those that broke."""
    records = [
        build_record(0.0, first=1.0, end=2.0),
        build_record(1.0, first=2.0, end=4.0),
        build_record(1.0, first=2.0, end=4.0, outcome=Outcome.FAILED, reason="STEP_FAILED"),
    ]
    values = build_report(records, LatencyTargets(), 4.0).as_json()
    assert values["requests_per_second"] == 0.5
    assert (values["answer_tokens"], values["answer_tokens_per_second"]) == (9, 2.25)
    assert (values["prompt_tokens"], values["prompt_tokens_per_second"]) == (20, 5.0)


def test_refusals_and_failures_are_counted_by_reason() -> None:
    """The most frequent first; what was cut off and what was never sent are counts of their own."""
    records = [
        build_record(0.0, end=0.1, outcome=Outcome.REFUSED, reason="REQUEST_TOO_LARGE"),
        *(build_record(0.0, end=0.1, outcome=Outcome.REFUSED, reason="QUEUE_FULL") for _ in range(2)),
        build_record(0.0, end=0.1, outcome=Outcome.FAILED, reason="UNAVAILABLE"),
        build_record(0.0, outcome=Outcome.RUNNING),
        build_record(9.0, outcome=Outcome.PENDING),
    ]
    report = build_report(records, LatencyTargets(), 1.0, was_stopped=True)
    assert list(report.refusals.items()) == [("QUEUE_FULL", 2), ("REQUEST_TOO_LARGE", 1)]
    assert report.failures == {"UNAVAILABLE": 1}
    assert report.as_json()["requests"] == {
        "planned": 6,
        "sent": 5,
        "not_sent": 1,
        "cut_off": 1,
        "completed": 0,
        "refused": 3,
        "failed": 1,
    }


def test_goodput_is_what_keeps_every_target() -> None:
    """Refused requests count against it; one that misses two targets is counted at both."""
    records = [
        build_record(0.0, first=0.5, end=1.5),  # 0.5 s, 0.5 s a token, 1.5 s
        build_record(0.0, first=0.5, end=2.5),  # 1 s a token
        build_record(0.0, first=1.5, end=3.5),  # late and slow
        build_record(0.0, end=0.1, outcome=Outcome.REFUSED, reason="QUEUE_FULL"),
    ]
    targets = LatencyTargets(ttft_target_seconds=1.0, inter_token_target_seconds=0.5)
    goodput = build_report(records, targets, 4.0).goodput
    assert goodput is not None
    assert (goodput.num_good, goodput.share, goodput.requests_per_second) == (1, 0.25, 0.25)
    assert goodput.missed == {"inter_token": 2, "ttft": 1}
    ends = LatencyTargets(end_to_end_target_seconds=2.5)
    assert build_report(records, ends, 4.0).as_json()["goodput"]["requests"] == 2
    assert build_report(records, LatencyTargets(), 4.0).goodput is None


def test_answer_of_one_token_keeps_a_target_for_the_others() -> None:
    """There is no time between tokens to hold against it."""
    record = build_record(0.0)
    record.add_tokens(0, 1, 0.5)
    goodput = build_report([record], LatencyTargets(inter_token_target_seconds=0.001), 1.0).goodput
    assert goodput is not None
    assert goodput.num_good == 1


def test_requests_under_way_are_counted_over_time() -> None:
    """From sent to ended; what was cut off lasts to the end of the run."""
    records = [build_record(0.0, first=1.0, end=3.0), build_record(1.0, outcome=Outcome.RUNNING)]
    assert count_in_flight(records, 5.0) == [(0.0, 1), (1.0, 2), (3.0, 1), (5.0, 0)]
    assert build_report(records, LatencyTargets(), 5.0).max_in_flight == 2


@pytest.mark.parametrize(("num_late", "is_kept"), [(0, True), (2, True), (3, False)])
def test_schedule_is_kept_if_at_most_one_in_a_hundred_is_late(num_late: int, is_kept: bool) -> None:
    """More than 10 ms is late; of 200 requests two may be."""
    late = [0.011] * num_late + [0.009] * (200 - num_late)
    report = build_report([build_record(0.0, first=1.0, end=2.0, late=lag) for lag in late], LatencyTargets(), 2.0)
    assert report.num_late == num_late
    assert report.kept_schedule is is_kept
