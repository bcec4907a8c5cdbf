"""`ringplan inspect` against a real planner: what its sessions hold, for people and for scripts."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner_service.client import CacheMode, PlannerClient, PlannerSession, Segment
from tests.planner_process import PlannerProcess, run_planner

TIMEOUT_SECONDS = 10.0


def _run(planner: PlannerProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ringplan_cli", "inspect", *arguments, "--socket", str(planner.socket)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def planner(short_module_folder: Path) -> Iterator[PlannerProcess]:
    """A planner with no other session than the one below."""
    with run_planner(short_module_folder) as planner:
        yield planner


@pytest.fixture(scope="module")
def session(planner: PlannerProcess) -> Iterator[PlannerSession]:
    """A session with two streams, three steps in flight, four leased sets, hits and misses."""
    with (
        PlannerClient(planner.target) as client,
        client.open_session(
            page_size=4, num_pages=64, max_streams=8, ring_depth=4, cache_mode=CacheMode.ON, engine_name="engine"
        ) as session,
    ):
        session.submit(session.build_layout([Segment("a", "main", 9), Segment("b", "main", 2)]))
        session.submit(session.build_layout([Segment("a", "main"), Segment("b", "main")]), repeat=3)
        steps = [session.next_plan(TIMEOUT_SECONDS).step_id for _ in range(4)]
        session.commit(steps[1])
        session.release(steps[0])
        # The planner answers a message once it has applied it.
        session.submit(session.build_layout([Segment("a", "main", 0)]))
        session.next_plan(TIMEOUT_SECONDS)
        session.discard_from(steps[-1] + 1)
        session.submit(session.build_layout([Segment(None, "main")], commit=False))
        session.next_plan(TIMEOUT_SECONDS)
        yield session


def test_sessions_are_listed(planner: PlannerProcess, session: PlannerSession) -> None:
    """One line a session, under headings, plain when it is piped."""
    result = _run(planner)
    assert (result.returncode, result.stderr) == (0, "")
    title, headings, line = result.stdout.splitlines()
    assert title == "sessions"
    assert " ".join(headings.split()) == "session engine age free pages streams in flight leased sets cache hits misses"
    assert line.split()[:2] == [session.name, "engine"]
    # 9 + 3 and 2 + 3 tokens are 3 and 2 of the 63 pages.
    assert " ".join(line.split()).endswith("58 of 63 2 3 4 of 4 on 2 4")


def test_session_is_shown_with_all_it_holds(planner: PlannerProcess, session: PlannerSession) -> None:
    """Figures, streams with their pages, leased sets with their ages, cached plans with hits and misses."""
    result = _run(planner, session.name)
    assert (result.returncode, result.stderr) == (0, "")
    figures, streams, leases, cached = (part.splitlines() for part in result.stdout.split("\n\n"))
    assert figures[0] == session.name
    assert "pages: 63 of 4 tokens: 58 free, 5 in use, 0 shared" in figures
    assert "steps in flight: 3" in figures
    assert "ring: 4 of 4 sets leased" in figures
    assert "plan cache: on: 2 hits, 4 misses, 0 mismatches" in figures
    assert "misses: not_decode 2, cold 1, not_committing 1" in figures
    assert streams[0] == "streams"
    # Stream 0: 9 + 1 committed, 2 more planned, on 3 pages; stream 1: 2 + 1 and 2 more, on 2.
    assert [line.split() for line in streams[2:]] == [
        ["0", "10", "12", "2", "3", "1-3"],
        ["1", "3", "5", "2", "2", "4-5"],
    ]
    assert leases[:1] == ["leased sets"]
    assert [line.split()[:2] for line in leases[2:]] == [[str(step), "1"] for step in (2, 3, 4, 6)]
    assert cached[0] == "cached plans"
    assert [line.split() for line in cached[2:]] == [["main", "2", "2", "cold", "1"]]


def test_json_has_every_field(planner: PlannerProcess, session: PlannerSession) -> None:
    """A script gets one document of numbers and words."""
    listed = json.loads(_run(planner, "--json").stdout)
    (summary,) = listed["sessions"]
    assert (summary["session"], summary["num_free_pages"], summary["cache_mode"]) == (session.name, 58, "on")
    dumped = json.loads(_run(planner, session.name, "--json").stdout)
    assert dumped["summary"]["num_cache_hits"] == 2
    assert dumped["streams"][1]["pages"] == [4, 5]
    assert dumped["streams"][1]["num_steps_in_flight"] == 2
    assert [lease["step_id"] for lease in dumped["leases"]] == [2, 3, 4, 6]
    assert all(lease["age_seconds"] > 0 for lease in dumped["leases"])
    assert dumped["cache_entries"][0]["misses"] == [{"reason": "cold", "num_misses": 1}]


def test_empty_planner_and_empty_session_say_so(own_planner: PlannerProcess) -> None:
    """Nothing to show is said in words instead of an empty table."""
    assert _run(own_planner).stdout == "no session is open\n"
    with (
        PlannerClient(own_planner.target) as client,
        client.open_session(page_size=4, num_pages=8, max_streams=1) as session,
    ):
        output = _run(own_planner, session.name).stdout
    for words in ("engine: -", "no stream exists", "no set is leased", "no plan is cached", "misses: none"):
        assert words in output


def test_unknown_session_is_one_clear_line(planner: PlannerProcess) -> None:
    """A session that has ended, or never was."""
    result = _run(planner, "session-9")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "error: no session named 'session-9' is open\n"


def test_socket_comes_from_the_planner_s_settings(planner: PlannerProcess) -> None:
    """Without a flag it looks where `ringplan planner` would serve; nobody there is one clear line."""
    command = [sys.executable, "-m", "ringplan_cli", "inspect"]
    for socket, status in ((planner.socket, 0), ("/nonexistent/socket", 1)):
        environment = {**os.environ, "RINGPLAN_PLANNER_SOCKET": str(socket)}
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert result.returncode == status
    assert result.stderr == "error: no planner answers at unix:/nonexistent/socket\n"
