"""A real Prometheus, with what is shipped for it, watches both real processes under load."""

import math
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ringplan.inference.v1 import inference_pb2
from ringplan_cli.app import app
from scripts.install_prometheus import find_program
from tests.deploy.dashboard_queries import DashboardQuery, list_queries
from tests.deploy.prometheus_process import PrometheusProcess, open_directly, run_prometheus
from tests.deploy.rule_selectors import Selector
from tests.deploy.shipped_rules import ALERTS, SELECTORS, list_runbook_queries
from tests.engine_process import EngineProcess, read_token_ids, run_engine
from tests.engine_service.tiny_models import save_tiny_checkpoint
from tests.planner_process import PlannerProcess, run_planner

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

WAIT_SECONDS = 60.0
LOAD = (
    "--rate 6 --duration-seconds 10 --prompt-tokens uniform:4-20 --answer-tokens uniform:10-30 --guided-share 0.4 "
    "--samples-share 0.2 --samples 2 --json"
)


@dataclass(frozen=True)
class Stack:
    """Both processes and what watches them, which has seen the whole load at `loaded_at`, in seconds since 1970."""

    planner: PlannerProcess
    engine: EngineProcess
    prometheus: PrometheusProcess
    loaded_at: float


def find_metrics_address(log: str) -> str:
    """Returns where a process serves metrics, as it logs it."""
    return log.rpartition("metrics at http://")[2].split("/")[0]


def wait_until(is_so: Callable[[], bool]) -> None:
    """Returns once something is so."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "it never was"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A planner that verifies, an engine with a tiny model, and a Prometheus that has seen them under load."""
    program = find_program("prometheus")
    if program is None:
        pytest.skip("prometheus is neither on the PATH nor could scripts/install_prometheus.py fetch it")
    model = save_tiny_checkpoint("llama", tmp_path_factory.mktemp("model") / "tiny-llama")
    with (
        tempfile.TemporaryDirectory(prefix="ringplan-", dir="/tmp") as name,
        run_planner(
            folder := Path(name), cache_mode="verify", allow_drills=True, capture_dir=folder / "captures"
        ) as planner,
        # A ring that is shallower than what is planned ahead, so that steps wait for sets.
        run_engine(folder, model=model, planner=planner.target, num_pages=401, ring_depth=2) as engine,
    ):
        addresses = {
            "planner": find_metrics_address(planner.read_log()),
            "engine": find_metrics_address(engine.read_log()),
        }
        with run_prometheus(program, tmp_path_factory.mktemp("prometheus"), addresses) as prometheus:
            wait_until(lambda: len(prometheus.query("up == 1")) == 2)
            result = CliRunner().invoke(app, ["bench", "serve", "--target", engine.target, *LOAD.split()])
            assert result.exit_code == 0, result.output
            loaded_at = time.time()
            recorded = "session:ringplan_ring_stalls:ratio_rate5m"
            for expr in ("min(timestamp(up))", f"min(timestamp({recorded}))"):
                wait_until(lambda expr=expr: float(prometheus.query(expr)[0]["value"][1]) > loaded_at)
            yield Stack(planner, engine, prometheus, time.time())


def test_both_processes_are_scraped(stack: Stack) -> None:
    """Both targets are up, with the labels that rules and dashboards ask for."""
    targets = stack.prometheus.get("targets")["activeTargets"]
    assert [target["health"] for target in targets] == ["up", "up"]
    labels = [target["labels"] for target in targets]
    assert {label["container"] for label in labels} == {"planner", "engine"}
    assert all(label["job"] == "ringplan" and label["namespace"] and label["pod"] for label in labels)


def test_all_rules_are_evaluated_without_an_error(stack: Stack) -> None:
    """Prometheus itself says of each rule that it is well."""
    rules = [rule for group in stack.prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules if rule["type"] == "alerting"} == set(ALERTS)
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}


@pytest.mark.parametrize("query", list_queries(), ids=lambda query: f"{query.dashboard}: {query.panel}: {query.expr}")
def test_every_dashboard_query_has_data(stack: Stack, query: DashboardQuery) -> None:
    """No panel stays empty, or shows nothing but "not a number", over two healthy processes under load."""
    series = stack.prometheus.query(query.expr, stack.loaded_at)
    assert any(math.isfinite(float(one["value"][1])) for one in series)


