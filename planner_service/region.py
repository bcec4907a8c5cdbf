"""Regions: files of shared memory, made by the planner and mapped by both sides. The only module that maps memory."""

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import secrets
import stat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from planner_service.core.arrays import ALIGNMENT_BYTES
from planner_service.errors import RegionFolderError, RegionUnavailableError
from planner_service.messages import RegionDescription

FILE_PREFIX = "ringplan-"
FILE_SUFFIX = ".region"
_NAME_ATTEMPTS = 16

_logger = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class RegionMapping:
    """A region's file as mapped by this process, writable.

    Args:
        descriptor: an open file of at least `num_bytes`; it may be closed afterwards.
        num_bytes: how much of it to map.

    Raises:
        OSError: the kernel refuses the mapping.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        # Populated at once: the first plan into a set would otherwise pay for a page fault every 4096 bytes.
        memory = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._memory: mmap.mmap | None = memory
        self.buffer: npt.NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)

    def try_lock(self) -> int:
        """Locks the mapping in memory if this process's limits allow.

        Returns:
            The bytes locked: all of them, or 0.
        """
        address, num_bytes = self.buffer.ctypes.data, self.buffer.nbytes
        return num_bytes if _libc.mlock(address, num_bytes) == 0 else 0

    def close(self) -> None:
        """Gives the mapping up; the memory goes when the last view of it does. Idempotent."""
        self.buffer = np.empty(0, dtype=np.uint8)
        memory, self._memory = self._memory, None
        if memory is not None:
            # A view still in use keeps the mapping, which then ends with the view.
            with contextlib.suppress(BufferError):
                memory.close()


class SharedRegion:
    """A region that this process made: its file, and its memory as mapped here.

    `buffer` is the whole of it, writable and 64-byte aligned; empty once closed.

    Args:
        description: the region as the engine is told of it.
        mapping: its memory.
        locked_bytes: how much of it is locked in memory.
        descriptor: its open file, locked so that no other planner's sweep takes it.
    """

    def __init__(
        self, description: RegionDescription, mapping: RegionMapping, locked_bytes: int, descriptor: int
    ) -> None:
        self.description = description
        self.region_id = description.region_id
        self.set_bytes = description.set_bytes
        self.set_offsets = description.set_offsets
        self.buffer = mapping.buffer
        self.locked_bytes = locked_bytes
        self._mapping = mapping
        self._descriptor: int | None = descriptor

    def unlink(self) -> None:
        """Removes the file's name; what is mapped stays mapped. Idempotent."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        Path(self.description.path).unlink(missing_ok=True)
        os.close(descriptor)

    def close(self) -> None:
        """Removes the file's name and gives the mapping up. Idempotent."""
        self.unlink()
        self.buffer = np.empty(0, dtype=np.uint8)
        self._mapping.close()
        self.locked_bytes = 0


class RegionFolder:
    """The folder of a planner's regions, private to its user and swept of what killed planners left.

    Every region's file is locked (`flock`) by the planner that made it for as long as it has a name, so a file
    that nobody has locked is a dead planner's. Several planners may share a folder.

    Args:
        path: the folder, on a tmpfs; made (mode 0700) if missing.

    Raises:
        RegionFolderError: it cannot be made, is not this user's, or other users can enter it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._require_private()
        self._sweep()

    def allocate(self, region_id: int, num_sets: int, set_bytes: int) -> SharedRegion:
        """Makes a region and maps it.

        Args:
            region_id: its number in its session.
            num_sets: buffer sets it holds.
            set_bytes: size of each, in bytes; rounded up to a multiple of 64.

        Returns:
            The region, all zeros.

        Raises:
            RegionUnavailableError: there is no memory for it, or its file cannot be made.
        """
        set_bytes = -(-set_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        num_bytes = num_sets * set_bytes
        try:
            path, descriptor = self._create_file()
        except OSError as error:
            raise RegionUnavailableError(num_bytes, f"{self.path}: {error.strerror}") from error
        try:
            # In full and now: a sparse file on a full tmpfs would end the process with SIGBUS at some later write.
            os.posix_fallocate(descriptor, 0, num_bytes)
            mapping = RegionMapping(descriptor, num_bytes)
        except (OSError, OverflowError, ValueError) as error:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise RegionUnavailableError(num_bytes, self._explain(error)) from error
        offsets = tuple(range(0, num_bytes, set_bytes))
        description = RegionDescription(region_id, str(path), num_bytes, set_bytes, offsets)
        return SharedRegion(description, mapping, mapping.try_lock(), descriptor)

    def _require_private(self) -> None:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.path.lstat()
        except OSError as error:
            raise RegionFolderError(str(self.path), f"the folder cannot be made ({error.strerror})") from error
        if not stat.S_ISDIR(status.st_mode):
            raise RegionFolderError(str(self.path), "not a folder, or a symbolic link to one")
        if status.st_uid != os.geteuid():
            raise RegionFolderError(str(self.path), f"owned by user {status.st_uid}, not by user {os.geteuid()}")
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise RegionFolderError(str(self.path), f"mode {mode:04o} lets other users in; it must be 0700")
        if not os.access(self.path, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
            raise RegionFolderError(str(self.path), "this user cannot make files there; its mode must be 0700")

    def _create_file(self) -> tuple[Path, int]:
        """Makes an empty file with a new name and locks it."""
        for _ in range(_NAME_ATTEMPTS):
            path = self.path / f"{FILE_PREFIX}{os.getpid()}-{secrets.token_hex(8)}{FILE_SUFFIX}"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            # A planner that starts at this very moment may sweep the file before it is locked: then another one.
            if _try_flock(descriptor) and os.fstat(descriptor).st_nlink:
                return path, descriptor
            os.close(descriptor)
        raise OSError(errno.EAGAIN, f"no file could be locked in {_NAME_ATTEMPTS} attempts")

    def _sweep(self) -> None:
        for path in self.path.glob(f"{FILE_PREFIX}*{FILE_SUFFIX}"):
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:
                continue  # Gone meanwhile, or not a plain file: then it is none of ours.
            try:
                if _try_flock(descriptor):
                    path.unlink(missing_ok=True)
                    _logger.info("swept %s, left by a planner that was killed", path)
            finally:
                os.close(descriptor)

    def _explain(self, error: Exception) -> str:
        status = os.statvfs(self.path)
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return f"{self.path}: {reason} ({status.f_bavail * status.f_frsize} bytes are free there)"


def map_region(path: str, num_bytes: int) -> RegionMapping:
    """Maps a region that another process made.

    Args:
        path: its file.
        num_bytes: its size in bytes.

    Returns:
        The mapping; the file may be unlinked afterwards.

    Raises:
        RegionUnavailableError: the file cannot be opened, has another size, or cannot be mapped.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise RegionUnavailableError(num_bytes, f"{path}: {error.strerror}") from error
    try:
        found = os.fstat(descriptor).st_size
        if found != num_bytes:
            raise RegionUnavailableError(num_bytes, f"{path} has {found} bytes")
        return RegionMapping(descriptor, num_bytes)
    except (OSError, ValueError) as error:
        raise RegionUnavailableError(num_bytes, f"{path}: {error}") from error
    finally:
        os.close(descriptor)


def _try_flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
