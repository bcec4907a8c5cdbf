"""Writes the dashboards' JSON from deploy/grafana/*.py, or checks that it is up to date.

Usage: `python scripts/dashboards.py` writes deploy/grafana/dashboards/*.json; `python scripts/dashboards.py --check`
changes nothing and fails when a file differs from what the code gives.
"""

import json
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from deploy.grafana import inference, plan_cache_health

FOLDER = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "dashboards"
DASHBOARDS = {"plan-cache-health.json": plan_cache_health.build, "inference.json": inference.build}


def build_files() -> dict[str, str]:
    """Returns the text of every file by its name."""
    return {name: json.dumps(build(), cls=JSONEncoder, indent=2) + "\n" for name, build in DASHBOARDS.items()}


def main() -> None:
    """Runs the command."""
    files = build_files()
    if sys.argv[1:] == ["--check"]:
        found = {path.name: path.read_text() for path in FOLDER.glob("*.json")}
        sys.exit(0 if found == files else "deploy/grafana/dashboards is out of date: run `make dashboards`")
    if sys.argv[1:]:
        sys.exit(__doc__)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
