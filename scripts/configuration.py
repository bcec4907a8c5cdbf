"""Writes docs/configuration.md from the settings classes, or checks that it is up to date.

Usage: `python scripts/configuration.py` writes it; `python scripts/configuration.py --check` changes nothing and fails
when the page differs from what the settings give.
"""

import os
import sys
from pathlib import Path

from pydantic_settings import BaseSettings

from engine_service.config import EngineSettings
from planner_service.config import PlannerSettings
from ringplan_cli.settings_flags import name_type, write_value

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
INTRODUCTION = """\
# Configuration

Every setting is a flag of `ringplan planner` or `ringplan engine`, and an environment variable. A flag comes before the
variable, the variable before the default. An unknown or malformed setting is an error at start.

`ringplan serve` takes the engine's flags as they are and the planner's with `--planner-` before them
(`--planner-ring-depth 4`).

This page is made by `make docs` from the settings classes.
"""


def build_table(title: str, settings_class: type[BaseSettings]) -> str:
    """Builds the section of one service.

    Args:
        title: its heading.
        settings_class: its settings.

    Returns:
        Markdown.
    """
    prefix = settings_class.model_config["env_prefix"]
    lines = [f"\n## {title}\n", "| flag | variable | values | default | meaning |", "|---|---|---|---|---|"]
    for name, field in settings_class.model_fields.items():
        default = write_value(field.get_default(call_default_factory=True, validated_data={}))
        # What depends on the user who runs this must not depend on who made the page.
        default = default.replace(f"-{os.geteuid()}", "-UID").replace(str(Path.home()), "~")
        values = name_type(field.annotation).replace("|", ", ")
        cells = [
            f"`--{name.replace('_', '-')}`",
            f"`{prefix}{name.upper()}`",
            values,
            f"`{default}`",
            field.description,
        ]
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def build_page() -> str:
    """Returns the whole page."""
    os.environ.pop("XDG_RUNTIME_DIR", None)
    os.environ.pop("XDG_CACHE_HOME", None)
    planner = build_table("Planner", PlannerSettings)
    return INTRODUCTION + planner + build_table("Engine", EngineSettings)


def main() -> None:
    """Runs the command."""
    if sys.argv[1:] == ["--check"]:
        is_current = PAGE.exists() and PAGE.read_text() == build_page()
        sys.exit(0 if is_current else "docs/configuration.md is out of date: run `make docs`")
    if sys.argv[1:]:
        sys.exit(__doc__)
    PAGE.write_text(build_page())


if __name__ == "__main__":
    main()
