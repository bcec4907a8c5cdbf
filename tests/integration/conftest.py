"""Real processes for integration tests."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.planner_process import PlannerProcess, run_planner


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for sockets in it."""
    with tempfile.TemporaryDirectory(prefix="ringplan-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def short_module_folder() -> Iterator[Path]:
    """The same, for all tests of a module."""
    with tempfile.TemporaryDirectory(prefix="ringplan-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def planner_process() -> Iterator[PlannerProcess]:
    """A planner that all tests of a run share; they must leave it running, and see only their own sessions."""
    with tempfile.TemporaryDirectory(prefix="ringplan-", dir="/tmp") as folder, run_planner(Path(folder)) as planner:
        yield planner


@pytest.fixture
def own_planner(short_folder: Path) -> Iterator[PlannerProcess]:
    """A planner for one test, which may kill it."""
    with run_planner(short_folder) as planner:
        yield planner


@pytest.fixture(scope="module")
def nan_in_new_memory() -> Iterator[None]:
    """Lets torch fill new memory with NaN: a token that depends on a slot nobody wrote comes out wrong at once."""
    # torch is not imported where no test of a run needs it.
    from tests.engine_runs import fill_new_memory_with_nan

    with fill_new_memory_with_nan():
        yield
