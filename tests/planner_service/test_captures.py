"""The folder of captures: written, bounded, and never in the way of planning."""

import json
from pathlib import Path

from planner_service.captures import CaptureFolder

CAPTURE = {"name": "capture", "ops": []}


def test_a_capture_is_written_whole_in_a_folder_made_for_it(tmp_path: Path) -> None:
    """The folder is private and made when needed; the file holds the capture."""
    folder = CaptureFolder(tmp_path / "a" / "captures", max_captures=2)
    file = folder.try_write("session-1", CAPTURE)
    assert file is not None
    assert json.loads(file.read_text()) == CAPTURE
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_captures_never_replace_each_other_and_end_at_the_limit(tmp_path: Path) -> None:
    """Each has a name of its own, also beside those of an earlier planner; no more are written than may be."""
    first = CaptureFolder(tmp_path, max_captures=1)
    second = CaptureFolder(tmp_path, max_captures=1)
    assert not first.is_full
    files = [folder.try_write("session-1", CAPTURE) for folder in (first, first, second)]
    assert first.is_full
    assert [file.name if file else None for file in files] == [
        "mismatch-session-1-1.json",
        None,
        "mismatch-session-1-2.json",
    ]


def test_a_folder_that_cannot_be_written_to_is_logged_and_harms_nobody(tmp_path: Path) -> None:
    """Planning goes on without the capture."""
    (tmp_path / "file").write_text("")
    assert CaptureFolder(tmp_path / "file" / "captures", max_captures=1).try_write("session-1", CAPTURE) is None
