"""Runs the engine, which needs packages that the planner does without."""

from collections.abc import Callable

from engine_service.config import EngineSettings
from engine_service.errors import EngineError
from ringplan_cli.errors import CommandError

OWN_PACKAGES = {"engine_service", "planner_service", "ringplan", "ringplan_cli"}


def run_engine(settings: EngineSettings, on_progress: Callable[[str, float], None] | None) -> int:
    """Runs the engine until it is told to stop.

    Args:
        settings: what it is to be.
        on_progress: told what is being loaded and how far it is, from 0 to 1.

    Returns:
        The process's exit code.

    Raises:
        CommandError: the engine cannot start, perhaps because the packages of the extra `engine` are not installed.
    """
    try:
        # Packages are missed here, or when the engine loads its model.
        from engine_service.server import run

        return run(settings, on_progress=on_progress)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package in OWN_PACKAGES:
            raise
        raise CommandError(f"the engine needs the package {package}: pip install 'ringplan[engine]'") from error
    except EngineError as error:
        raise CommandError(str(error)) from error
