"""Every metric of the planner, on a registry that is passed in."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from planner_service.captures import CaptureFolder
from planner_service.core.plan import CaptureDocument, Mismatch
from planner_service.errors import (
    InvalidLayoutError,
    LayoutError,
    OutOfPagesError,
    RegionUnavailableError,
    RingTimeoutError,
    UnknownStreamError,
)
from planner_service.messages import PlanSource, SessionSummary, WaitKind

_logger = logging.getLogger(__name__)
MetricT = TypeVar("MetricT", bound=MetricWrapperBase)

MISS_REASONS = (
    "cold",
    "rows",
    "labels",
    "padding",
    "stream_changed",
    "discarded",
    "not_decode",
    "not_committing",
    "fork",
)
REASON_BY_LAYOUT_ERROR: dict[type[LayoutError], str] = {
    OutOfPagesError: "out_of_pages",
    InvalidLayoutError: "invalid_layout",
    UnknownStreamError: "unknown_stream",
    RingTimeoutError: "ring_timeout",
    RegionUnavailableError: "region_unavailable",
}
# An engine chooses its plan labels' names: beyond so many in a session the rest are counted as one.
MAX_PLAN_LABELS = 32
OTHER_PLAN_LABEL = "other"
# Every engine's first plan label: its series are there before a session's first plan.
MAIN_PLAN_LABEL = "main"

_PLAN_BUCKETS_SECONDS = (
    *(1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4),
    *(1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 1e-1, 1.0),
)
_WAIT_BUCKETS_SECONDS = (
    *(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2),
    *(0.1, 0.5, 1.0, 5.0, 30.0),
)

_INFO_MEANING = "1; what the engine calls itself, and how the session uses its plan cache."
# Gauges of a session, taken when they are asked for: (name, meaning, figure).
_SESSION_GAUGES: tuple[tuple[str, str, Callable[[SessionSummary], float]], ...] = (
    ("ringplan_pages", "Pages in the pool, the sink page included.", lambda s: s.options.num_pages),
    ("ringplan_pages_free", "Pages nobody holds.", lambda s: s.num_free_pages),
    (
        "ringplan_pages_used",
        "Pages that streams or steps in flight hold.",
        lambda s: s.options.num_pages - 1 - s.num_free_pages,
    ),
    ("ringplan_pages_shared", "Pages that more than one stream holds.", lambda s: s.num_shared_pages),
    ("ringplan_streams", "Streams that exist.", lambda s: s.num_streams),
    ("ringplan_steps_in_flight", "Steps planned and neither committed nor discarded.", lambda s: s.num_steps_in_flight),
    ("ringplan_ring_depth", "Buffer sets in the ring.", lambda s: s.options.ring_depth),
    ("ringplan_ring_sets_leased", "Buffer sets the engine holds.", lambda s: s.num_leased_sets),
    (
        "ringplan_ring_oldest_lease_age_seconds",
        "How long the engine has held the buffer set that it has held longest; 0 without one.",
        lambda s: s.oldest_lease_age_seconds,
    ),
    (
        "ringplan_ring_oldest_lease_step",
        "The step that set was leased for, by its id; -1 without one.",
        lambda s: -1 if s.oldest_lease_step_id is None else s.oldest_lease_step_id,
    ),
    ("ringplan_region_bytes", "Bytes of shared memory.", lambda s: s.region_bytes),
    ("ringplan_region_locked_bytes", "Bytes of shared memory that are locked in memory.", lambda s: s.locked_bytes),
)


class PlannerMetrics:
    """The metrics of a planner.

    Args:
        registry: where they are declared.
        version: the planner's version.
        captures: where mismatches are written.
    """

    def __init__(self, registry: CollectorRegistry, version: str, captures: CaptureFolder) -> None:
        self._registry = registry
        self.capture_folder = captures

        def count(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(name, meaning, labels, registry=registry)

        of_label = ("session", "plan_label")
        self.cache_hits = count("ringplan_plan_cache_hits", "Plans made from a cached one.", *of_label)
        self.cache_misses = count("ringplan_plan_cache_misses", "Plans made from scratch, by why.", *of_label, "reason")
        self.cache_mismatches = count("ringplan_plan_cache_mismatches", "Cached plans that were wrong.", *of_label)
        self.ring_waits = count("ringplan_ring_waits", "Steps that waited for a buffer set.", "session", "kind")
        self.layout_errors = count("ringplan_layout_errors", "Steps that have no plan, by why.", "session", "reason")
        self.steps_discarded = count("ringplan_steps_discarded", "Planned steps that were cut back.", "session")
        self.regions_grown = count("ringplan_regions_grown", "Regions made for larger plans.", "session")
        self.drills = count("ringplan_drills", "Mismatches that were made on purpose.", "session")
        self.captures = count("ringplan_captures_written", "Mismatches written to the capture folder.")
        self.sessions_opened = count("ringplan_sessions_opened", "Sessions opened since the start.")
        self.protocol_errors = count("ringplan_protocol_errors", "Sessions ended for breaking the protocol.")
        self.ring_wait_seconds = Histogram(
            "ringplan_ring_wait_seconds",
            "How long steps waited for a buffer set.",
            ("session", "kind"),
            registry=registry,
            buckets=_WAIT_BUCKETS_SECONDS,
        )
        duration = Histogram(
            "ringplan_plan_duration_seconds",
            "How long making a plan took.",
            ("source",),
            registry=registry,
            buckets=_PLAN_BUCKETS_SECONDS,
        )
        self.plan_duration_by_source = {source: duration.labels(source.name.lower()) for source in PlanSource}
        info = Gauge("ringplan_planner_info", "1; the planner's version.", ("version",), registry=registry)
        info.labels(version).set(1)
        ProcessCollector(registry=registry)

    def watch_sessions(self, summarize_sessions: Callable[[], Sequence[SessionSummary]]) -> None:
        """Adds the gauges of the open sessions.

        Args:
            summarize_sessions: returns the sessions in figures; called by whichever thread collects.
        """
        self._registry.register(_SessionCollector(summarize_sessions))

    def observe_session(self, session: str) -> "SessionMetrics":
        """Counts a session as opened, and declares its series.

        Args:
            session: its name.

        Returns:
            The observer to give to the session.
        """
        self.sessions_opened.inc()
        return SessionMetrics(self, session)


class SessionMetrics:
    """Counts what happens in one session.

    Args:
        metrics: the planner's metrics.
        session: the session's name.
    """

    def __init__(self, metrics: PlannerMetrics, session: str) -> None:
        self._metrics = metrics
        self._session = session
        self._series: list[tuple[MetricWrapperBase, tuple[str, ...]]] = []
        self._plan_labels: dict[str, _PlanLabelSeries] = {}
        self._waits = {
            kind: (
                self._declare(metrics.ring_waits, kind.name.lower()),
                self._declare(metrics.ring_wait_seconds, kind.name.lower()),
            )
            for kind in WaitKind
        }
        self._errors = {
            error: self._declare(metrics.layout_errors, reason) for error, reason in REASON_BY_LAYOUT_ERROR.items()
        }
        self._discarded = self._declare(metrics.steps_discarded)
        self._grown = self._declare(metrics.regions_grown)
        self._drills = self._declare(metrics.drills)
        self._add_plan_label(MAIN_PLAN_LABEL)

    def plan_published(self, source: PlanSource, plan_labels: Sequence[str], seconds: float) -> None:
        """Counts a plan.

        Args:
            source: how it came to be.
            plan_labels: its plan labels.
            seconds: how long making it took.
        """
        self._metrics.plan_duration_by_source[source].observe(seconds)
        for name in plan_labels:
            series = self._plan_labels.get(name) or self._add_plan_label(name)
            if source is not PlanSource.FULL:
                series.hits.inc()

    def cache_missed(self, plan_labels: Sequence[str], reason: str) -> None:
        """Counts a miss.

        Args:
            plan_labels: the plan labels of the layout.
            reason: one of `MISS_REASONS`.
        """
        for name in plan_labels:
            series = self._plan_labels.get(name) or self._add_plan_label(name)
            series.misses[reason].inc()

    def cache_mismatched(self, mismatch: Mismatch) -> None:
        """Counts a cached plan that differs from the one from scratch, and logs where."""
        series = self._plan_labels.get(mismatch.plan_label) or self._add_plan_label(mismatch.plan_label)
        series.mismatches.inc()
        _logger.error("%s: a cached plan was wrong and was not served: %s", self._session, mismatch)

    def mismatch_drilled(self) -> None:
        """Counts a mismatch that was made on purpose, and says so where it was logged."""
        self._drills.inc()
        _logger.warning("%s: that mismatch was a drill", self._session)

    def mismatch_captured(self, capture: CaptureDocument) -> None:
        """Writes a capture, and counts it if it was written."""
        if self._metrics.capture_folder.try_write(self._session, capture) is not None:
            self._metrics.captures.inc()

    def layout_failed(self, error: LayoutError) -> None:
        """Counts a step, or a run of steps, without a plan."""
        self._errors[type(error)].inc()

    def ring_waited(self, kind: WaitKind, seconds: float) -> None:
        """Counts a step that waited for a buffer set, and for how long."""
        waits, wait_seconds = self._waits[kind]
        waits.inc()
        wait_seconds.observe(seconds)

    def steps_discarded(self, num_steps: int) -> None:
        """Counts steps that were cut back."""
        self._discarded.inc(num_steps)

    def region_grown(self) -> None:
        """Counts a region that took the place of a smaller one."""
        self._grown.inc()

    def remove(self) -> None:
        """Ends the session's series. Idempotent."""
        while self._series:
            metric, values = self._series.pop()
            metric.remove(*values)
        self._plan_labels.clear()

    def _declare(self, metric: MetricT, *values: str) -> MetricT:
        self._series.append((metric, (self._session, *values)))
        return metric.labels(self._session, *values)

    def _add_plan_label(self, name: str) -> "_PlanLabelSeries":
        known = self._plan_labels
        if len(known) < MAX_PLAN_LABELS or name == OTHER_PLAN_LABEL:
            known[name] = series = _PlanLabelSeries(self._metrics, self._declare, name)
            return series
        return known.get(OTHER_PLAN_LABEL) or self._add_plan_label(OTHER_PLAN_LABEL)


