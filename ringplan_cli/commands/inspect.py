"""`ringplan inspect`: what a planner's sessions hold."""

import json
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console

from planner_service.config import PlannerSettings
from ringplan.planner.v1 import planner_pb2
from ringplan_cli import session_tables as texts
from ringplan_cli.plain_messages import build_plain
from ringplan_cli.planner_inspector import PlannerInspector
from ringplan_cli.settings_flags import build_settings
from ringplan_cli.tables import Column, print_figures, print_table

app = typer.Typer(add_completion=False)


@app.command()
def inspect(
    session: Annotated[
        str | None, typer.Argument(help="Show what this session holds, instead of all sessions.", show_default=False)
    ] = None,
    socket: Annotated[
        str | None,
        typer.Option(help="The planner's unix socket; by default where `ringplan planner` serves.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
) -> None:
    """Shows a planner's sessions, or one session's streams, pages, ring and plan cache."""
    settings = build_settings(PlannerSettings, {} if socket is None else {"socket": socket})
    with PlannerInspector(str(settings.socket)) as inspector:
        response = inspector.list_sessions() if session is None else inspector.dump_session(session)
    if as_json:
        typer.echo(json.dumps(build_plain(response)))
    elif isinstance(response, planner_pb2.ListSessionsResponse):
        _print_part(
            "sessions", texts.SESSION_COLUMNS, texts.build_session_rows(response.sessions), "no session is open"
        )
    else:
        _print_session(response)


def _print_session(dump: planner_pb2.DumpSessionResponse) -> None:
    print_figures(_open_console(), dump.summary.session, texts.build_summary_rows(dump.summary))
    parts = (
        ("streams", texts.STREAM_COLUMNS, texts.build_stream_rows(dump.streams), "no stream exists"),
        ("leased sets", texts.LEASE_COLUMNS, texts.build_lease_rows(dump.leases), "no set is leased"),
        ("cached plans", texts.CACHE_COLUMNS, texts.build_cache_rows(dump.cache_entries), "no plan is cached"),
    )
    for title, columns, rows, nothing in parts:
        typer.echo()
        _print_part(title, columns, rows, nothing)


def _print_part(title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]], nothing: str) -> None:
    if rows:
        print_table(_open_console(), title, columns, rows)
    else:
        typer.echo(nothing)


def _open_console() -> Console:
    return Console(highlight=False)
