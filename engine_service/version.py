"""Which Ringplan this is: the engine takes nothing from the planner but its client."""

from importlib import metadata

UNKNOWN_VERSION = "0+unknown"


def read_version() -> str:
    """Returns the installed version, or `UNKNOWN_VERSION` where the sources run without being installed."""
    try:
        return metadata.version("ringplan")
    except metadata.PackageNotFoundError:
        return UNKNOWN_VERSION
