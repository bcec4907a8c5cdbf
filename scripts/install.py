"""Runs `pip install` and shows how far it is: one line that changes on a terminal, pip's own output elsewhere.

Usage: `python scripts/install.py TITLE ARGUMENT...`, with the arguments of `pip install`.

It runs before anything is installed, so it uses the standard library alone.
"""

import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

TICK_SECONDS = 0.2
# pip's lines that say what it does now, and what a person makes of them.
STAGES = (
    (re.compile(r"Collecting ([\w.-]+)"), "looking for {0}"),
    (re.compile(r"Processing \S*?([^/\s]+?)-\d\S*"), "found {0}"),
    (re.compile(r"\s*Downloading \S*?([^/\s]+?)-\d\S* \((.+)\)"), "downloading {0}, {1}"),
    (re.compile(r"Installing collected packages: (.*)"), "installing"),
)
PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def describe(line: str) -> str | None:
    """Returns what a line of pip's output says about where it is, or None if it says nothing of that."""
    for pattern, text in STAGES:
        match = pattern.match(line)
        if match:
            return text.format(*match.groups())
    return None


def read_lines(process: subprocess.Popen[str]) -> Iterator[str | None]:
    """Yields a process's lines as they come, and None whenever a moment passes without one."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in process.stdout or ():
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=TICK_SECONDS)
        except queue.Empty:
            yield None
            continue
        if line is None:
            return
        yield line


def install_on_terminal(title: str, command: list[str]) -> int:
    """Runs pip under one changing line; shows all that it printed if it fails.

    Args:
        title: what is being installed.
        command: pip's.

    Returns:
        pip's exit status.
    """
    started, output, stage, percent = time.monotonic(), [], "", ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1) as process:
        for line in read_lines(process):
            if line is not None:
                output.append(line)
                progress = PROGRESS.match(line)
                if progress:
                    done, total = map(int, progress.groups())
                    percent = f" {100 * done // max(total, 1)}%"
                elif described := describe(line):
                    stage, percent = described, ""
            text = f"{title} ({time.monotonic() - started:.0f} s) {stage}{percent}"
            sys.stdout.write(f"\r\033[2K{text[: shutil.get_terminal_size().columns - 1]}")
            sys.stdout.flush()
    outcome = "done" if process.returncode == 0 else "failed"
    sys.stdout.write(f"\r\033[2K{title}: {outcome} after {time.monotonic() - started:.0f} s\n")
    if process.returncode != 0:
        sys.stdout.write("".join(line for line in output if not PROGRESS.match(line)))
    return process.returncode


def main() -> None:
    """Runs the command."""
    title, *arguments = sys.argv[1:]
    command = [sys.executable, "-m", "pip", "install", *arguments]
    if sys.stdout.isatty():
        sys.exit(install_on_terminal(title, [*command, "--progress-bar=raw"]))
    sys.stdout.write(f"{title}\n")
    sys.stdout.flush()
    sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
