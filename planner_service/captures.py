"""The folder that mismatch captures are written to."""

import json
import logging
from pathlib import Path

from planner_service.core.capture import DRILL_TAG
from planner_service.core.plan import CaptureDocument

_logger = logging.getLogger(__name__)


class CaptureFolder:
    """Writes captures as plan vectors, which `ringplan conformance` replays.

    Args:
        path: the folder; made when the first capture is written.
        max_captures: how many are written at most; drills leave half of them to mismatches that nobody made.
    """

    def __init__(self, path: Path, max_captures: int) -> None:
        self._path = path
        self._num_left = max_captures
        self._num_kept_from_drills = max_captures // 2

    @property
    def path(self) -> Path:
        """The folder."""
        return self._path

    def has_room(self, *, for_drill: bool = False) -> bool:
        """Whether another capture may be written."""
        return self._num_left > (self._num_kept_from_drills if for_drill else 0)

    def try_write(self, session: str, capture: CaptureDocument) -> Path | None:
        """Writes one capture; planning goes on whatever happens.

        Args:
            session: the session's name.
            capture: the plan vector.

        Returns:
            The file, or None if there were enough already or the folder cannot be written to (which is logged).
        """
        if not self.has_room(for_drill=DRILL_TAG in capture["tags"]):
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
