"""Every plan vector, replayed through the client against a real planner process."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner_service.client import CacheMode, PlannerClient
from tests.conformance.runner import replay_vector
from tests.planner_process import PlannerProcess

VECTORS = sorted((Path(__file__).parent.parent / "vectors").glob("*.json"))
MAX_STREAMS = 64


@pytest.fixture(scope="module")
def client(planner_process: PlannerProcess) -> Iterator[PlannerClient]:
    """A connection that all vectors share; each has a session of its own."""
    with PlannerClient(planner_process.target) as client:
        yield client


def test_vectors_are_all_here() -> None:
    """The handed vectors are all replayed: none is lost, none is empty."""
    assert len(VECTORS) == 71
    assert all(json.loads(path.read_text())["ops"] for path in VECTORS)


@pytest.mark.parametrize("cache_mode", CacheMode)
@pytest.mark.parametrize("ring_depth", [2, 8])
@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_plans_equal_the_vector(
    planner_process: PlannerProcess, client: PlannerClient, path: Path, ring_depth: int, cache_mode: CacheMode
) -> None:
    """Every array of every plan is the vector's, whatever the ring's depth and the cache mode, and all pages return."""
    vector = json.loads(path.read_text())
    num_pages = vector["num_pages"]
    with client.open_session(
        page_size=vector["page_size"],
        num_pages=num_pages,
        max_streams=MAX_STREAMS,
        ring_depth=ring_depth,
        cache_mode=cache_mode,
        engine_name=path.stem,
    ) as session:
        assert replay_vector(session, vector) == []
        summary = next(other for other in planner_process.list_sessions() if other.session == session.name)
        assert (summary.num_free_pages, summary.num_streams) == (num_pages - 1, 0)
