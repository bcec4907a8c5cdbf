"""The planner's metrics: which series there are, what moves them, and that they go with their session."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from planner_service.captures import CaptureFolder
from planner_service.core.plan import Mismatch
from planner_service.errors import LayoutError, OutOfPagesError, RingTimeoutError
from planner_service.messages import CacheMode, PlanSource, SessionOptions, SessionSummary, WaitKind
from planner_service.metrics import (
    MAX_PLAN_LABELS,
    MISS_REASONS,
    OTHER_PLAN_LABEL,
    REASON_BY_LAYOUT_ERROR,
    PlannerMetrics,
    SessionMetrics,
)

# DESIGN: the words of section 5.
DOCUMENTED_MISS_REASONS = {
    "cold",
    "rows",
    "labels",
    "padding",
    "stream_changed",
    "discarded",
    "not_decode",
    "not_committing",
    "fork",
}


@pytest.fixture
def registry() -> CollectorRegistry:
    """A registry of this test alone."""
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry, tmp_path: Path) -> PlannerMetrics:
    """The planner's metrics."""
    return PlannerMetrics(registry, "1.2.3", CaptureFolder(tmp_path / "captures", 2))


@pytest.fixture
def session(metrics: PlannerMetrics) -> SessionMetrics:
    """The observer of one session."""
    return metrics.observe_session("s")


def _find_series(registry: CollectorRegistry, text: str) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if text in line and line[0] != "#"]


def _label(**labels: str) -> dict[str, str]:
    return {"session": "s"} | labels


def test_a_session_starts_with_its_series_at_zero(registry: CollectorRegistry, session: SessionMetrics) -> None:
    """Waits and errors of every kind can be told from their absence."""
    for kind in ("stall", "backpressure"):
        assert registry.get_sample_value("ringplan_ring_waits_total", _label(kind=kind)) == 0
        assert registry.get_sample_value("ringplan_ring_wait_seconds_count", _label(kind=kind)) == 0
    for reason in ("out_of_pages", "invalid_layout", "unknown_stream", "ring_timeout", "region_unavailable"):
        assert registry.get_sample_value("ringplan_layout_errors_total", _label(reason=reason)) == 0
    assert registry.get_sample_value("ringplan_steps_discarded_total", _label()) == 0
    assert registry.get_sample_value("ringplan_regions_grown_total", _label()) == 0
    assert registry.get_sample_value("ringplan_drills_total", _label()) == 0


def test_the_miss_reasons_are_the_documented_ones() -> None:
    """Dashboards and alerts know these words."""
    assert set(MISS_REASONS) == DOCUMENTED_MISS_REASONS


def test_every_layout_error_has_a_word_of_its_own() -> None:
    """A new kind of layout error cannot be forgotten here."""
    assert set(REASON_BY_LAYOUT_ERROR) == set(LayoutError.__subclasses__())
    assert len(set(REASON_BY_LAYOUT_ERROR.values())) == len(REASON_BY_LAYOUT_ERROR)


@pytest.mark.parametrize("plan_label", ["main", "cfg_text"])
def test_a_plan_labels_first_plan_declares_its_series(
    registry: CollectorRegistry, session: SessionMetrics, plan_label: str
) -> None:
    """Hits, mismatches and every reason of a miss stand at 0 as soon as a plan label is known; `main` always is."""
    if plan_label != "main":
        session.plan_published(PlanSource.FULL, [plan_label], 1e-4)
    labels = _label(plan_label=plan_label)
    assert registry.get_sample_value("ringplan_plan_cache_hits_total", labels) == 0
    assert registry.get_sample_value("ringplan_plan_cache_mismatches_total", labels) == 0
    for reason in DOCUMENTED_MISS_REASONS:
        assert registry.get_sample_value("ringplan_plan_cache_misses_total", labels | {"reason": reason}) == 0


