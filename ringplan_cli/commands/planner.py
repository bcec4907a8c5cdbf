"""`ringplan planner`: the planner process."""

import sys
from typing import Annotated

import typer

from planner_service.config import PlannerSettings
from planner_service.errors import PlannerError
from ringplan_cli.errors import CommandError
from ringplan_cli.parent_death import end_with_parent
from ringplan_cli.settings_flags import build_flags, build_settings, read_given, with_parameters

app = typer.Typer(add_completion=False)

EPILOG = "Each flag is an environment variable too: RINGPLAN_PLANNER_RING_DEPTH is --ring-depth. A flag comes first."


@app.command(epilog=EPILOG)
@with_parameters(build_flags(PlannerSettings))
def planner(
    context: typer.Context,
    supervisor_pid: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Runs a planner until it is told to stop."""
    settings = build_settings(PlannerSettings, read_given(context, PlannerSettings))
    if supervisor_pid is not None:
        end_with_parent(supervisor_pid)
    from planner_service.server import run

    try:
        sys.exit(run(settings))
    except PlannerError as error:
        raise CommandError(str(error)) from error
