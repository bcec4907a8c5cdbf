"""The commands by name. A command's module is imported when it is asked for, so that the light ones start fast."""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

COMMANDS = ("planner", "engine", "serve", "generate", "health", "inspect", "drill", "conformance", "bench", "version")


class LazyGroup(TyperGroup):
    """A group whose commands are modules of `ringplan_cli.commands`, each with an `app` of one command."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  # As the group's base class has it.
        """Returns the commands in the order of the help page."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002  # As above.
        """Imports a command, or returns None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"ringplan_cli.commands.{cmd_name}")
        command = typer.main.get_command(module.app)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def describe() -> None:
    """Serves transformer models over gRPC and plans their paged attention in a process of its own."""
