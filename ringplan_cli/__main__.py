"""The console entry point."""

import sys
from io import TextIOWrapper

from ringplan_cli.app import app
from ringplan_cli.errors import CommandError


def main() -> None:
    """Runs the command line; what goes wrong becomes one line on standard error."""
    if isinstance(sys.stdout, TextIOWrapper):
        # A terminal that cannot show a character of the answer shows a question mark.
        sys.stdout.reconfigure(errors="replace")
    try:
        app(prog_name="ringplan")
    except CommandError as error:
        from rich.console import Console

        Console(stderr=True, highlight=False, soft_wrap=True).print("error:", style="bold red", end=" ")
        Console(stderr=True, highlight=False, soft_wrap=True, markup=False).print(str(error))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
