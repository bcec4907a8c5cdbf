"""The open sessions: names, the limit, and what ends with a session."""

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from planner_service.captures import CaptureFolder
from planner_service.errors import (
    RegionUnavailableError,
    SessionLimitError,
    SessionNotNamedError,
    ShuttingDownError,
    UnknownSessionError,
)
from planner_service.messages import SessionOptions
from planner_service.metrics import PlannerMetrics
from planner_service.region import RegionFolder
from planner_service.sessions import OpenSessions

OPTIONS = SessionOptions(page_size=4, num_pages=16, max_streams=4)


@pytest.fixture
def folder() -> Iterator[RegionFolder]:
    """A folder for regions."""
    with tempfile.TemporaryDirectory(prefix="ringplan-test-", dir="/dev/shm") as path:
        yield RegionFolder(Path(path) / "regions")


@pytest.fixture
def registry() -> CollectorRegistry:
    """A registry of this test alone."""
    return CollectorRegistry()


@pytest.fixture
def sessions(folder: RegionFolder, registry: CollectorRegistry, tmp_path: Path) -> OpenSessions:
    """Room for two sessions, with a clock that counts its readings."""
    clock = map(float, itertools.count())
    metrics = PlannerMetrics(registry, "test", CaptureFolder(tmp_path / "captures", 4))
    sessions = OpenSessions(
        folder, metrics, max_sessions=2, ring_timeout_seconds=1.0, num_cache_entries=8, clock=lambda: next(clock)
    )
    metrics.watch_sessions(sessions.summarize)
    return sessions


def _find_session_series(registry: CollectorRegistry) -> list[str]:
    samples = [sample for family in registry.collect() for sample in family.samples]
    return [sample.name for sample in samples if "session" in sample.labels]


def test_a_session_is_found_by_its_name_until_it_is_removed(sessions: OpenSessions) -> None:
    """Names are unique for the planner's life: one that was used is not given again."""
    first, second = sessions.add(OPTIONS), sessions.add(OPTIONS)
    assert sessions.get(first.name) is first
    sessions.remove(first)
    with pytest.raises(UnknownSessionError, match=first.name) as caught:
        sessions.get(first.name)
    assert caught.value.session == first.name
    third = sessions.add(OPTIONS)
    assert len({first.name, second.name, third.name}) == 3
    assert [summary.name for summary in sessions.summarize()] == [second.name, third.name]
    sessions.remove(second)
    sessions.remove(third)


def test_the_limit_counts_open_sessions(sessions: OpenSessions) -> None:
    """As many as may be are open: the next is refused, until one ends."""
    opened = [sessions.add(OPTIONS), sessions.add(OPTIONS)]
    with pytest.raises(SessionLimitError, match="2 sessions"):
        sessions.add(OPTIONS)
    sessions.remove(opened[0])
    opened[0] = sessions.add(OPTIONS)
    assert len(sessions) == 2
    for session in opened:
        sessions.remove(session)


def test_a_removed_session_leaves_neither_files_nor_series(
    sessions: OpenSessions, folder: RegionFolder, registry: CollectorRegistry
) -> None:
    """The region and the metrics go with the session."""
    session = sessions.add(OPTIONS)
    assert len(list(folder.path.iterdir())) == 1
    assert _find_session_series(registry)
    sessions.remove(session)
    assert list(folder.path.iterdir()) == []
    assert _find_session_series(registry) == []


def test_a_session_that_cannot_be_made_leaves_nothing(
    sessions: OpenSessions, folder: RegionFolder, registry: CollectorRegistry
) -> None:
    """Without memory for its region it neither counts nor has series."""
    folder.path.rmdir()
    with pytest.raises(RegionUnavailableError):
        sessions.add(OPTIONS)
    assert len(sessions) == 0
    assert _find_session_series(registry) == []


def test_no_session_is_added_once_new_ones_are_refused(sessions: OpenSessions) -> None:
    """A planner that ends keeps what is open and takes nothing more."""
    session = sessions.add(OPTIONS)
    sessions.refuse_new()
    with pytest.raises(ShuttingDownError):
        sessions.add(OPTIONS)
    assert sessions.get(session.name) is session
    sessions.remove(session)


def test_a_name_may_be_left_out_where_there_is_one_session(sessions: OpenSessions) -> None:
    """With none or two open it must be given; a name that is given counts."""
    with pytest.raises(SessionNotNamedError, match=r"^no session is open$"):
        sessions.get_named_or_only("")
    first = sessions.add(OPTIONS)
    assert sessions.get_named_or_only("") is first
    with pytest.raises(UnknownSessionError, match="session-9"):
        sessions.get_named_or_only("session-9")
    second = sessions.add(OPTIONS)
    assert sessions.get_named_or_only(second.name) is second
    with pytest.raises(SessionNotNamedError, match=r"^2 sessions are open: name one of them$"):
        sessions.get_named_or_only("")
