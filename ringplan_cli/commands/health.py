"""`ringplan health`: a probe for people, and for Kubernetes, which cannot look at a unix socket by itself."""

from typing import Annotated

import typer

from ringplan_cli.errors import CommandError

app = typer.Typer(add_completion=False)

# What a person can use of gRPC's own words.
REASONS = {
    "UNAVAILABLE": "no server answers there",
    "DEADLINE_EXCEEDED": "no answer in time",
    "NOT_FOUND": "the server has no such service",
}


@app.command()
def health(
    target: Annotated[
        str, typer.Argument(help="The server: 'unix:/path', a path, or 'host:port'.", show_default=False)
    ],
    service: Annotated[str, typer.Option(help="Ask about this gRPC service instead of the whole server.")] = "",
    timeout_seconds: Annotated[float, typer.Option(help="How long to wait for the answer.", min=0.001)] = 5.0,
) -> None:
    """Asks a planner or an engine whether it serves; exit status 0 says that it does."""
    from planner_service.health import HealthCheckError, check

    try:
        is_serving = check(target, timeout_seconds, service)
    except HealthCheckError as error:
        reason = REASONS.get(error.status, error.reason)
        raise CommandError(f"{target}: {reason}" if target else reason) from error
    if not is_serving:
        raise CommandError(f"{target}: not serving")
    typer.echo("serving")
