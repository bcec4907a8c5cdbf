"""Reads the dashboards' JSON as Grafana would: panels, and queries with the variables filled in."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "dashboards"
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def load_dashboards(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Returns the dashboards of a folder by the names of their files."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def list_panels(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a dashboard's panels from top to bottom, those inside closed rows too; rows themselves are none."""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            yield from panel.get("panels", [])
        else:
            yield panel


def build_variables(dashboard: Mapping[str, Any], *, window: str, span: str) -> dict[str, str]:
    """Gives a dashboard's variables the values they begin with, and Grafana's own the ones given.

    Args:
        dashboard: one of `load_dashboards`.
        window: what rates look back over, as `1m`.
        span: the time shown, as `15m`.

    Returns:
        Values by name.
    """
    variables = {"__rate_interval": window, "__interval": window, "__range": span}
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            # All that is there; a variable that had no such choice would have no value before Grafana asked for one.
            variables[variable["name"]] = variable["allValue"]
    return variables


def fill_in(expr: str, variables: Mapping[str, str]) -> str:
    """Puts values in the place of variables.

    Args:
        expr: a query.
        variables: values by name.

    Returns:
        PromQL.

    Raises:
        KeyError: the query has a variable that is not among them.
    """
    return _VARIABLE.sub(lambda found: variables[found[1] or found[2]], expr)