def test_hits_misses_and_mismatches_are_counted_by_plan_label(
    registry: CollectorRegistry, session: SessionMetrics
) -> None:
    """A cached or verified plan is a hit of each of its plan labels; a miss has its reason."""
    session.plan_published(PlanSource.CACHED, ["main", "cfg"], 1e-5)
    session.plan_published(PlanSource.VERIFIED, ["main"], 1e-5)
    session.cache_missed(["main", "cfg"], "padding")
    session.cache_mismatched(Mismatch("main", "kv_lens", index=2, row=2, cached=7, full=8))
    values = {
        name: {
            label: registry.get_sample_value(f"ringplan_plan_cache_{name}_total", _label(plan_label=label, **extra))
            for label in ("main", "cfg")
        }
        for name, extra in (("hits", {}), ("misses", {"reason": "padding"}), ("mismatches", {}))
    }
    assert values == {
        "hits": {"main": 2, "cfg": 1},
        "misses": {"main": 1, "cfg": 1},
        "mismatches": {"main": 1, "cfg": 0},
    }


def test_a_mismatch_is_logged_with_its_array_and_row(session: SessionMetrics, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever is called because of one finds where the plans differ."""
    session.cache_mismatched(Mismatch("main", "slot_mapping", index=5, row=3, cached=70, full=80))
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    for fact in ("s:", "'main'", "'slot_mapping'", "row=3", "cached=70", "full=80"):
        assert fact in record.getMessage()


def test_a_drill_is_counted_and_told_apart_in_the_log(
    registry: CollectorRegistry, session: SessionMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever reads of the mismatch later finds that it was made on purpose."""
    session.mismatch_drilled()
    assert registry.get_sample_value("ringplan_drills_total", _label()) == 1
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "s: that mismatch was a drill")
    ]


def test_plan_durations_are_kept_by_source(registry: CollectorRegistry, session: SessionMetrics) -> None:
    """Seconds go into the histogram of how the plan came to be, which starts at a microsecond."""
    session.plan_published(PlanSource.FULL, ["main"], 0.5e-6)
    session.plan_published(PlanSource.FULL, ["main"], 0.25)
    name = "ringplan_plan_duration_seconds"
    assert registry.get_sample_value(f"{name}_bucket", {"source": "full", "le": "1e-06"}) == 1
    assert registry.get_sample_value(f"{name}_sum", {"source": "full"}) == pytest.approx(0.2500005)
    assert registry.get_sample_value(f"{name}_count", {"source": "cached"}) == 0
    assert registry.get_sample_value(f"{name}_count", {"source": "verified"}) == 0


def test_waits_errors_discards_and_growth_are_counted(registry: CollectorRegistry, session: SessionMetrics) -> None:
    """Each event moves its own series, by as much as it says."""
    session.ring_waited(WaitKind.STALL, 0.5e-5)
    session.ring_waited(WaitKind.BACKPRESSURE, 2.0)
    session.ring_waited(WaitKind.BACKPRESSURE, 3.0)
    session.layout_failed(OutOfPagesError(1, 2))
    session.layout_failed(RingTimeoutError(1, 2.0))
    session.steps_discarded(7)
    session.region_grown()
    read = registry.get_sample_value
    assert read("ringplan_ring_waits_total", _label(kind="stall")) == 1
    assert read("ringplan_ring_waits_total", _label(kind="backpressure")) == 2
    assert read("ringplan_ring_wait_seconds_bucket", _label(kind="stall", le="1e-05")) == 1
    assert read("ringplan_ring_wait_seconds_sum", _label(kind="backpressure")) == 5.0
    assert read("ringplan_layout_errors_total", _label(reason="out_of_pages")) == 1
    assert read("ringplan_layout_errors_total", _label(reason="ring_timeout")) == 1
    assert read("ringplan_layout_errors_total", _label(reason="invalid_layout")) == 0
    assert read("ringplan_steps_discarded_total", _label()) == 7
    assert read("ringplan_regions_grown_total", _label()) == 1


def test_a_removed_session_leaves_no_series(
    registry: CollectorRegistry, metrics: PlannerMetrics, session: SessionMetrics
) -> None:
    """The series of one session go when it closes; another's stay. Removing twice does nothing."""
    other = metrics.observe_session("t")
    for observer in (session, other):
        observer.plan_published(PlanSource.CACHED, ["main", "cfg"], 1e-5)
        observer.cache_missed(["late"], "cold")
        observer.ring_waited(WaitKind.STALL, 1.0)
        observer.mismatch_drilled()
    num_series = len(_find_series(registry, 'session="t"'))
    session.remove()
    session.remove()
    assert _find_series(registry, 'session="s"') == []
    assert len(_find_series(registry, 'session="t"')) == num_series
    assert registry.get_sample_value("ringplan_sessions_opened_total") == 2


