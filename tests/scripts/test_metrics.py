"""docs/metrics.md: what the code declares, and nothing else."""

import re

from engine_service.metrics import FINISH_REASONS
from scripts import metrics
from tests.reference.metrics_page import list_documented_metrics


def test_the_page_is_up_to_date() -> None:
    """Whoever adds a metric runs `make docs`."""
    assert metrics.PAGE.read_text() == metrics.build_page()


def test_every_label_is_explained() -> None:
    """A label has its values in the table, or stands among those whose values differ; each of these is used."""
    rows = [*metrics.list_planner_metrics(), *metrics.list_engine_metrics()]
    names = {name for row in rows for name in row.labels}
    assert names >= set(metrics.OPEN_LABELS)
    for row in rows:
        for name, values in row.labels.items():
            assert name in metrics.OPEN_LABELS or "" not in values, (row.name, name)


def test_names_types_and_labels_are_as_prometheus_has_them() -> None:
    """Counters end in _total and nothing else does; the unit is the one in the name; a histogram's bounds are shown."""
    rows = {row.name: row for row in [*metrics.list_planner_metrics(), *metrics.list_engine_metrics()]}
    for name, row in rows.items():
        assert re.fullmatch(r"ringplan_[a-z_]+", name)
        assert (row.kind == "counter") == name.endswith("_total")
        assert (row.unit == "seconds") == name.endswith("_seconds")
        assert bool(row.buckets) == (row.kind == "histogram")
        assert row.meaning.endswith(".")
    assert (rows["ringplan_ring_wait_seconds"].buckets[0], rows["ringplan_plan_duration_seconds"].buckets[0]) == (
        "0.00001",
        "0.000001",
    )
    assert rows["ringplan_requests_finished_total"].labels == {"reason": FINISH_REASONS}


def test_no_metric_is_named_twice() -> None:
    """A query without the job finds one metric, not two."""
    planner, engine = list_documented_metrics()
    assert not planner & engine
