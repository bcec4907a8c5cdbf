"""Grafana's dashboards: their queries, and what a reader finds on them."""

import re
from functools import cache
from itertools import combinations
from typing import Any

import pytest
from grafana_foundation_sdk.models import units

from engine_service.config import EngineSettings
from planner_service.config import CacheMode, PlannerSettings
from ringplan_cli.app import COMMANDS
from scripts import dashboards as command
from scripts.dashboard_files import fill_in, list_panels, load_dashboards
from scripts.metrics import list_engine_metrics, list_planner_metrics
from tests.deploy.dashboard_queries import list_queries

DASHBOARDS = {dashboard["title"]: dashboard for dashboard in load_dashboards()}
PANELS = [
    pytest.param(panel, id=f"{title}: {panel['title']}")
    for title, dashboard in DASHBOARDS.items()
    for panel in list_panels(dashboard)
]
ROWS = (*list_planner_metrics(), *list_engine_metrics())
# What prometheus_client counts of a process on Linux, with no labels of its own.
PROCESS_METRICS = {"process_cpu_seconds_total": "counter", "process_resident_memory_bytes": "gauge"}
# What a scrape gives every series (docs/dashboards.md), and a histogram its buckets.
TARGET_LABELS = {"job", "namespace", "pod", "container", "le"}
VARIABLES = ["datasource", "namespace", "pod", "session"]

_SELECTOR = re.compile(r"([a-z_:][a-z0-9_:]*)\{([^}]*)\}")
_MATCHER = re.compile(r'\s*(\w+)\s*(?:=~|!~|!=|=)\s*"[^"]*"\s*,?')
_COUNTER_IN_A_RATE = re.compile(r"(?:rate|increase)\([a-z_:0-9]+\{[^}]*\}\[[^\]]+\]\)")


@cache
def declare_metrics() -> dict[str, tuple[str, set[str]]]:
    """Returns type and labels of every metric that planner and engine declare."""
    declared = {name: (kind, set[str]()) for name, kind in PROCESS_METRICS.items()}
    for row in ROWS:
        declared[row.name] = (row.kind, set(row.labels))
    return declared


def find_metric(name: str) -> tuple[str, set[str]] | None:
    """Returns type and labels of what a series' name belongs to, if it is declared."""
    declared = declare_metrics()
    if name in declared:
        return declared[name]
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    return declared.get(base) if declared.get(base, ("", set()))[0] == "histogram" else None


def list_texts(panel: dict[str, Any]) -> list[str]:
    """Returns the queries of a panel as they are written."""
    return [target["expr"] for target in panel["targets"]]


def test_the_files_are_what_the_code_gives() -> None:
    """Whoever changes a dashboard changes the code, and `make dashboards` the files."""
    assert {path.name: path.read_text() for path in command.FOLDER.glob("*.json")} == command.build_files()


def test_a_dashboard_is_there_for_each_kind_of_reader() -> None:
    """One is for whoever is paged for the plan cache, one for whoever answers for latency; their addresses stay."""
    assert {title: dashboard["uid"] for title, dashboard in DASHBOARDS.items()} == {
        "Plan-cache health": "ringplan-plan-cache",
        "Inference": "ringplan-inference",
    }


@pytest.mark.parametrize("panel", PANELS)
def test_every_series_that_a_query_names_is_declared_in_the_code(panel: dict[str, Any]) -> None:
    """A metric, or a label of one, that was renamed in the code is renamed here too."""
    for expr in list_texts(panel):
        selectors = _SELECTOR.findall(expr)
        assert selectors, f"no series in {expr}"
        for name, matchers in selectors:
            found = find_metric(name)
            assert found is not None, f"{name} is not declared"
            assert not _MATCHER.sub("", matchers), f"{matchers} is more than matchers"
            assert set(_MATCHER.findall(matchers)) <= found[1] | TARGET_LABELS, f"{name} has no such label: {matchers}"


@pytest.mark.parametrize("panel", PANELS)
def test_counters_and_histograms_are_shown_as_rates(panel: dict[str, Any]) -> None:
    """A counter's value says when a process started, not how it fares."""
    for expr in list_texts(panel):
        for name, _ in _SELECTOR.findall(_COUNTER_IN_A_RATE.sub("", expr)):
            found = find_metric(name)
            assert found is not None
            assert found[0] == "gauge", f"{name} is a {found[0]}, and stands outside of a rate in {expr}"


def test_rates_are_taken_of_nothing_but_counters() -> None:
    """The rate of a gauge means nothing."""
    for query in list_queries():
        for inner in re.findall(r"(?:rate|increase)\(([a-z_:0-9]+)\{", query.expr):
            found = find_metric(inner)
            assert found is not None
            assert found[0] in {"counter", "histogram"}, f"{query.panel}: {inner} is a {found[0]}"


@pytest.mark.parametrize("panel", PANELS)
def test_every_panel_says_what_to_do(panel: dict[str, Any]) -> None:
    """Whoever is woken at night reads what a panel shows and what to do when it looks wrong."""
    shows, mark, remedy = panel["description"].partition("**If it looks wrong:** ")
    assert mark
    assert len(shows.strip()) > 20
    assert len(remedy) > 20
    assert shows.strip().endswith((".", "!"))
    assert remedy.endswith(".")


