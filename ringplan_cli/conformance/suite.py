"""Replays many plan vectors against one planner, each in a session of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner_service.client import CacheMode, InvalidOptionsError, PlannerClient, PlannerSession, PlanSource
from planner_service.messages import MAX_ENGINE_NAME_CHARACTERS
from ringplan.planner.v1 import planner_pb2
from ringplan_cli.conformance.difference import Difference
from ringplan_cli.conformance.replay import Replay
from ringplan_cli.conformance.vector import Vector, VectorError
from ringplan_cli.errors import CommandError
from ringplan_cli.planner_inspector import NotOfferedError, PlannerInspector


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    """How vectors are replayed.

    Args:
        cache_mode: the sessions' cache mode; None is the planner's default.
        ring_depth: the sessions' ring depth; 0 is the planner's default.
        ahead: how many equal, consecutive decode steps are planned at once.
    """

    cache_mode: CacheMode | None = None
    ring_depth: int = 0
    ahead: int = 1


@dataclass(frozen=True, slots=True)
class FileResult:
    """What replaying one file came to.

    Args:
        path: the file.
        vector: its content.
        num_plans: the plans made, by how they came to be.
        difference: the first difference, or None.
    """

    path: Path
    vector: Vector
    num_plans: dict[PlanSource, int]
    difference: Difference | None

    def write(self) -> str:
        """Returns it in one line."""
        if self.difference is not None:
            return self.difference.write(str(self.path))
        counts = ", ".join(f"{count} {source.name.lower()}" for source, count in self.num_plans.items() if count)
        return f"{self.path}: ok ({sum(self.num_plans.values())} plans: {counts})"

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON knows it."""
        return {
            "file": str(self.path),
            "name": self.vector.name,
            "passed": self.difference is None,
            "num_plans": {source.name.lower(): count for source, count in self.num_plans.items()},
            "difference": None if self.difference is None else self.difference.to_json(),
        }


class Suite:
    """Replays vectors against a planner.

    Args:
        client: a connection to it.
        inspector: another, to look at the sessions.
        options: how to replay.
    """

    def __init__(self, client: PlannerClient, inspector: PlannerInspector, options: SuiteOptions) -> None:
        self._client = client
        self._inspector = inspector
        self._options = options

    def replay(self, path: Path, vector: Vector) -> FileResult:
        """Replays one vector in a session of its own.

        Args:
            path: its file.
            vector: what stands in it.

        Raises:
            VectorError: the vector's sizes are out of range.
            PlannerUnavailableError: the planner opens no session.
            CommandError: the planner does not answer any more.
        """
        try:
            session = self._client.open_session(
                page_size=vector.page_size,
                num_pages=vector.num_pages,
                max_streams=max(1, vector.num_streams),
                ring_depth=self._options.ring_depth,
                cache_mode=self._options.cache_mode,
                engine_name=f"conformance: {vector.name}"[:MAX_ENGINE_NAME_CHARACTERS],
            )
        except InvalidOptionsError as error:
            raise VectorError(path, str(error)) from error
        with session:
            replay = Replay(session, vector, self._options.ahead)
            difference = replay.run() or self._find_leftovers(session)
        return FileResult(path, vector, replay.num_plans, difference)

    def _find_leftovers(self, session: PlannerSession) -> Difference | None:
        """Looks at the session after its last stream was dropped, if the planner lets anyone look."""
        try:
            return find_leftovers(self._inspector.dump_session(session.name).summary)
        except NotOfferedError:
            return None


def find_leftovers(summary: planner_pb2.SessionSummary) -> Difference | None:
    """Returns what a session without streams should not have: pages in use, or cached plans that were wrong.

    Args:
        summary: the session in figures.
    """
    figures = (
        ("num_free_pages", summary.num_pages - 1, summary.num_free_pages),
        ("num_streams", 0, summary.num_streams),
        ("num_cache_mismatches", 0, summary.num_cache_mismatches),
    )
    return next((Difference(name, None, want, got) for name, want, got in figures if want != got), None)


def find_files(places: Sequence[Path]) -> list[Path]:
    """Returns the vector files at these places: files themselves, and `*.json` in folders, each once.

    Args:
        places: files and folders.

    Raises:
        CommandError: a place does not exist, or a folder has no vectors.
    """
    files: list[Path] = []
    for place in places:
        found = sorted(place.glob("*.json")) if place.is_dir() else [place]
        if not found:
            raise CommandError(f"{place}: no *.json in this folder", exit_code=2)
        files += found
    return list(dict.fromkeys(files))
