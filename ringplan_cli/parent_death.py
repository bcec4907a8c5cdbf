"""Ties a process's life to its supervisor's, so that a supervisor that is killed leaves nothing behind."""

import ctypes
import os
import signal

from ringplan_cli.errors import CommandError

PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int) -> None:
    """Has the kernel send SIGTERM to this process when its parent ends, however that happens.

    Args:
        parent_pid: the process that started this one.

    Raises:
        CommandError: that process is gone already, or the kernel refuses.

    Source:
        prctl(2), PR_SET_PDEATHSIG.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise CommandError(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    # It may have ended before the call above.
    if os.getppid() != parent_pid:
        raise CommandError(f"the supervisor, process {parent_pid}, is gone")
