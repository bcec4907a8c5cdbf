"""`ringplan drill`: makes something go wrong on purpose, so that an operator can try out what watches for it."""

import json
import time
from typing import Annotated

import typer
from rich.console import Console

from planner_service.config import PlannerSettings
from ringplan_cli.errors import CommandError
from ringplan_cli.planner_inspector import PlannerInspector
from ringplan_cli.settings_flags import build_settings
from ringplan_cli.tables import print_figures

POLL_SECONDS = 0.1

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def drill() -> None:
    """Makes something go wrong on purpose, to try out alerts and dashboards. No answer of an engine changes."""


@app.command()
def mismatch(
    socket: Annotated[
        str | None,
        typer.Option(help="The planner's unix socket; by default where `ringplan planner` serves.", show_default=False),
    ] = None,
    session: Annotated[
        str | None,
        typer.Option(
            help="The session, as `ringplan inspect` names it; may be left out if only one is open.", show_default=False
        ),
    ] = None,
    wait_seconds: Annotated[
        float, typer.Option(min=0, help="How long to wait for the mismatch; 0 returns while it is still to come.")
    ] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of lines.")] = False,
) -> None:
    """Makes one cached plan wrong in a session that verifies: the planner finds it, and serves the right one.

    The planner must have been started with --allow-drills. The wrong plan is the cached one that the session uses next:
    it comes when requests decode.
    """
    settings = build_settings(PlannerSettings, {} if socket is None else {"socket": socket})
    with PlannerInspector(str(settings.socket)) as inspector:
        response = inspector.drill_mismatch(session or "")
        name = response.session
        if not as_json:
            typer.echo(
                f"{name}: the cached plan it uses next is wrong on purpose; the right one is served in its place"
            )
        is_found = _wait(inspector, name, wait_seconds)
    if as_json:
        document = {"session": name, "is_found": is_found, "capture_dir": response.capture_dir or None}
        typer.echo(json.dumps(document))
    elif is_found:
        _print_traces(name, response.capture_dir)
    if not is_found and wait_seconds:
        raise CommandError(
            f"{name} has used no cached plan in {wait_seconds:g} s; "
            "the mismatch is still to come, when requests decode next"
        )


def _wait(inspector: PlannerInspector, session: str, wait_seconds: float) -> bool:
    """Waits for a drill to happen; returns whether it has."""
    deadline = time.monotonic() + wait_seconds
    while True:
        pending = {summary.session: summary.is_drill_pending for summary in inspector.list_sessions().sessions}
        if session not in pending:
            raise CommandError(f"{session} ended before it used a cached plan again: there was no mismatch")
        if not pending[session]:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)


def _print_traces(session: str, capture_dir: str) -> None:
    labels = f'{{session="{session}"}}'
    metrics = f"ringplan_plan_cache_mismatches_total{labels} and ringplan_drills_total{labels}, each one higher"
    log = f"the planner's: '{session}: a cached plan was wrong', then '{session}: that mismatch was a drill'"
    none_left = "none: drills have left as many as they may (half of --max-captures)"
    capture = f"mismatch-{session}-*.json in {capture_dir}" if capture_dir else none_left
    alert = "RingplanPlanCacheMismatch, once Prometheus has scraped the planner and evaluated its rules"
    traces = (("metrics", metrics), ("log", log), ("capture", capture), ("alert", alert))
    print_figures(Console(highlight=False), "the mismatch was found; what shows it", traces)
