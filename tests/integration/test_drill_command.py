"""`ringplan drill mismatch` against real processes: seen everywhere an operator looks, and in no answer."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine_service.request import GenerationSpec, StoppingParams
from planner_service.client import CacheMode, PlannerClient, PlannerSession, Segment
from tests.engine_runs import Answers, RunningEngine, generate_with_transformers, run_engine
from tests.engine_service.tiny_models import save_tiny_checkpoint
from tests.planner_process import PlannerProcess, run_planner
from tests.reference.metrics_page import list_documented_metrics

PROMPTS = ((5, 6, 7), (9, 8, 7, 6, 5))
NUM_TOKENS = 24
TIMEOUT_SECONDS = 10.0


def _start(planner: PlannerProcess, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ringplan_cli", "drill", "mismatch", "--socket", str(planner.socket), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _run(planner: PlannerProcess, *arguments: str) -> tuple[int | None, str, str]:
    """Returns the exit status and what was printed, to the end and about errors."""
    with _start(planner, *arguments) as process:
        output, errors = process.communicate(timeout=40)
    return process.returncode, output, errors


def _generate(running: RunningEngine) -> list[list[int]]:
    """Returns the answers to `PROMPTS`, all running at once."""
    answers = Answers(len(PROMPTS))
    for number, prompt in enumerate(PROMPTS):
        spec = GenerationSpec(str(number), prompt, stopping=StoppingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
        running.engine.submit(spec, lambda event, number=number: answers.take(number, event))  # type: ignore[misc]  # mypy cannot infer a default.
    answers.wait()
    return [answers.token_ids[number] for number in range(len(PROMPTS))]


def _read_samples(planner: PlannerProcess, name: str) -> dict[str, float]:
    """Returns a metric's samples by plan label, or under "" where it has none."""
    families = text_string_to_metric_families(planner.read_metrics())
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return {sample.labels.get("plan_label", ""): sample.value for sample in samples}


