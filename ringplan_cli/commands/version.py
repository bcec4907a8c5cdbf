"""`ringplan version`: what is installed."""

from importlib.metadata import PackageNotFoundError, version
from platform import python_version

import typer

app = typer.Typer(add_completion=False)

PACKAGES = ("ringplan", "grpcio", "protobuf", "numpy", "torch", "transformers", "flashinfer-python")


@app.command(name="version")
def print_versions() -> None:
    """Prints the versions of Ringplan and of what it stands on."""
    for package in PACKAGES:
        typer.echo(f"{package:<18} {_find_version(package)}")
    typer.echo(f"{'python':<18} {python_version()}")


def _find_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
