"""What one answer took, as a short table: the person's view of both processes' metrics."""

import urllib.request
from dataclasses import dataclass, field
from urllib.error import URLError

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

SCRAPE_SECONDS = 5.0


@dataclass
class AnswerTimes:
    """When the tokens of one answer came, by a clock that only rises.

    Args:
        started: when the request was sent.
    """

    started: float
    first: float | None = None
    last: float | None = None
    num_first_tokens: int = 0
    num_tokens: int = 0

    def add_tokens(self, num_tokens: int, now: float) -> None:
        """Takes note of tokens that have come.

        Args:
            num_tokens: how many.
            now: when.
        """
        if num_tokens == 0:
            return
        if self.first is None:
            self.first, self.num_first_tokens = now, num_tokens
        self.last = now
        self.num_tokens += num_tokens

    @property
    def time_to_first_token_seconds(self) -> float | None:
        """Seconds from the request to its first token, or None if none came."""
        return None if self.first is None else self.first - self.started

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second after the first, or None if there were too few to tell."""
        if self.first is None or self.last is None or self.last <= self.first:
            return None
        return (self.num_tokens - self.num_first_tokens) / (self.last - self.first)


@dataclass
class Metrics:
    """Samples of one or more `/metrics` pages.

    Args:
        samples: (name, labels, value) each.
    """

    samples: list[tuple[str, dict[str, str], float]] = field(default_factory=list)

    def read(self, text: str) -> None:
        """Adds the samples of a page.

        Args:
            text: the page, in Prometheus' text format.
        """
        for family in text_string_to_metric_families(text):
            self.samples += [(sample.name, sample.labels, sample.value) for sample in family.samples]

    def sum(self, name: str, **labels: str) -> int | None:
        """Returns the sum over all series of a metric that have certain labels, or None if the pages lack the metric.

        Args:
            name: the metric's name, with its suffix.
            labels: what a series must have to count.
        """
        series = [(have, value) for sample_name, have, value in self.samples if sample_name == name]
        if not series:
            return None
        return int(sum(value for have, value in series if labels.items() <= have.items()))


def fetch_metrics(*urls: str) -> Metrics:
    """Reads `/metrics` pages; one that does not answer is left out.

    Args:
        urls: where they are.
    """
    metrics = Metrics()
    # Both are on this machine: no proxy has a part in it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for url in urls:
        try:
            with opener.open(url, timeout=SCRAPE_SECONDS) as page:
                metrics.read(page.read().decode())
        except (URLError, TimeoutError, ConnectionError):
            continue
    return metrics


def build_rows(
    times: AnswerTimes, prompt_tokens: int, completion_tokens: int, metrics: Metrics | None
) -> list[tuple[str, str]]:
    """Builds the table's rows.

    Args:
        times: when the tokens came.
        prompt_tokens: tokens of the prompt.
        completion_tokens: tokens of the answer.
        metrics: of the planner and the engine, or None if they are not at hand.

    Returns:
        A name and a value each.
    """
    first, speed = times.time_to_first_token_seconds, times.tokens_per_second
    rows = [
        ("tokens", f"{prompt_tokens} prompt + {completion_tokens} answer"),
        ("time to first token", "-" if first is None else f"{first:.2f} s"),
        ("tokens/s", "-" if speed is None else f"{speed:.1f}"),
    ]
    if metrics is None:
        return rows
    hits, misses, mismatches = (
        _write_count(metrics.sum(f"ringplan_plan_cache_{name}_total")) for name in ("hits", "misses", "mismatches")
    )
    return [
        *rows,
        ("plans made", _write_count(metrics.sum("ringplan_plan_duration_seconds_count"))),
        ("plan cache", f"{hits} hits / {misses} misses / {mismatches} mismatches"),
        ("ring stalls", _write_count(metrics.sum("ringplan_ring_waits_total", kind="stall"))),
    ]


def print_report(console: Console, rows: list[tuple[str, str]]) -> None:
    """Prints the table, plainly where nobody looks at it.

    Args:
        console: where to.
        rows: a name and a value each.
    """
    if not console.is_terminal:
        for name, value in rows:
            console.print(f"{name}: {value}", markup=False)
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)


def _write_count(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"
