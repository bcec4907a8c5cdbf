"""`ringplan engine`: the engine process."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from engine_service.config import EngineSettings
from ringplan_cli.engine_loading import run_engine
from ringplan_cli.parent_death import end_with_parent
from ringplan_cli.progress import ProgressFile
from ringplan_cli.settings_flags import build_flags, build_settings, read_given, with_parameters

app = typer.Typer(add_completion=False)

EPILOG = "Each flag is an environment variable too: RINGPLAN_ENGINE_NUM_PAGES is --num-pages. A flag comes first."


@app.command(epilog=EPILOG)
@with_parameters(build_flags(EngineSettings))
def engine(
    context: typer.Context,
    supervisor_pid: Annotated[int | None, typer.Option(hidden=True)] = None,
    progress_file: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Runs an engine beside its planner until it is told to stop."""
    settings = build_settings(EngineSettings, read_given(context, EngineSettings))
    if supervisor_pid is not None:
        end_with_parent(supervisor_pid)
    on_progress = None if progress_file is None else ProgressFile(progress_file).write
    if on_progress is not None:
        on_progress("starting", 0.0)
    sys.exit(run_engine(settings, on_progress))
