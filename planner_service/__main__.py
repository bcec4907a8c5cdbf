"""Runs a planner with settings from the environment: `python -m planner_service`."""

import sys

from pydantic import ValidationError

from planner_service.config import PlannerSettings
from planner_service.server import run


def main() -> int:
    """Returns the process's exit code."""
    if len(sys.argv) > 1:
        sys.stderr.write("error: settings come from the environment; `ringplan planner` takes flags\n")
        return 2
    try:
        settings = PlannerSettings()
    except ValidationError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return run(settings)


if __name__ == "__main__":
    sys.exit(main())
