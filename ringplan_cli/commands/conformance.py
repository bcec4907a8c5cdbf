"""`ringplan conformance`: plan vectors against a planner."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from planner_service.client import CacheMode, PlannerClient, PlannerUnavailableError, parse_target
from planner_service.messages import MAX_RING_DEPTH
from ringplan_cli.conformance.replay import MAX_AHEAD
from ringplan_cli.conformance.suite import FileResult, Suite, SuiteOptions, find_files
from ringplan_cli.conformance.vector import Vector, read_vector
from ringplan_cli.errors import BadSettingsError, CommandError
from ringplan_cli.local_planner import LocalPlanner
from ringplan_cli.planner_inspector import NotOfferedError, PlannerInspector

app = typer.Typer(add_completion=False)

EPILOG = "Exit status: 0 if every plan is as its vector says, 1 if one is not, 2 if a vector cannot be read."


@app.command(epilog=EPILOG)
def conformance(
    vectors: Annotated[list[Path], typer.Argument(help="Vector files, or folders of them.", show_default=False)],
    socket: Annotated[
        str | None, typer.Option(help="A running planner's unix socket. Without it one is started.", show_default=False)
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(
            metavar="off|on|verify", help="The sessions' plan cache, or the planner's own.", show_default=False
        ),
    ] = None,
    ahead: Annotated[
        int, typer.Option(min=1, max=MAX_AHEAD, help="Plan runs of equal decode steps so many at a time.")
    ] = 1,
    ring_depth: Annotated[
        int | None,
        typer.Option(
            min=2, max=MAX_RING_DEPTH, help="The sessions' ring depth, or the planner's own.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of lines.")] = False,
) -> None:
    """Replays plan vectors against a planner and prints the first difference of each file."""
    options = SuiteOptions(_parse_cache_mode(cache), ring_depth or 0, ahead)
    target = None if socket is None else _parse_socket(socket)
    files = [(path, read_vector(path)) for path in find_files(vectors)]
    console = Console(highlight=False, soft_wrap=True, markup=False, quiet=as_json)
    results = []
    for result in _replay(files, options, target):
        console.print(result.write(), style="green" if result.difference is None else "red")
        results.append(result)
    num_passed = sum(result.difference is None for result in results)
    if as_json:
        typer.echo(json.dumps(_build_document(results, options), indent=2))
    else:
        Console(stderr=True, highlight=False).print(f"{num_passed} of {len(results)} vectors passed")
    raise typer.Exit(0 if num_passed == len(results) else 1)


def _parse_cache_mode(value: str | None) -> CacheMode | None:
    """Takes a mode by its name or by its number, as the planner's settings do."""
    if value is None:
        return None
    for mode in CacheMode:
        if value.lower() in {mode.name.lower(), str(mode.value)}:
            return mode
    raise BadSettingsError(f"--cache: off (0), on (1) or verify (2) is allowed (got {value!r})")


def _parse_socket(value: str) -> str:
    try:
        return parse_target(value)
    except ValueError as error:
        raise BadSettingsError(f"--socket: {error}") from None


def _replay(files: Sequence[tuple[Path, Vector]], options: SuiteOptions, target: str | None) -> Iterator[FileResult]:
    """Yields what each file came to, replayed against the planner at `target` or against one of our own."""
    with ExitStack() as resources:
        planner = resources.enter_context(LocalPlanner()) if target is None else None
        try:
            suite = resources.enter_context(_open_suite(planner.target if planner else str(target), options))
            for path, vector in files:
                yield suite.replay(path, vector)
        except (CommandError, PlannerUnavailableError) as error:
            # A planner of our own that died says more than the call that broke with it.
            if planner is not None:
                planner.check_running()
            raise error if isinstance(error, CommandError) else CommandError(str(error)) from error


@contextmanager
def _open_suite(target: str, options: SuiteOptions) -> Iterator[Suite]:
    with PlannerInspector(target) as inspector:
        # This fails at once where no planner is; the client waits for one that may be about to start.
        with suppress(NotOfferedError):
            inspector.list_sessions()
        with PlannerClient(target) as client:
            yield Suite(client, inspector, options)


def _build_document(results: Sequence[FileResult], options: SuiteOptions) -> dict[str, Any]:
    return {
        "cache": None if options.cache_mode is None else options.cache_mode.name.lower(),
        "ring_depth": options.ring_depth or None,
        "ahead": options.ahead,
        "num_files": len(results),
        "num_passed": sum(result.difference is None for result in results),
        "files": [result.to_json() for result in results],
    }