@pytest.fixture(scope="module")
def planner(short_module_folder: Path) -> Iterator[PlannerProcess]:
    """A planner that allows drills, with no other sessions than those below."""
    captures = short_module_folder / "captures"
    with run_planner(short_module_folder, allow_drills=True, capture_dir=captures) as planner:
        yield planner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    return save_tiny_checkpoint("llama", tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """What transformers answers."""
    return generate_with_transformers(folder, PROMPTS, [NUM_TOKENS] * len(PROMPTS))


@pytest.fixture(scope="module")
def running(planner: PlannerProcess, folder: Path) -> Iterator[RunningEngine]:
    """An engine that verifies its plan cache."""
    with run_engine(planner, folder, "drilled", page_size=4, num_pages=64, cache_mode="verify") as running:
        yield running


@pytest.fixture
def session(short_folder: Path) -> Iterator[tuple[PlannerProcess, PlannerSession]]:
    """A planner that allows drills, and the session of an engine that has decoded and now does nothing."""
    with (
        run_planner(short_folder, allow_drills=True) as planner,
        PlannerClient(planner.target) as client,
        client.open_session(page_size=4, num_pages=64, max_streams=8, cache_mode=CacheMode.VERIFY) as session,
    ):
        session.submit(session.build_layout([Segment("a", "main")]))
        session.next_plan(TIMEOUT_SECONDS)
        yield planner, session


def test_drill_is_seen_everywhere_and_changes_no_token(
    planner: PlannerProcess, running: RunningEngine, expected: list[list[int]]
) -> None:
    """Counted, logged and captured; the engine's tokens are transformers', before it, with it and after it."""
    assert _generate(running) == expected
    info = {"version": metadata.version("ringplan"), "model": "tiny-llama", "dtype": "float32", "device": "cpu"}
    assert running.registry.get_sample_value("ringplan_engine_info", info) == 1
    name = running.find_session().session
    assert _read_samples(planner, "ringplan_plan_cache_mismatches_total") == {"main": 0}
    status, output, errors = _run(planner, "--wait-seconds", "0")
    assert (status, errors) == (0, "")
    assert output.startswith(f"{name}: the cached plan it uses next is wrong on purpose")
    assert running.find_session().is_drill_pending
    for _ in range(2):
        assert _generate(running) == expected
    summary = running.find_session()
    assert (summary.is_drill_pending, summary.num_cache_mismatches) == (False, 1)
    assert _read_samples(planner, "ringplan_plan_cache_mismatches_total") == {"main": 1}
    assert _read_samples(planner, "ringplan_drills_total") == {"": 1}
    assert _read_samples(planner, "ringplan_captures_written_total") == {"": 1}
    log = planner.read_log()
    assert re.search(rf"ERROR.*{name}: a cached plan was wrong and was not served: .*array='kv_lens'", log)
    assert log.index("a cached plan was wrong") < log.index(f"{name}: that mismatch was a drill")
    (capture,) = (planner.folder / "captures").iterdir()
    assert json.loads(capture.read_text())["tags"] == ["capture", "drill"]
    replay = [sys.executable, "-m", "ringplan_cli", "conformance", str(capture), "--cache", "verify"]
    assert subprocess.run(replay, capture_output=True, check=False).returncode == 0


def test_command_waits_for_the_mismatch_and_names_what_shows_it(
    planner: PlannerProcess, running: RunningEngine, expected: list[list[int]]
) -> None:
    """With requests running it comes by itself; the alert, both metrics, the log and the captures are named."""
    _generate(running)
    name = running.find_session().session
    num_before = running.find_session().num_cache_mismatches
    process = _start(planner)
    while process.poll() is None:
        assert _generate(running) == expected
    output, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (0, "")
    assert running.find_session().num_cache_mismatches == num_before + 1
    _, title, *traces = output.splitlines()
    assert title == "the mismatch was found; what shows it"
    assert [trace.partition(":")[0] for trace in traces] == ["metrics", "log", "capture", "alert"]
    assert f'ringplan_plan_cache_mismatches_total{{session="{name}"}}' in traces[0]
    assert str(planner.folder / "captures") in traces[2]
    assert "RingplanPlanCacheMismatch" in traces[3]


def test_metrics_pages_have_what_the_documentation_lists(planner: PlannerProcess, running: RunningEngine) -> None:
    """Nothing is left out of docs/metrics.md, and nothing is in it that a scrape does not find."""
    planner_names, engine_names = list_documented_metrics()
    families = list(text_string_to_metric_families(planner.read_metrics()))
    assert _list_names(families) == planner_names
    assert _list_names(list(running.registry.collect())) == engine_names


def test_nothing_of_a_session_is_left_in_the_metrics(
    session: tuple[PlannerProcess, PlannerSession],
) -> None:
    """Every series with the label `session` goes with it, those of a drill and of other plan labels too."""
    planner, open_session = session
    assert f'session="{open_session.name}"' in planner.read_metrics()
    open_session.close()
    while planner.list_sessions():
        threading.Event().wait(0.01)
    assert "session=" not in planner.read_metrics()


def test_mismatch_that_does_not_come_is_told(session: tuple[PlannerProcess, PlannerSession]) -> None:
    """An engine that does nothing uses no cached plan: the drill stays pending, and a second one is refused."""
    planner, open_session = session
    status, output, errors = _run(planner, "--wait-seconds", "0.2", "--json")
    assert status == 1
    assert json.loads(output)["is_found"] is False
    assert errors == (
        f"error: {open_session.name} has used no cached plan in 0.2 s; "
        "the mismatch is still to come, when requests decode next\n"
    )
    status, _, errors = _run(planner)
    assert status == 1
    assert errors == "error: a drill is pending: the cached plan that is used next is wrong already\n"


def test_session_that_ends_ends_the_wait(session: tuple[PlannerProcess, PlannerSession]) -> None:
    """Nobody waits for what can no longer happen."""
    planner, open_session = session
    process = _start(planner, "--session", open_session.name)
    while not planner.list_sessions()[0].is_drill_pending:
        assert process.poll() is None
        threading.Event().wait(0.01)
    open_session.close()
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert errors == f"error: {open_session.name} ended before it used a cached plan again: there was no mismatch\n"


def test_planner_that_allows_no_drills_says_which_flag_it_lacks(planner_process: PlannerProcess) -> None:
    """One clear line and exit status 1."""
    status, output, errors = _run(planner_process)
    assert (status, output) == (1, "")
    assert errors == "error: this planner allows no drills: it was started without --allow-drills\n"


def _list_names(families: list) -> set[str]:  # type: ignore[type-arg]  # Two kinds of families.
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    return {name for name in names if name.startswith("ringplan_")}
