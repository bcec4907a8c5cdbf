"""The folder of captures: written, bounded, and never in the way of planning."""

import json
from pathlib import Path

from planner_service.captures import CaptureFolder

CAPTURE = {"name": "capture", "tags": ["capture"], "ops": []}
DRILL = {**CAPTURE, "tags": ["capture", "drill"]}


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
    assert first.has_room()
    files = [folder.try_write("session-1", CAPTURE) for folder in (first, first, second)]
    assert not first.has_room()
    assert [file.name if file else None for file in files] == [
        "mismatch-session-1-1.json",
        None,
        "mismatch-session-1-2.json",
    ]


def test_drills_leave_room_for_mismatches_that_nobody_made(tmp_path: Path) -> None:
    """However often the alert is tried out, half of the captures are there when it is no drill."""
    folder = CaptureFolder(tmp_path, max_captures=5)
    written = [folder.try_write("session-1", capture) is not None for capture in (*[DRILL] * 4, *[CAPTURE] * 3)]
    assert written == [True, True, True, False, True, True, False]


def test_room_for_drills_ends_before_the_folder_is_full(tmp_path: Path) -> None:
    """A drill can be told beforehand that it leaves no capture; the only one there is may be a drill's."""
    folder = CaptureFolder(tmp_path, max_captures=2)
    assert folder.has_room(for_drill=True)
    folder.try_write("session-1", CAPTURE)
    assert not folder.has_room(for_drill=True)
    assert folder.has_room()
    assert CaptureFolder(tmp_path, max_captures=1).has_room(for_drill=True)


def test_a_folder_that_cannot_be_written_to_is_logged_and_harms_nobody(tmp_path: Path) -> None:
    """Planning goes on without the capture."""
    (tmp_path / "file").write_text("")
    assert CaptureFolder(tmp_path / "file" / "captures", max_captures=1).try_write("session-1", CAPTURE) is None
