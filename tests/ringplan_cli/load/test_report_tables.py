"""People read a report's figures as text."""

import io

from rich.console import Console

from ringplan_cli.load.options import LatencyTargets
from ringplan_cli.load.records import Outcome
from ringplan_cli.load.report import build_report
from ringplan_cli.load.report_tables import print_report
from tests.ringplan_cli.load.test_report import build_record

LATE = (
    "schedule: NOT KEPT: 2 of 3 requests were sent more than 10 ms late (p99 50.0 ms, at most 50.0 ms late); "
    "the machine that sends them is too busy"
)


def write(records: list, targets: LatencyTargets, seconds: float) -> str:
    """Prints a report of these records."""
    output = io.StringIO()
    print_report(Console(file=output, width=300), "tiny: 3 requests", build_report(records, targets, seconds))
    return output.getvalue()


def test_report_names_every_figure() -> None:
    """Counts, throughput, goodput with what was missed, refusals, whether the schedule was kept, and latencies."""
    text = write(
        [
            build_record(0.0, first=0.25, end=1.25),
            build_record(0.0, first=0.25, end=1.25, late=0.05),
            build_record(1.0, end=1.0, outcome=Outcome.REFUSED, reason="QUEUE_FULL", late=0.05),
        ],
        LatencyTargets(inter_token_target_seconds=0.4),
        2.0,
    )
    assert text.splitlines() == [
        "tiny: 3 requests",
        "requests: 3 of 3 sent in 2.0 s: 2 completed, 1 refused",
        "throughput: 1.00 requests/s, 3.00 answer tokens/s, 10.00 prompt tokens/s",
        "goodput: 0.00 requests/s, 0.0% of those sent; missed inter-token: 2",
        "refused: QUEUE_FULL 1",
        "under way: 2 at most",
        LATE,
        "",
        "Latencies",
        "milliseconds  count     mean      p50      p90      p95      p99      max",
        "first token       2    250.0    250.0    250.0    250.0    250.0    250.0",
        "inter-token       4    500.0    500.0    500.0    500.0    500.0    500.0",
        "longest gap       2  1,000.0  1,000.0  1,000.0  1,000.0  1,000.0  1,000.0",
        "end to end        2  1,250.0  1,250.0  1,250.0  1,250.0  1,250.0  1,250.0",
    ]


def test_report_of_nothing_says_so() -> None:
    """A test that is cut off at once still prints."""
    text = write([build_record(0.0, outcome=Outcome.PENDING)], LatencyTargets(), 0.0)
    assert "requests: 0 of 1 sent in 0.0 s: 0 completed" in text
    assert "schedule: nothing was sent" in text
    assert "end to end        0     -" in text
