"""Every query of every dashboard, as a data source gets it."""

from pathlib import Path
from typing import NamedTuple

from scripts.dashboard_files import FOLDER, build_variables, fill_in, list_panels, load_dashboards


class DashboardQuery(NamedTuple):
    """One query: where it stands, and its PromQL without variables."""

    dashboard: str
    panel: str
    expr: str


def list_queries(folder: Path = FOLDER, *, window: str = "1m", span: str = "15m") -> list[DashboardQuery]:
    """Lists the queries of all panels.

    Args:
        folder: of the dashboards' JSON.
        window: what rates look back over (`$__rate_interval`).
        span: the time shown (`$__range`).

    Returns:
        The queries in the order of the files and the panels.
    """
    queries = []
    for dashboard in load_dashboards(folder):
        variables = build_variables(dashboard, window=window, span=span)
        queries += [
            DashboardQuery(dashboard["title"], panel["title"], fill_in(target["expr"], variables))
            for panel in list_panels(dashboard)
            for target in panel["targets"]
        ]
    return queries
