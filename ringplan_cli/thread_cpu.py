"""CPU time of some of a process's threads, as Linux counts it."""

from pathlib import Path

# gRPC's own threads; Python's have the name of the program.
_SERVER_THREADS = ("event_engine", "grpc", "timer", "resolver", "EventEngine", "lifeguard")


def read_server_seconds(pid: int) -> float:
    """Returns the CPU that an engine's threads for gRPC have taken: its event loop's, and those that gRPC names.

    Args:
        pid: the engine's process.
    """
    seconds = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            is_server = int(task.name) == pid or (task / "comm").read_text().startswith(_SERVER_THREADS)
            if is_server:
                # Nanoseconds on a processor come first (proc_pid_schedstat in the kernel's documentation).
                seconds += int((task / "schedstat").read_text().split()[0]) / 1e9
        except FileNotFoundError:
            continue
    return seconds
