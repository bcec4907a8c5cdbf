"""The folder that mismatch captures are written to."""

import json
import logging
from pathlib import Path

from planner_service.core.plan import CaptureDocument

_logger = logging.getLogger(__name__)


class CaptureFolder:
    """Writes captures as plan vectors, which `ringplan conformance` replays.

    Args:
        path: the folder; made when the first capture is written.
        max_captures: how many are written at most.
    """

    def __init__(self, path: Path, max_captures: int) -> None:
        self._path = path
        self._num_left = max_captures

    @property
    def path(self) -> Path:
        """The folder."""
        return self._path

    @property
    def is_full(self) -> bool:
        """Whether as many captures as may be are written."""
        return not self._num_left

    def try_write(self, session: str, capture: CaptureDocument) -> Path | None:
        """Writes one capture; planning goes on whatever happens.

        Args:
            session: the session's name.
            capture: the plan vector.

        Returns:
            The file, or None if there were enough already or the folder cannot be written to (which is logged).
        """
        if self.is_full:
            return None
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = self._find_free_name(session)
            file.write_text(json.dumps(capture))
        except OSError as error:
            _logger.error("no capture of the mismatch was written: %s", error)
            return None
        self._num_left -= 1
        _logger.error("the mismatch can be replayed: ringplan conformance %s --cache verify", file)
        return file

    def _find_free_name(self, session: str) -> Path:
        number = 1
        while (file := self._path / f"mismatch-{session}-{number}.json").exists():
            number += 1
        return file