@pytest.mark.parametrize(("rule", "selector"), SELECTORS, ids=str)
def test_every_series_that_a_rule_asks_for_is_there(stack: Stack, rule: str, selector: Selector) -> None:
    """Raw and recorded series alike; alerts themselves have no data while all is well."""
    assert stack.prometheus.query(selector.text, stack.loaded_at)


def test_recorded_series_are_numbers(stack: Stack) -> None:
    """A load with a bit of everything gives each recording rule something to divide by."""
    series = stack.prometheus.query('{__name__=~".+:ringplan_.+"}', stack.loaded_at)
    values = {one["metric"]["__name__"]: float(one["value"][1]) for one in series}
    assert {name: value for name, value in values.items() if not math.isfinite(value)} == {}
    assert 0 < values["session_plan_label:ringplan_plan_cache_hits:ratio_rate5m"] < 1


def test_idle_engine_holds_no_lease(stack: Stack) -> None:
    """An engine without requests gives every buffer set back: no alert may fire for a night without load."""
    wait_until(lambda: stack.prometheus.query("ringplan_ring_sets_leased == 0") != [])
    wait_until(lambda: stack.prometheus.query("ringplan_ring_oldest_lease_age_seconds == 0") != [])
    assert float(stack.prometheus.query("max_over_time(ringplan_ring_sets_leased[5m])")[0]["value"][1]) > 0


@pytest.mark.parametrize("query", list_runbook_queries())
def test_queries_of_the_runbook_are_understood(stack: Stack, query: str) -> None:
    """Each line to paste is one query that Prometheus takes."""
    stack.prometheus.query(query, stack.loaded_at)


def test_metrics_pages_pass_prometheus_own_lint(stack: Stack) -> None:
    """`promtool check metrics` finds no name, type or help to complain about on either page."""
    promtool = find_program("promtool")
    assert promtool is not None
    for process in (stack.planner, stack.engine):
        with open_directly(f"http://{find_metrics_address(process.read_log())}/metrics") as response:
            page = response.read()
        result = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, check=False)
        assert (result.returncode, result.stdout + result.stderr) == (0, b"")


def test_drilled_mismatch_fires_the_alert(stack: Stack) -> None:
    """An operator tests the page: it fires for that session, no answer changes, and the capture replays clean."""
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5, 6, 7]))
    request.sampling.temperature = 0
    request.stopping.max_tokens = 60
    before = stack.engine.generate(request)
    assert stack.prometheus.find_alerts("RingplanPlanCacheMismatch") == []

    answers = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            answers.append(stack.engine.generate(request))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        result = CliRunner().invoke(app, ["drill", "mismatch", "--socket", str(stack.planner.socket)])
    finally:
        stop.set()
        asking.join()
    assert result.exit_code == 0, result.output
    wait_until(lambda: bool(stack.prometheus.find_alerts("RingplanPlanCacheMismatch")))
    [alert] = stack.prometheus.find_alerts("RingplanPlanCacheMismatch")
    assert alert["state"] == "firing"
    assert alert["labels"]["severity"] == "critical"
    assert (alert["labels"]["session"], alert["labels"]["plan_label"]) == ("session-1", "main")
    [capture] = (stack.planner.folder / "captures").iterdir()
    replayed = CliRunner().invoke(app, ["conformance", str(capture), "--cache", "verify"])
    assert replayed.exit_code == 0, replayed.output
    assert len(read_token_ids(before)) > 20
    assert all(read_token_ids(answer) == read_token_ids(before) for answer in answers)


def test_lost_planner_shows_as_pending_alert(stack: Stack) -> None:
    """From its next scrape on; it fires a minute later."""
    stack.planner.kill()
    wait_until(lambda: bool(stack.prometheus.find_alerts("RingplanPlannerDown")))
    [alert] = stack.prometheus.find_alerts("RingplanPlannerDown")
    assert (alert["labels"]["pod"], alert["labels"]["severity"]) == ("ringplan-0", "critical")
