"""`ringplan conformance` as people and scripts run it: real processes, exit statuses, one line a file."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.planner_process import PlannerProcess

VECTORS = Path(__file__).parent.parent / "vectors"
SOME = sorted(VECTORS.glob("11*.json"))


def _run(*arguments: object, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ringplan_cli", "conformance", *map(str, arguments)]
    environment = os.environ | ({} if folder is None else {"TMPDIR": str(folder)})
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def _change_slot(folder: Path) -> tuple[Path, int]:
    """Writes a vector with one changed number, a slot of its third step; returns its file and the number as it was."""
    document: dict[str, Any] = json.loads((VECTORS / "110_preplan_promoted.json").read_text())
    slots = document["ops"][2]["expect"][0]["slot_mapping"]
    slots[1] += 1
    path = folder / "changed.json"
    path.write_text(json.dumps(document))
    return path, slots[1] - 1


def test_all_vectors_pass_against_a_planner_of_its_own(short_folder: Path) -> None:
    """Without a socket it starts a planner, prints one line a file, and leaves nothing behind."""
    result = _run(VECTORS, "--cache", "on", "--ahead", "4", "--ring-depth", "3", folder=short_folder)
    assert (result.returncode, result.stderr) == (0, "71 of 71 vectors passed\n")
    lines = result.stdout.splitlines()
    assert len(lines) == 71
    # Three prefills and the first decode are planned from scratch, as nothing is cached yet.
    assert lines[0] == f"{VECTORS}/002_three_rows_crossings.json: ok (17 plans: 4 full, 13 cached)"
    assert not list(short_folder.iterdir())


def test_changed_number_fails_its_file_alone(planner_process: PlannerProcess, tmp_path: Path) -> None:
    """Exit status 1, the difference in one line, and the files after it are replayed all the same."""
    changed, slot = _change_slot(tmp_path)
    result = _run(changed, *SOME, "--socket", planner_process.socket)
    assert (result.returncode, result.stderr) == (1, f"{len(SOME)} of {len(SOME) + 1} vectors passed\n")
    lines = result.stdout.splitlines()
    assert lines[0] == f"{changed} / op 2 step / main / slot_mapping / 1 / want {slot + 1} / got {slot}"
    assert [line.split(":")[0] for line in lines[1:]] == [str(path) for path in SOME]
    assert not planner_process.list_sessions()


def test_json_is_one_document(planner_process: PlannerProcess, tmp_path: Path) -> None:
    """A script reads what was replayed, how, and the first difference of each file."""
    changed, slot = _change_slot(tmp_path)
    result = _run(changed, SOME[0], "--json", "--cache", "2", "--socket", planner_process.target)
    assert (result.returncode, result.stderr) == (1, "")
    document = json.loads(result.stdout)
    files = document.pop("files")
    assert document == {"cache": "verify", "ring_depth": None, "ahead": 1, "num_files": 2, "num_passed": 1}
    assert [file["passed"] for file in files] == [False, True]
    assert files[0]["file"] == str(changed)
    assert files[0]["difference"] == {
        "op": 2,
        "kind": "step",
        "label": "main",
        "array": "slot_mapping",
        "index": 1,
        "want": slot + 1,
        "got": slot,
    }
    assert files[1]["difference"] is None
    assert files[1]["num_plans"]["verified"] > 0
