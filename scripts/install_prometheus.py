"""Fetches `prometheus` and `promtool` for the tests, unless they are there already.

Usage: `python scripts/install_prometheus.py`.

The Debian (or Ubuntu) package is downloaded through apt, which checks its signature, and unpacked under the virtual
environment. Nothing is installed, nothing is started, and root is needed only where apt's lists are missing. It never
fails: tests that need the programs are skipped where they cannot be had.

It runs with the standard library alone.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "prometheus"
PROGRAMS = ("prometheus", "promtool")
FOLDER = Path(sys.prefix) / "tools"
TIMEOUT_SECONDS = 300


def find_program(name: str) -> Path | None:
    """Returns where a program is: on the PATH, else among what this script unpacked; None if nowhere.

    Args:
        name: one of `PROGRAMS`.
    """
    found = shutil.which(name) or shutil.which(name, path=FOLDER / "usr/bin")
    return Path(found) if found else None


def try_run(*command: str, folder: Path) -> str:
    """Runs a command in a folder.

    Returns:
        The last line of what it wrote if it failed, or "".
    """
    try:
        result = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if result.returncode == 0:
        return ""
    return f"{command[0]}: {(result.stdout.strip() or 'it failed').splitlines()[-1]}"


def try_install(folder: Path) -> str:
    """Downloads the package and unpacks it.

    Args:
        folder: where to unpack it.

    Returns:
        Why it could not be had, or "".
    """
    with tempfile.TemporaryDirectory() as scratch:
        download = ("apt-get", "-o", "APT::Sandbox::User=root", "download", PACKAGE)
        reason = try_run(*download, folder=Path(scratch))
        if reason and os.geteuid() == 0 and shutil.which("apt-get"):
            # A fresh container image comes without apt's lists.
            reason = try_run("apt-get", "update", folder=Path(scratch)) or try_run(*download, folder=Path(scratch))
        if reason:
            return reason
        package = next(Path(scratch).glob(f"{PACKAGE}_*.deb"))
        folder.mkdir(parents=True, exist_ok=True)
        return try_run("dpkg-deb", "--extract", str(package), str(folder), folder=Path(scratch))


def main() -> None:
    """Runs the command."""
    if all(find_program(name) for name in PROGRAMS):
        return
    sys.stdout.write("Prometheus, for the tests\n")
    sys.stdout.flush()
    reason = try_install(FOLDER)
    missing = [name for name in PROGRAMS if find_program(name) is None]
    if missing:
        sys.stdout.write(f"No {' and '.join(missing)}: tests that need them are skipped. {reason}\n")


if __name__ == "__main__":
    main()
