"""Regions: what their files look like, who may see them, and what is left when somebody dies."""

import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from planner_service.errors import RegionFolderError, RegionUnavailableError
from planner_service.region import RegionFolder, map_region

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def folder_path() -> Iterator[Path]:
    """A folder on a tmpfs, not made yet."""
    with tempfile.TemporaryDirectory(prefix="ringplan-test-", dir=SHARED_MEMORY) as parent:
        yield Path(parent) / "regions"


@pytest.fixture
def folder(folder_path: Path) -> RegionFolder:
    """A folder for regions."""
    return RegionFolder(folder_path)


def _read_locked_bytes(path: str) -> int:
    """Returns how much of a file's mappings in this process the kernel has locked."""
    total, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_inside = path in line
        elif is_inside and line.startswith("Locked:"):
            total += 1024 * int(line.split()[1])
    return total


def test_a_region_is_zeroed_and_aligned_and_holds_its_sets(folder: RegionFolder) -> None:
    """Sets start on 64-byte bounds, one after another, and hold zeros."""
    region = folder.allocate(3, 4, 1000)
    description = region.description
    assert (description.region_id, description.set_bytes, description.num_bytes) == (3, 1024, 4096)
    assert description.set_offsets == (0, 1024, 2048, 3072)
    assert region.buffer.dtype == np.uint8
    assert region.buffer.shape == (4096,)
    assert region.buffer.ctypes.data % 64 == 0
    assert not region.buffer.any()
    region.close()