@pytest.mark.parametrize("panel", PANELS)
def test_descriptions_name_what_exists(panel: dict[str, Any]) -> None:
    """Settings, commands, panels and reasons that a description names are there to be found."""
    text = panel["description"]
    settings = (PlannerSettings.model_fields, EngineSettings.model_fields)
    flags = {f"--{name.replace('_', '-')}" for fields in settings for name in fields}
    assert {flag.replace("--no-", "--") for flag in re.findall(r"--[a-z-]+", text)} <= flags
    assert set(re.findall(r"`ringplan ([a-z]+)", text)) <= set(COMMANDS)
    titles = {other["title"] for dashboard in DASHBOARDS.values() for other in list_panels(dashboard)}
    assert set(re.findall(r"(?<!\*)\*([A-Z][^*]+)\*(?!\*)", text)) <= titles
    values = {value for row in ROWS for values in row.labels.values() for value in values} | {"ulimit -l", "max_tokens"}
    words = {word for word in re.findall(r"`([^`]+)`", text) if not word.startswith(("-", "ringplan "))}
    assert words <= values | {mode.name.lower() for mode in CacheMode}


@pytest.mark.parametrize("panel", PANELS)
def test_every_panel_has_a_unit_that_grafana_knows(panel: dict[str, Any]) -> None:
    """A figure without a unit is misread."""
    known = {value for name, value in vars(units).items() if isinstance(value, str) and not name.startswith("_")}
    unit = panel["fieldConfig"]["defaults"]["unit"]
    assert unit in known or re.fullmatch(r"suffix: \S+", unit), unit


@pytest.mark.parametrize("panel", PANELS)
def test_legends_name_labels_that_the_series_still_have(panel: dict[str, Any]) -> None:
    """A legend is set, it uses what the query keeps apart, and it leaves none of that out."""
    for target in panel["targets"]:
        legend, expr = target["legendFormat"], target["expr"]
        assert legend
        kept = {label for labels in re.findall(r"by \(([^)]*)\)", expr) for label in labels.replace(" ", "").split(",")}
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) == kept - {"le"}


@pytest.mark.parametrize("title", DASHBOARDS)
def test_no_two_panels_share_an_id_or_a_place(title: str) -> None:
    """Grafana drops one of two panels with one id, and draws one over the other if they overlap."""
    panels = DASHBOARDS[title]["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    assert len({(panel["type"] == "row", panel["title"]) for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24, panel["title"]
        refs = [target["refId"] for target in panel.get("targets") or []]
        assert len(set(refs)) == len(refs)
    for one, other in combinations(panels, 2):
        assert not overlap(one["gridPos"], other["gridPos"]), f"{one['title']} and {other['title']}"


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    """Says whether two places on the grid have a cell in common."""
    return (
        one["x"] < other["x"] + other["w"]
        and other["x"] < one["x"] + one["w"]
        and one["y"] < other["y"] + other["h"]
        and other["y"] < one["y"] + one["h"]
    )


@pytest.mark.parametrize("title", DASHBOARDS)
def test_each_variable_is_there_and_used(title: str) -> None:
    """Data source, namespace, pod and session can be chosen, several or all at once, and the panels follow."""
    dashboard = DASHBOARDS[title]
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert list(variables) == VARIABLES
    for name in VARIABLES[1:]:
        assert variables[name]["multi"]
        assert variables[name]["includeAll"]
        assert variables[name]["current"]["value"] == "$__all"
    panels = list(list_panels(dashboard))
    texts = [expr for panel in panels for expr in list_texts(panel)]
    used = {found for text in texts for found in re.findall(r"\$(\w+)", text)}
    assert used - {"__rate_interval", "__range"} == set(VARIABLES[1:])
    for panel in panels:
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert {source["uid"] for source in sources} == {"${datasource}"}


@pytest.mark.parametrize("panel", PANELS)
def test_each_query_follows_namespace_and_pod(panel: dict[str, Any]) -> None:
    """No series of another namespace or pod than those chosen is shown, nor of another session where it has one."""
    for expr in list_texts(panel):
        for name, matchers in _SELECTOR.findall(expr):
            found = find_metric(name)
            assert found is not None
            assert 'namespace=~"$namespace"' in matchers
            assert 'pod=~"$pod"' in matchers
            assert ('session=~"$session"' in matchers) == ("session" in found[1]), name


def test_all_means_series_without_the_label_too() -> None:
    """A Prometheus that scrapes without namespace and pod labels shows its data all the same."""
    for dashboard in DASHBOARDS.values():
        assert {variable.get("allValue") for variable in dashboard["templating"]["list"][1:]} == {".*"}


@pytest.mark.parametrize(("value", "color"), [(0, "green"), (1, "red"), (7, "red")])
def test_one_mismatch_turns_its_figure_red(value: int, color: str) -> None:
    """What pages is seen at once: the first figure of the dashboard."""
    panel = next(list_panels(DASHBOARDS["Plan-cache health"]))
    assert panel["title"] == "Mismatches"
    assert panel["options"]["colorMode"] == "background"
    base, *steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert base == {"color": "green", "value": None}
    assert [step["color"] for step in [base, *steps] if (step["value"] or 0) <= value][-1] == color


def test_queries_are_listed_without_variables() -> None:
    """What is sent to a data source is PromQL, with the window that was asked for."""
    queries = list_queries(window="7s", span="11s")
    assert len(queries) > 80
    assert not [query for query in queries if "$" in query.expr]
    assert any("[7s]" in query.expr for query in queries)
    assert any("[11s]" in query.expr for query in queries)


def test_an_unknown_variable_is_an_error() -> None:
    """A query with a variable that nobody defines would be sent as it is, and fail at the reader's."""
    with pytest.raises(KeyError, match="nowhere"):
        fill_in('up{pod="$nowhere"}', {"pod": ".*"})
