"""The Prometheus rules: what they ask for exists, they fire when they should, each alert has its runbook section."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from ringplan_cli.app import app
from scripts import rules as command
from scripts.dashboard_files import load_dashboards
from scripts.install_prometheus import find_program
from scripts.metrics import list_engine_metrics, list_planner_metrics
from tests.deploy.rule_selectors import Selector, list_selectors
from tests.deploy.shipped_rules import (
    ALERTS,
    FOLDER,
    RECORDS,
    RULES,
    RUNBOOK,
    SELECTORS,
    list_runbook_blocks,
    list_runbook_queries,
)

CASES = sorted(FOLDER.glob("tests/*.yaml"))
# What a scrape gives every series (deploy/prometheus/prometheus.yml), and a histogram its buckets.
TARGET_LABELS = {"namespace", "pod", "container", "job", "le"}


@pytest.fixture(scope="module")
def promtool() -> Path:
    """The real `promtool`."""
    found = find_program("promtool")
    if found is None:
        pytest.skip("promtool is neither on the PATH nor could scripts/install_prometheus.py fetch it")
    return found


def run_promtool(promtool: Path, *arguments: str) -> None:
    """Runs it in the rules' folder; fails with what it says."""
    result = subprocess.run([promtool, *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def declare_series() -> dict[str, dict[str, tuple[str, ...]]]:
    """Returns the labels and their values of every series that planner and engine declare."""
    series = {}
    for row in (*list_planner_metrics(), *list_engine_metrics()):
        names = [f"{row.name}_{part}" for part in ("bucket", "sum", "count")] if row.buckets else [row.name]
        for name in names:
            series[name] = row.labels | ({"le": row.buckets} if name.endswith("_bucket") else {})
    return series


def list_cases(alert: str) -> Iterator[tuple[bool, bool]]:
    """Yields for each case of an alert whether it is to fire, and whether its texts are looked at."""
    for path in CASES:
        for test in yaml.safe_load(path.read_text())["tests"]:
            for case in test.get("alert_rule_test", ()):
                if case["alertname"] == alert:
                    yield bool(case.get("exp_alerts")), True
            for case in test.get("promql_expr_test", ()):
                named = re.search(r'alertname=(~?)"([^"]*)"', case["expr"])
                if named and re.fullmatch(named[2], alert):
                    yield any(f'"{alert}"' in sample["labels"] for sample in case["exp_samples"]), False


@pytest.mark.parametrize("kind", command.FILES)
def test_the_files_are_what_the_code_gives(kind: str) -> None:
    """Whoever changes a rule changes the code, and `make rules` both files."""
    assert command.FILES[kind].read_text() == command.write(command.BUILDERS[kind]())


def test_the_operator_gets_the_same_rules_as_prometheus() -> None:
    """The PrometheusRule holds the plain file's groups, word for word."""
    wrapped = yaml.safe_load(command.FILES["kubernetes"].read_text())
    assert (wrapped["apiVersion"], wrapped["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert wrapped["spec"] == yaml.safe_load(command.FILES["plain"].read_text())


def test_addresses_of_runbook_and_grafana_can_be_given() -> None:
    """The links of the annotations lead where one says."""
    groups = command.build_plain("https://wiki/ringplan", "https://grafana")["groups"]
    alert = groups[-1]["rules"][0]["annotations"]
    assert alert["runbook_url"] == "https://wiki/ringplan#ringplanplancachemismatch"
    assert alert["dashboard_url"].startswith("https://grafana/d/ringplan-plan-cache?var-namespace=")


def test_prometheus_accepts_rules_and_configuration(promtool: Path) -> None:
    """`promtool` finds nothing wrong with what is shipped."""
    run_promtool(promtool, "check", "rules", "rules.yaml")
    run_promtool(promtool, "check", "config", "prometheus.yml")


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_rules_record_and_fire_as_their_cases_say(promtool: Path, path: Path) -> None:
    """Each case holds in the real rule engine."""
    run_promtool(promtool, "test", "rules", f"tests/{path.name}")


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_has_cases_for_firing_and_for_not_firing(alert: str) -> None:
    """An alert is tried both ways, and what it says is looked at."""
    cases = set(list_cases(alert))
    assert (True, True) in cases, "no case looks at the texts of the alert"
    assert any(not fires for fires, _ in cases), "no case says when the alert does not fire"


@pytest.mark.parametrize(("rule", "selector"), SELECTORS, ids=str)
def test_what_a_rule_asks_for_exists(rule: str, selector: Selector) -> None:
    """Series are declared by the code, with these labels and values, or recorded by an earlier rule."""
    if selector.name == "up" or selector.name in RECORDS:
        return
    labels = declare_series()[selector.name]
    for matcher in selector.matchers:
        assert matcher.label in TARGET_LABELS | labels.keys()
        values = labels.get(matcher.label, ())
        if any(values) and matcher.operator == "=":
            assert matcher.value in values
        if any(values) and matcher.operator in ("=~", "!~"):
            assert set(matcher.value.split("|")) <= set(values)


def test_rules_see_what_was_recorded_before_them() -> None:
    """A recorded series is recorded in an earlier rule of the same group, or in an earlier group."""
    seen = set[str]()
    for rule in RULES:
        assert {item.name for item in list_selectors(rule["expr"])} & RECORDS <= seen, rule
        seen.add(rule.get("record", ""))


@pytest.mark.parametrize("alert", ALERTS.values(), ids=lambda alert: alert["alert"])
def test_every_alert_says_how_bad_it_is_and_where_to_look(alert: dict[str, Any]) -> None:
    """It has a severity, texts, its place in the runbook and a dashboard that exists, with variables it has."""
    assert alert["labels"]["severity"] in ("critical", "warning")
    annotations = alert["annotations"]
    assert annotations.keys() == {"summary", "description", "runbook_url", "dashboard_url"}
    assert all(annotations.values())
    assert annotations["runbook_url"] == f"docs/runbook.md#{alert['alert'].lower()}"
    dashboards = {dashboard["uid"]: dashboard for dashboard in load_dashboards()}
    uid, _, query = annotations["dashboard_url"].removeprefix("/d/").partition("?")
    variables = {variable["name"] for variable in dashboards[uid]["templating"]["list"]}
    assert set(re.findall(r"var-(\w+)=", query)) <= variables


def split_runbook() -> dict[str, str]:
    """Returns the sections of the runbook that are about an alert, by their heading."""
    parts = re.split(r"^## (.+)$", RUNBOOK, flags=re.MULTILINE)
    return {name: text for name, text in zip(parts[1::2], parts[2::2], strict=True) if name.startswith("Ringplan")}


def test_runbook_has_a_section_for_every_alert_and_no_other() -> None:
    """Section and line of the first table, in the order of the alerts, with the severity that the alert has."""
    assert list(split_runbook()) == list(ALERTS)
    lines = re.findall(r"^\| \[(\w+)\]\(#(\w+)\) \| (\w+) \|", RUNBOOK, flags=re.MULTILINE)
    assert lines == [(name, name.lower(), alert["labels"]["severity"]) for name, alert in ALERTS.items()]


@pytest.mark.parametrize(("name", "text"), split_runbook().items(), ids=lambda value: value.split("\n")[0])
def test_runbook_section_says_what_to_do(name: str, text: str) -> None:
    """Meaning, impact, first checks and fix, in this order, with something to type among the checks."""
    assert re.findall(r"^\*\*(.+?)\.\*\*", text, flags=re.MULTILINE) == ["Meaning", "Impact", "First checks", "Fix"]
    checks = text.partition("**First checks.**")[2].partition("**Fix.**")[0]
    assert re.search(r"```(console|promql)\n", checks)


def list_commands() -> list[str]:
    """Returns every `ringplan` command line of the runbook, each once."""
    lines = [line for block in list_runbook_blocks("console") for line in block.splitlines()]
    found = [re.search(r"(?:\$ |-- )ringplan (.*?)\s*(?:#.*)?$", line) for line in lines]
    return sorted({match[1] for match in found if match})


@pytest.mark.parametrize("line", list_commands())
def test_commands_of_the_runbook_exist(line: str) -> None:
    """Whoever types one gets no complaint about the command or its flags."""
    words = line.split()
    names = words[:2] if words[0] in ("bench", "drill") else words[:1]
    result = CliRunner().invoke(app, [*names, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0, result.output
    assert set(re.findall(r"--[a-z-]+", line)) <= set(re.findall(r"--[a-z-]+", result.output))


def test_settings_that_the_runbook_names_exist() -> None:
    """A fix is a flag or a variable that there is."""
    settings = Path(command.ROOT, "docs/configuration.md").read_text()
    flags = set(re.findall(r"`(--[a-z-]+)`", RUNBOOK))
    variables = set(re.findall(r"RINGPLAN_[A-Z_]+", RUNBOOK))
    # Of kubectl.
    flags.discard("--previous")
    assert flags <= set(re.findall(r"`(--[a-z-]+)`", settings))
    assert variables <= set(re.findall(r"RINGPLAN_[A-Z_]+", settings))
    assert flags
    assert variables


def test_runbook_queries_ask_for_what_exists() -> None:
    """The queries to paste name series of the code or of the rules."""
    names = {selector.name for query in list_runbook_queries() for selector in list_selectors(query)}
    assert len(names) > 20
    assert names <= declare_series().keys() | RECORDS | {"up", "process_start_time_seconds"}


def test_runbook_names_every_recorded_series() -> None:
    """Its table has them all, and no other; `W` stands for a window."""
    named = set(re.findall(r"^\| `([a-z_]+:\w+:\w+)` \|", RUNBOOK, flags=re.MULTILINE))
    windowed = {re.sub(r"(first_tokens.*rate).+", r"\1W", record) for record in RECORDS}
    assert named == windowed


def test_alert_names_in_other_places_exist() -> None:
    """Whatever else names an alert names one there is."""
    places = [Path(command.ROOT, "ringplan_cli/commands/drill.py"), *Path(command.ROOT, "docs").glob("*.md")]
    texts = [path.read_text() for path in places if path.exists()]
    texts += [json.dumps(dashboard) for dashboard in load_dashboards()]
    named = {name for text in texts for name in re.findall(r"\bRingplan[A-Z]\w+", text)}
    assert named <= ALERTS.keys()
    assert "RingplanPlanCacheMismatch" in named