def test_plan_label_names_are_bounded(registry: CollectorRegistry, session: SessionMetrics) -> None:
    """An engine that invents names without end fills one series called "other", not the planner's memory."""
    names = ["main", *(f"label{i}" for i in range(1, MAX_PLAN_LABELS + 10))]
    for name in names:
        session.plan_published(PlanSource.CACHED, [name], 1e-5)
    session.cache_mismatched(Mismatch("yet another", "kv_lens", index=2, row=2, cached=7, full=8))
    assert len(_find_series(registry, "ringplan_plan_cache_hits_total")) == MAX_PLAN_LABELS + 1
    other = _label(plan_label=OTHER_PLAN_LABEL)
    assert registry.get_sample_value("ringplan_plan_cache_hits_total", other) == 10
    assert registry.get_sample_value("ringplan_plan_cache_mismatches_total", other) == 1
    session.remove()
    assert _find_series(registry, 'session="s"') == []


def test_gauges_are_taken_from_the_sessions_when_asked_for(
    registry: CollectorRegistry, metrics: PlannerMetrics
) -> None:
    """Each figure of a summary has its gauge; a session that is gone has none."""
    options = SessionOptions(16, 100, 8, ring_depth=4, cache_mode=CacheMode.ON, engine_name='a "name"')
    leased = {"oldest_lease_step_id": 77, "oldest_lease_age_seconds": 1.5}
    summaries = [SessionSummary("s", options, 1.0, 90, 2, 5, 6, 3, 4096, 1024, **leased)]
    metrics.watch_sessions(lambda: summaries)
    expected = {
        "ringplan_pages": 100,
        "ringplan_pages_free": 90,
        "ringplan_pages_used": 9,  # 100, less the sink page, less the 90 free ones
        "ringplan_pages_shared": 2,
        "ringplan_streams": 5,
        "ringplan_steps_in_flight": 6,
        "ringplan_ring_depth": 4,
        "ringplan_ring_sets_leased": 3,
        "ringplan_ring_oldest_lease_age_seconds": 1.5,
        "ringplan_ring_oldest_lease_step": 77,
        "ringplan_region_bytes": 4096,
        "ringplan_region_locked_bytes": 1024,
    }
    assert {name: registry.get_sample_value(name, {"session": "s"}) for name in expected} == expected
    assert registry.get_sample_value("ringplan_sessions") == 1
    info = {"session": "s", "engine": 'a "name"', "cache_mode": "on"}
    assert registry.get_sample_value("ringplan_session_info", info) == 1
    summaries.clear()
    assert registry.get_sample_value("ringplan_sessions") == 0
    assert _find_series(registry, 'session="s"') == []


def test_a_ring_without_a_lease_has_no_oldest_one(registry: CollectorRegistry, metrics: PlannerMetrics) -> None:
    """The age is 0 and the step is none that can be: an alert on the age does not fire."""
    summary = SessionSummary("s", SessionOptions(16, 100, 8), 1.0, 90, 2, 5, 6, 0, 4096, 1024)
    metrics.watch_sessions(lambda: [summary])
    assert registry.get_sample_value("ringplan_ring_oldest_lease_age_seconds", {"session": "s"}) == 0
    assert registry.get_sample_value("ringplan_ring_oldest_lease_step", {"session": "s"}) == -1


def test_every_metric_follows_the_conventions(registry: CollectorRegistry, session: SessionMetrics) -> None:
    """Names start with the project's, have no colons, and say what they mean; the version is told."""
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert len(families) > 10
    for family in families:
        assert family.name.startswith(("ringplan_", "process_"))
        assert ":" not in family.name
        assert family.documentation.endswith(".")
    assert registry.get_sample_value("ringplan_planner_info", {"version": "1.2.3"}) == 1