def test_a_region_is_private_to_its_user(folder: RegionFolder) -> None:
    """The file has mode 0600 in a folder of mode 0700."""
    region = folder.allocate(1, 2, 64)
    assert stat.S_IMODE(Path(region.description.path).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    region.close()


def test_a_region_is_allocated_in_full(folder: RegionFolder) -> None:
    """Every byte of the file has memory behind it before it is written."""
    region = folder.allocate(1, 2, 1 << 20)
    assert Path(region.description.path).stat().st_blocks * 512 >= 2 << 20
    region.close()


def test_both_sides_see_the_same_memory(folder: RegionFolder) -> None:
    """What one mapping writes the other reads, both ways, also once the file has no name."""
    region = folder.allocate(1, 2, 128)
    mapping = map_region(region.description.path, region.description.num_bytes)
    region.unlink()
    region.buffer[5] = 42
    mapping.buffer[200] = 7
    assert (mapping.buffer[5], region.buffer[200]) == (42, 7)
    mapping.close()
    region.close()


def test_more_than_the_file_system_holds_is_a_clear_error_and_leaves_nothing(folder: RegionFolder) -> None:
    """A full tmpfs gives an error with the size and the folder, and no file stays behind."""
    status = os.statvfs(SHARED_MEMORY)
    num_bytes = status.f_blocks * status.f_frsize + 64
    with pytest.raises(RegionUnavailableError, match=f"{num_bytes} bytes.*{folder.path}.*No space") as caught:
        folder.allocate(1, 1, num_bytes)
    assert caught.value.num_bytes == num_bytes
    assert list(folder.path.iterdir()) == []


def test_a_folder_that_vanished_is_a_clear_error(folder: RegionFolder) -> None:
    """A region needs its folder, and says so."""
    folder.path.rmdir()
    with pytest.raises(RegionUnavailableError, match="No such file"):
        folder.allocate(1, 2, 64)


def test_unlinking_removes_one_name_once(folder: RegionFolder) -> None:
    """A second unlink does not take a file that came later under the same name."""
    region = folder.allocate(1, 2, 64)
    path = Path(region.description.path)
    region.unlink()
    assert not path.exists()
    path.touch()
    region.unlink()
    region.close()
    assert path.exists()


def test_closing_removes_the_file_and_may_be_repeated(folder: RegionFolder) -> None:
    """After close there is no file, no buffer and nothing locked."""
    region = folder.allocate(1, 2, 64)
    region.close()
    region.close()
    assert list(folder.path.iterdir()) == []
    assert region.buffer.size == 0
    assert region.locked_bytes == 0


def test_a_view_outlives_the_region(folder: RegionFolder) -> None:
    """Memory that somebody still looks at stays mapped, and only that long."""
    region = folder.allocate(1, 2, 4096)
    region.buffer[:] = 9
    view = region.buffer[64:128].view(np.int32)
    name = Path(region.description.path).name
    region.close()
    assert view.tolist() == [0x09090909] * 16
    assert name in Path("/proc/self/maps").read_text()
    del view
    assert name not in Path("/proc/self/maps").read_text()


def test_the_locked_bytes_are_what_the_kernel_counts(folder: RegionFolder) -> None:
    """What a region says is locked is what the kernel has locked of it."""
    region = folder.allocate(1, 2, 1 << 16)
    assert region.locked_bytes in {0, 1 << 17}
    assert _read_locked_bytes(region.description.path) == region.locked_bytes
    region.close()


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_that_others_can_enter_is_refused(folder_path: Path, mode: int) -> None:
    """Only mode 0700 keeps other users out."""
    folder_path.mkdir()
    folder_path.chmod(mode)
    with pytest.raises(RegionFolderError, match=f"{folder_path}: mode {mode:04o}.*0700"):
        RegionFolder(folder_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused(folder_path: Path) -> None:
    """A folder that somebody else made before us is not trusted."""
    folder_path.mkdir(mode=0o700)
    os.chown(folder_path, 65_534, -1)
    with pytest.raises(RegionFolderError, match="owned by user 65534"):
        RegionFolder(folder_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try as another user, and root can write anywhere")
@pytest.mark.parametrize("mode", [0o500, 0o300, 0o600])
def test_a_folder_that_cannot_be_written_to_is_refused(folder_path: Path, mode: int) -> None:
    """A planner that could make no region does not start, rather than refuse every session later."""
    folder_path.mkdir()
    os.chown(folder_path, 65_534, -1)
    folder_path.chmod(mode)
    folder_path.parent.chmod(0o755)
    program = (
        "import os, sys; from pathlib import Path; from planner_service.region import RegionFolder\n"
        "os.setuid(65_534); RegionFolder(Path(sys.argv[1]))"
    )
    result = subprocess.run([sys.executable, "-c", program, folder_path], capture_output=True, text=True, check=False)
    assert f"RegionFolderError: {folder_path}: this user cannot make files there" in result.stderr


def test_what_is_no_folder_is_refused(folder_path: Path) -> None:
    """A file and a symbolic link are refused in words."""
    folder_path.touch()
    with pytest.raises(RegionFolderError, match=f"{folder_path}: .*cannot be made"):
        RegionFolder(folder_path)
    folder_path.unlink()
    target = folder_path.with_name("elsewhere")
    target.mkdir(mode=0o700)
    folder_path.symlink_to(target)
    with pytest.raises(RegionFolderError, match="symbolic link"):
        RegionFolder(folder_path)


def test_a_start_sweeps_what_a_killed_planner_left(folder_path: Path) -> None:
    """Files of a process that was killed are gone once the next planner has started."""
    program = (
        "import sys, time; from pathlib import Path; from planner_service.region import RegionFolder\n"
        "region = RegionFolder(Path(sys.argv[1])).allocate(1, 2, 64); print('made', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, folder_path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"made\n"
        process.send_signal(signal.SIGKILL)
    assert len(list(folder_path.iterdir())) == 1
    RegionFolder(folder_path)
    assert list(folder_path.iterdir()) == []


def test_a_sweep_spares_living_planners_and_foreign_files(folder: RegionFolder) -> None:
    """A second planner in the folder takes neither the first one's regions nor what is no region."""
    region = folder.allocate(1, 2, 64)
    foreign = folder.path / "notes.txt"
    foreign.touch()
    RegionFolder(folder.path)
    assert {path.name for path in folder.path.iterdir()} == {Path(region.description.path).name, "notes.txt"}
    region.close()


def test_a_region_of_another_size_is_not_mapped(folder: RegionFolder) -> None:
    """A mapping larger than its file would end in SIGBUS, so the size is checked."""
    region = folder.allocate(1, 2, 64)
    with pytest.raises(RegionUnavailableError, match="has 128 bytes"):
        map_region(region.description.path, 4096)
    region.close()


def test_a_missing_region_is_a_clear_error(tmp_path: Path) -> None:
    """The path is named."""
    with pytest.raises(RegionUnavailableError, match=f"{tmp_path}/none: No such file"):
        map_region(str(tmp_path / "none"), 64)


def test_many_regions_leave_no_open_files(folder: RegionFolder) -> None:
    """Neither side keeps a descriptor once a region is closed."""
    for region_id in range(1, 4):
        region = folder.allocate(region_id, 2, 64)
        map_region(region.description.path, 128).close()
        region.close()
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208 - Names are enough.
    assert [link for link in links if link.is_symlink() and str(folder.path) in os.readlink(link)] == []  # noqa: PTH115 - as text.
