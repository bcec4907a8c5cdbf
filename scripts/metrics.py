"""Writes docs/metrics.md from the metrics that both processes declare, or checks that it is up to date.

Usage: `python scripts/metrics.py` writes it; `python scripts/metrics.py --check` changes nothing and fails when the
page differs from what the code gives. What is said around the tables stands in scripts/metrics.in.md.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from engine_service.labels import COMBINED_LABEL, GUIDANCE_LABELS, MAIN_LABEL
from engine_service.metrics import EngineMetrics
from planner_service.captures import CaptureFolder
from planner_service.messages import CacheMode, SessionOptions, SessionSummary
from planner_service.metrics import MAX_PLAN_LABELS, OTHER_PLAN_LABEL, PlannerMetrics

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
TEMPLATE = Path(__file__).with_name("metrics.in.md")

_PLAN_LABELS = ", ".join(f"`{name}`" for name in (MAIN_LABEL, *GUIDANCE_LABELS, COMBINED_LABEL))
_CACHE_MODES = ", ".join(f"`{mode.name.lower()}`" for mode in CacheMode)
# Labels whose values are not the same everywhere, and what they say.
OPEN_LABELS = {
    "session": "The session, as `ringplan inspect` lists it: `session-1`, `session-2`, ... since the planner's start.",
    "plan_label": f"What one attention call covers. Of Ringplan's engine: {_PLAN_LABELS}. A session has at most "
    f"{MAX_PLAN_LABELS}; what comes after them counts as `{OTHER_PLAN_LABEL}`.",
    "engine": "What the engine calls itself (`--engine-name`).",
    "cache_mode": f"How the session uses its plan cache: {_CACHE_MODES}.",
    "version": "The version of Ringplan.",
    "model": "The model's name.",
    "dtype": "The type of its weights, such as `float32`.",
    "device": "Where it runs, such as `cpu` or `cuda:0`.",
}
UNIT_BY_SUFFIX = {
    "_seconds": "seconds",
    "_bytes": "bytes",
    "_ratio": "0 to 1",
    "_info": "1",
    "_connected": "0 or 1",
    "_pinned": "0 or 1",
    "_step": "step id",
}


@dataclass(frozen=True, slots=True)
class MetricRow:
    """A metric as the page shows it; `kind` is its type, `buckets` the bounds of a histogram's."""

    name: str
    kind: str
    labels: dict[str, tuple[str, ...]]
    meaning: str
    buckets: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """What it is counted or measured in."""
        base = self.name.removesuffix("_total")
        return next((unit for suffix, unit in UNIT_BY_SUFFIX.items() if base.endswith(suffix)), "count")

    def write(self) -> str:
        """Returns the metric's line of a Markdown table."""
        kind = f"{self.kind}, {self.buckets[0]} to {self.buckets[-1]}" if self.buckets else self.kind
        labels = [
            f"`{name}`" if name in OPEN_LABELS else f"`{name}` ({', '.join(values)})"
            for name, values in self.labels.items()
        ]
        return f"| {' | '.join((f'`{self.name}`', kind, ', '.join(labels), self.unit, self.meaning))} |"


def list_planner_metrics() -> list[MetricRow]:
    """Returns the planner's metrics, one session being open."""
    registry = CollectorRegistry()
    metrics = PlannerMetrics(registry, "", CaptureFolder(Path("unused"), 0))
    metrics.observe_session("")
    options = SessionOptions(page_size=1, num_pages=2, max_streams=1)
    metrics.watch_sessions(lambda: [SessionSummary("", options, 0.0, 0, 0, 0, 0, 0, 0, 0)])
    return list(_list_rows(registry))


def list_engine_metrics() -> list[MetricRow]:
    """Returns the engine's metrics."""
    registry = CollectorRegistry()
    EngineMetrics(registry).describe_engine(version="", model="", dtype="", device="")
    return list(_list_rows(registry))


def _list_rows(registry: CollectorRegistry) -> Iterator[MetricRow]:
    for family in registry.collect():
        # Those of the process itself depend on the machine.
        if family.name.startswith("ringplan_"):
            yield _build_row(family)


def _build_row(family: Metric) -> MetricRow:
    samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
    labels: dict[str, dict[str, None]] = {}
    for sample in samples:
        for name, value in sample.labels.items():
            labels.setdefault(name, {})[value] = None
    bounds = [bound for bound in labels.pop("le", {}) if bound != "+Inf"]
    return MetricRow(
        name=family.name + ("_total" if family.type == "counter" else ""),
        kind=family.type,
        labels={name: tuple(values) for name, values in labels.items()},
        meaning=family.documentation,
        buckets=tuple(f"{float(bound):.12f}".rstrip("0").rstrip(".") for bound in bounds),
    )


def build_table(rows: list[MetricRow]) -> str:
    """Returns a Markdown table of metrics."""
    heading = ["| metric | type | labels | unit | meaning |", "|---|---|---|---|---|"]
    return "\n".join([*heading, *(row.write() for row in rows)])


def build_labels_table() -> str:
    """Returns a Markdown table of the labels whose values are not the same everywhere."""
    lines = [f"| `{name}` | {meaning} |" for name, meaning in OPEN_LABELS.items()]
    return "\n".join(["| label | values |", "|---|---|", *lines])


def build_page() -> str:
    """Returns the whole page."""
    page = TEMPLATE.read_text()
    for place, text in (
        ("{{planner}}", build_table(list_planner_metrics())),
        ("{{engine}}", build_table(list_engine_metrics())),
        ("{{labels}}", build_labels_table()),
    ):
        page = page.replace(place, text)
    return page


def main() -> None:
    """Runs the command."""
    if sys.argv[1:] == ["--check"]:
        is_current = PAGE.exists() and PAGE.read_text() == build_page()
        sys.exit(0 if is_current else "docs/metrics.md is out of date: run `make docs`")
    if sys.argv[1:]:
        sys.exit(__doc__)
    PAGE.write_text(build_page())


if __name__ == "__main__":
    main()