class _PlanLabelSeries:
    """The series of one plan label, all at 0 to begin with."""

    def __init__(self, metrics: PlannerMetrics, declare: Callable[..., Counter], name: str) -> None:
        self.hits = declare(metrics.cache_hits, name)
        self.mismatches = declare(metrics.cache_mismatches, name)
        self.misses = {reason: declare(metrics.cache_misses, name, reason) for reason in MISS_REASONS}


class _SessionCollector(Collector):
    """Takes the sessions' gauges when they are asked for, so that no step pays for them."""

    def __init__(self, summarize_sessions: Callable[[], Sequence[SessionSummary]]) -> None:
        self._summarize_sessions = summarize_sessions

    def describe(self) -> list[GaugeMetricFamily]:
        """Returns the gauges without values: declaring them needs no sessions."""
        return list(self._build(()))

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yields the gauges of the sessions open now."""
        yield from self._build(self._summarize_sessions())

    def _build(self, summaries: Sequence[SessionSummary]) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily("ringplan_sessions", "Open sessions.", value=len(summaries))
        info = GaugeMetricFamily("ringplan_session_info", _INFO_MEANING, labels=("session", "engine", "cache_mode"))
        for summary in summaries:
            info.add_metric((summary.name, summary.options.engine_name, summary.options.cache_mode.name.lower()), 1)
        yield info
        for name, meaning, read in _SESSION_GAUGES:
            family = GaugeMetricFamily(name, meaning, labels=("session",))
            for summary in summaries:
                family.add_metric((summary.name,), read(summary))
            yield family
