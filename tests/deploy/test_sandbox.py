"""What stands for a container in the tests of the pod: it must confine, or those tests would show nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy import sandbox

_ATTEMPTS = """
import os, pathlib, sys
status = pathlib.Path("/proc/self/status").read_text()
print(os.geteuid(), int(status.split("CapEff:")[1].split()[0], 16))
for name in sys.argv[1:]:
    try:
        pathlib.Path(name, "attempt").write_text("x")
    except OSError as error:
        print(error.strerror)
    else:
        print("written")
"""


def test_confined_command_writes_to_its_volumes_alone(tmp_path: Path) -> None:
    """It is user 10001 without a capability; the root, the home of who started it and read-only volumes refuse it."""
    fault = sandbox.find_fault()
    if fault is not None:
        pytest.skip(f"a process cannot be confined here: {fault}")
    read_only = tmp_path / "read-only"
    read_only.mkdir()
    places = ["/", "/tmp", "/var/tmp", "/dev/shm", str(Path.home()), str(Path.cwd()), str(read_only), str(tmp_path)]
    command = [sys.executable, "-c", _ATTEMPTS, *places]
    confined = sandbox.wrap(command, writable=[tmp_path], read_only=[read_only])
    result = subprocess.run(confined, env={}, capture_output=True, text=True, check=True)
    user, *attempts = result.stdout.splitlines()
    assert user == "10001 0"
    assert attempts == ["Read-only file system"] * 7 + ["written"]
    assert (tmp_path / "attempt").read_text() == "x"
