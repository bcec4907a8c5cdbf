"""The figures of a load test as texts for people."""

from collections.abc import Mapping

from rich.console import Console

from ringplan_cli.load.records import Outcome
from ringplan_cli.load.report import LATE_SECONDS, LATENCY_NAMES, PERCENTILES, LoadReport, Spread
from ringplan_cli.tables import Column, print_figures, print_table

LATENCY_COLUMNS = (
    Column("milliseconds", is_figure=False),
    Column("count"),
    Column("mean"),
    *(Column(f"p{rank}") for rank in PERCENTILES),
    Column("max"),
)
_COUNTED = (Outcome.COMPLETED, Outcome.REFUSED, Outcome.FAILED, Outcome.RUNNING)


def print_report(console: Console, title: str, report: LoadReport) -> None:
    """Prints a report.

    Args:
        console: where to.
        title: what was measured.
        report: the figures.
    """
    print_figures(console, title, build_figures(report))
    console.print()
    print_table(console, "Latencies", LATENCY_COLUMNS, build_latency_rows(report))


def build_figures(report: LoadReport) -> list[tuple[str, str]]:
    """Returns a name and a value for each figure that is not a latency."""
    counts = ", ".join(
        f"{report.counts[outcome]:,} {outcome.value.replace('_', ' ')}"
        for outcome in _COUNTED
        if report.counts[outcome] or outcome is Outcome.COMPLETED
    )
    completed = _write(report.per_second(report.counts[Outcome.COMPLETED]))
    answers, prompts = (
        _write(report.per_second(count)) for count in (report.num_answer_tokens, report.num_prompt_tokens)
    )
    figures = [
        ("requests", f"{report.num_sent:,} of {report.num_planned:,} sent in {report.seconds:,.1f} s: {counts}"),
        (
            "throughput",
            f"{completed} requests/s, {answers} answer tokens/s, {prompts} prompt tokens/s",
        ),
    ]
    if report.goodput is not None:
        good = report.goodput
        missed = "".join(f"; missed {LATENCY_NAMES[name]}: {count:,}" for name, count in good.missed.items())
        figures.append(
            (
                "goodput",
                f"{_write(good.requests_per_second)} requests/s, {good.share:.1%} of those sent{missed}",
            )
        )
    if report.refusals:
        figures.append(("refused", _write_reasons(report.refusals)))
    if report.failures:
        figures.append(("failed", _write_reasons(report.failures)))
    figures.append(("under way", f"{report.max_in_flight:,} at most"))
    figures.append(("schedule", write_schedule(report)))
    return figures


def write_schedule(report: LoadReport) -> str:
    """Returns whether the generator sent requests when they were due."""
    if report.lag is None:
        return "nothing was sent"
    lag = f"p99 {report.lag.percentiles[-1] * 1e3:.1f} ms, at most {report.lag.largest * 1e3:.1f} ms late"
    if report.kept_schedule:
        return f"kept ({lag})"
    return (
        f"NOT KEPT: {report.num_late:,} of {report.num_sent:,} requests were sent more than {LATE_SECONDS * 1e3:.0f} "
        f"ms late ({lag}); the machine that sends them is too busy"
    )


def build_latency_rows(report: LoadReport) -> list[list[str]]:
    """Returns a row of `LATENCY_COLUMNS` for each latency, in milliseconds."""
    return [[name, *_write_spread(spread)] for key, name in LATENCY_NAMES.items() for spread in [report.latencies[key]]]


def _write_spread(spread: Spread | None) -> list[str]:
    if spread is None:
        return ["0", *["-"] * (len(LATENCY_COLUMNS) - 2)]
    values = (spread.mean, *spread.percentiles, spread.largest)
    return [f"{spread.count:,}", *(f"{value * 1e3:,.1f}" for value in values)]


def _write_reasons(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in reasons.items())


def _write(value: float) -> str:
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"
