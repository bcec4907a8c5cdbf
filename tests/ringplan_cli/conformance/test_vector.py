"""Vector files: what the format allows is read, and everything else is refused with its place."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringplan_cli.conformance.vector import ExpectedLabel, Remove, Step, Vector, VectorError, read_vector

VECTORS = Path(__file__).parents[2] / "vectors"
Document = dict[str, Any]
DECODE: Document = {"op": "step", "segments": [["a", "main", 1]]}
EXPECTED = {
    "name": "main",
    "rows": [["a", "main"]],
    "qo_indptr": [0, 1],
    "paged_kv_indptr": [0, 1],
    "paged_kv_indices": [1],
    "paged_kv_last_page_len": [1],
    "kv_lens": [1],
    "slot_mapping": [4],
    "positions": [0],
}
KEEP: Document = {"op": "plan_ahead", "segments": [["a", "main", 1]]}


def _write(folder: Path, *operations: Document, **changes: object) -> Path:
    path = folder / "vector.json"
    document = {"name": "v", "page_size": 4, "num_pages": 8, "exact": True, "ops": operations, **changes}
    path.write_text(json.dumps(document))
    return path


def test_operations_are_read_with_their_defaults(tmp_path: Path) -> None:
    """Only what a step plans must be written: the rest is a step that is kept and says nothing of its plan."""
    vector = read_vector(_write(tmp_path, DECODE, {"op": "remove", "request": "a"}))
    step, remove = vector.ops
    assert isinstance(step, Step)
    assert (step.then, step.commit, step.expect, step.expect_error, step.combined) == ("commit", True, None, None, ())
    assert remove == Remove(op="remove", request="a")
    assert (vector.note, vector.tags) == ("", ())


def test_padding_rows_have_no_request(tmp_path: Path) -> None:
    """A segment whose request is in `padding` is a padding row; the request is none that exists."""
    step = read_vector(_write(tmp_path, {**DECODE, "padding": ["p"], "segments": [["p", "main", 2], ["a", "cfg", 1]]}))
    (operation,) = step.ops
    assert isinstance(operation, Step)
    assert operation.rows == ((None, "main", 2), ("a", "cfg", 1))
    assert operation.requests == ("a",)


def test_forks_bring_streams_of_every_real_request(tmp_path: Path) -> None:
    """A session must have room for the targets of forks too."""
    step = {**DECODE, "segments": [["a", "main", 1], ["b", "main", 1]], "forks_before": [["main", "cfg"]]}
    assert read_vector(_write(tmp_path, step)).num_streams == 4


def test_further_keys_of_the_file_are_notes(tmp_path: Path) -> None:
    """Captures carry what went wrong beside what must come out."""
    assert read_vector(_write(tmp_path, DECODE, mismatches=[1], cached={})).name == "v"


def _set(*path_and_value: Any) -> Callable[[Document], None]:
    *path, key, value = path_and_value

    def change(document: Document) -> None:
        place: Any = document
        for step in path:
            place = place[step]
        place[key] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("page_size", 0), "page_size: Input should be greater than or equal to 1 (got 0)"),
        (_set("num_pages", 4.5), "num_pages: Input should be a valid integer (got 4.5)"),
        (_set("exact", 1), "exact: Input should be a valid boolean (got 1)"),
        (_set("ops", 0, "op", "jump"), "ops[0]: Input tag 'jump'"),
        (_set("ops", 0, "segments", []), "ops[0].segments: "),
        (_set("ops", 0, "segments", 0, 2, "1"), "ops[0].segments[0][2]: Input should be a valid integer (got '1')"),
        (_set("ops", 0, "segments", 0, ["a", "main"]), "ops[0].segments[0][2]: Field required"),
        (_set("ops", 0, "fork_before", []), "ops[0].fork_before: Extra inputs are not permitted"),
        (_set("ops", 0, "then", "maybe"), "ops[0].then: "),
        (_set("ops", 0, "expect", 0, "kv_lens", 1), "ops[0].expect[0].kv_lens: "),
        (_set("ops", 0, "expect", 0, "rows", 0, ["a"]), "ops[0].expect[0].rows[0][1]: Field required"),
        (_set("ops", 0, "expect_error", "OUT_OF_PAGES"), "ops[0]: expect and expect_error exclude each other"),
        (_set("ops", 1, {"op": "run_ahead"}), "ops[1], run_ahead: no step is kept"),
        (_set("ops", 1, {"op": "remove"}), "ops[1].request: Field required"),
        (_set("ops", 0), "ops: "),
        (_set("ops", 0, []), "ops[0]: "),
    ],
)
def test_file_that_breaks_the_format_is_refused_with_the_place(
    tmp_path: Path, change: Callable[[Document], None], message: str
) -> None:
    """A wrong value, a missing key, a key too many: the message names the place and the rule, in one line."""
    path = _write(tmp_path, {**DECODE, "expect": [EXPECTED]}, {"op": "discard_ahead"})
    read_vector(path)
    document = copy.deepcopy(json.loads(path.read_text()))
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(VectorError) as error:
        read_vector(path)
    assert str(error.value).startswith(f"{path}: no plan vector: {message}")
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("operations", "message"),
    [
        ([KEEP, DECODE], "ops[1], step: the step kept by ops[0] is neither run nor discarded"),
        ([KEEP, KEEP], "ops[1], plan_ahead: the step kept by ops[0]"),
        ([KEEP, {"op": "run_ahead"}, {"op": "run_ahead"}], "ops[2], run_ahead: no step is kept"),
        (
            [KEEP, {"op": "reset", "request": "a"}, {"op": "run_ahead"}],
            "ops[2], run_ahead: request 'a' was removed or reset since the step was planned",
        ),
        ([{**KEEP, "expect_error": "OUT_OF_PAGES"}, {"op": "run_ahead"}], "ops[1], run_ahead: no step is kept"),
    ],
)
def test_kept_step_is_run_or_discarded_before_the_next(
    tmp_path: Path, operations: list[Document], message: str
) -> None:
    """One step is kept at a time, and one whose streams have changed since cannot be run."""
    with pytest.raises(VectorError) as error:
        read_vector(_write(tmp_path, *operations))
    assert f"no plan vector: {message}" in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"7", b'"\\ud800"', b"\xff\xfe", b"[" * 100_000])
def test_file_that_is_no_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    """Whatever stands in the file, there is one clear line and no traceback."""
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(VectorError, match="no plan vector"):
        read_vector(path)


def test_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """A missing file and a folder say why."""
    with pytest.raises(VectorError, match=r"none\.json: cannot be read: No such file or directory"):
        read_vector(tmp_path / "none.json")
    with pytest.raises(VectorError, match="cannot be read: Is a directory"):
        read_vector(tmp_path)


@pytest.mark.parametrize("path", sorted(VECTORS.glob("*.json")), ids=lambda path: path.stem)
def test_handed_vectors_keep_to_the_format(path: Path) -> None:
    """Every file of the tests is read, and says what each of its plans must hold."""
    vector = read_vector(path)
    assert vector.name == path.stem


def test_documentation_names_every_key() -> None:
    """Who writes a vector by docs/conformance.md can use all that the format has."""
    text = (Path(__file__).parents[3] / "docs" / "conformance.md").read_text()
    for model in (Vector, Step, ExpectedLabel, Remove):
        for key in model.model_fields:
            assert f"`{key}`" in text
