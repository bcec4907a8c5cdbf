"""Runs a command as a container would: a read-only root, user 10001, no capabilities, no environment but its own."""

import functools
import subprocess
from collections.abc import Sequence
from pathlib import Path

USER = 10001

# What is to be written to stays so: a bind mount of its own is not changed when the one below it is made read-only.
_SCRIPT = """
set -eu
while [ "$1" != -- ]; do mount --bind "$1" "$1"; shift; done
shift
while [ "$1" != -- ]; do mount --bind "$1" "$1"; mount -o remount,bind,ro "$1"; shift; done
shift
mount -o remount,bind,ro /
for point in /dev/shm /tmp /run /var/tmp; do
  if mountpoint -q "$point"; then mount -o remount,bind,ro "$point"; fi
done
exec unshare --user --map-user=%d --map-group=%d -- "$@"
"""


def wrap(command: Sequence[str], *, writable: Sequence[Path] = (), read_only: Sequence[Path] = ()) -> list[str]:
    """Returns the command that runs another one confined; it has the same process id, and so gets signals itself.

    Args:
        command: what to run.
        writable: folders that it may write to; nothing else can be written to.
        read_only: folders within them that it may only read.
    """
    script = _SCRIPT % (USER, USER)
    arguments = [*map(str, writable), "--", *map(str, read_only), "--", *command]
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *arguments]


@functools.cache
def find_fault() -> str | None:
    """Returns why nothing can be confined here, or None."""
    try:
        result = subprocess.run(wrap(["true"]), capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        return str(error)
    return result.stderr.strip() or f"status {result.returncode}" if result.returncode else None
