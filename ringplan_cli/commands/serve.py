"""`ringplan serve`: planner and engine as two processes under one supervisor."""

import sys

import typer
from rich.console import Console

from engine_service.config import EngineSettings
from planner_service.config import PlannerSettings
from ringplan_cli.settings_flags import (
    build_arguments,
    build_flags,
    build_settings,
    read_given,
    with_parameters,
)
from ringplan_cli.supervisor import StopRequest, Supervisor, wait_for_end

app = typer.Typer(add_completion=False)

PREFIX = "planner_"
KILL_AFTER_SECONDS = 5.0
EPILOG = "The environment variables are those of `ringplan engine` and `ringplan planner`. A flag comes first."


@app.command(epilog=EPILOG)
@with_parameters(
    [
        *build_flags(EngineSettings, panel="Engine", leave_out=["planner"]),
        *build_flags(PlannerSettings, panel="Planner", prefix=PREFIX),
    ]
)
def serve(context: typer.Context) -> None:
    """Runs a planner and an engine together. If one ends, the other is stopped."""
    planner_given = read_given(context, PlannerSettings, prefix=PREFIX)
    planner_settings = build_settings(PlannerSettings, planner_given, prefix=PREFIX)
    engine_given = read_given(context, EngineSettings) | {"planner": f"unix:{planner_settings.socket}"}
    engine_settings = build_settings(EngineSettings, engine_given)
    grace_seconds = max(planner_settings.shutdown_grace_seconds, engine_settings.shutdown_grace_seconds)

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    supervisor = Supervisor()
    with StopRequest() as stop:
        supervisor.start("planner", build_arguments(planner_given))
        supervisor.start("engine", build_arguments(engine_given))
        try:
            ended = wait_for_end(supervisor, stop)
            if ended is not None:
                console.print(f"[bold red]error:[/] {ended}; stopping what is left")
        finally:
            killed = supervisor.stop(grace_seconds + KILL_AFTER_SECONDS, stop)
    for process in killed:
        console.print(f"[bold red]error:[/] {process}: it had not stopped in time")
    sys.exit(1 if ended is not None or killed else 0)
