"""Every plan vector, replayed against a real planner process by what `ringplan conformance` is made of."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from planner_service.client import CacheMode, PlannerClient, PlanSource
from ringplan_cli.conformance.replay import build_runs
from ringplan_cli.conformance.suite import Suite, SuiteOptions
from ringplan_cli.conformance.vector import Vector, read_vector
from ringplan_cli.planner_inspector import PlannerInspector
from tests.planner_process import PlannerProcess

VECTORS = {path: read_vector(path) for path in sorted((Path(__file__).parent.parent / "vectors").glob("*.json"))}


@pytest.fixture(scope="module")
def client(planner_process: PlannerProcess) -> Iterator[PlannerClient]:
    """A connection that all vectors share; each has a session of its own."""
    with PlannerClient(planner_process.target) as client:
        yield client


@pytest.fixture(scope="module")
def inspector(planner_process: PlannerProcess) -> Iterator[PlannerInspector]:
    """Another, to look at the sessions."""
    with PlannerInspector(planner_process.target) as inspector:
        yield inspector


def test_vectors_are_all_here() -> None:
    """The handed vectors are all replayed: none is lost, none is empty."""
    assert len(VECTORS) == 71
    assert all(vector.ops for vector in VECTORS.values())


def test_vectors_have_runs_to_plan_ahead() -> None:
    """Planning four steps at once makes a difference to most files, so it is put to the test."""
    assert sum(any(len(run) == 4 for run in build_runs(vector.ops, 4)) for vector in VECTORS.values()) > 20


@pytest.mark.parametrize("ahead", [1, 4])
@pytest.mark.parametrize("ring_depth", [2, 8])
@pytest.mark.parametrize("cache_mode", CacheMode, ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize(("path", "vector"), VECTORS.items(), ids=[path.stem for path in VECTORS])
def test_plans_equal_the_vector(
    client: PlannerClient,
    inspector: PlannerInspector,
    path: Path,
    vector: Vector,
    cache_mode: CacheMode,
    ring_depth: int,
    ahead: int,
) -> None:
    """Every plan is the vector's, whatever cache mode, ring depth and run length; every page returns; no mismatch."""
    result = Suite(client, inspector, SuiteOptions(cache_mode, ring_depth, ahead)).replay(path, vector)
    assert result.difference is None
    advanced = {CacheMode.OFF: PlanSource.FULL, CacheMode.ON: PlanSource.CACHED, CacheMode.VERIFY: PlanSource.VERIFIED}
    assert {source for source, count in result.num_plans.items() if count} <= {PlanSource.FULL, advanced[cache_mode]}
