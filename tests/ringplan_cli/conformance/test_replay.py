"""Replays: runs of equal steps are planned at once, and whatever a planner does wrong is found where it is."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner_service.client import CacheMode, Plan, PlanArrays, PlannerClient, PlannerSession
from planner_service.core.cache import CacheEntry
from planner_service.errors import LayoutError
from ringplan_cli.conformance.difference import Difference
from ringplan_cli.conformance.replay import Replay, build_runs, name_error
from ringplan_cli.conformance.suite import Suite, SuiteOptions
from ringplan_cli.conformance.vector import Step, Vector, read_vector
from ringplan_cli.planner_inspector import PlannerInspector
from tests.planner_service.planner_thread import PlannerThread

VECTORS = Path(__file__).parents[2] / "vectors"
DOCUMENTATION = Path(__file__).parents[3] / "docs" / "conformance.md"
Document = dict[str, Any]
DECODE: Document = {"op": "step", "segments": [["a", "main", 1], ["p", "main", 1]], "padding": ["p"]}


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlannerThread]:
    """A planner in this process, so that tests can break it."""
    thread = PlannerThread(tmp_path_factory.mktemp("p"), max_sessions=64)
    yield thread
    thread.stop()


@pytest.fixture(scope="module")
def client(planner: PlannerThread) -> Iterator[PlannerClient]:
    """A connection to it."""
    with PlannerClient(f"unix:{planner.socket}") as client:
        yield client


def _read(name: str) -> Document:
    (path,) = VECTORS.glob(f"{name}*.json")
    document: Document = json.loads(path.read_text())
    return document


def _parse(document: Document) -> Vector:
    return Vector.model_validate_json(json.dumps(document))


def _build(*operations: Document, exact: bool = True, num_pages: int = 8) -> Vector:
    return _parse({"name": "v", "page_size": 4, "num_pages": num_pages, "exact": exact, "ops": operations})


def _open(client: PlannerClient, vector: Vector, cache_mode: CacheMode = CacheMode.OFF) -> PlannerSession:
    return client.open_session(
        page_size=vector.page_size,
        num_pages=vector.num_pages,
        max_streams=max(1, vector.num_streams),
        cache_mode=cache_mode,
    )


def _replay(client: PlannerClient, vector: Vector, ahead: int = 1) -> Difference | None:
    with _open(client, vector) as session:
        return Replay(session, vector, ahead).run()


@pytest.mark.parametrize(
    ("operations", "runs"),
    [
        ([DECODE] * 5, [(0, 3), (3, 5)]),
        ([DECODE, {**DECODE, "segments": [["a", "main", 1], ["q", "main", 1]], "padding": ["q"]}], [(0, 2)]),
        ([DECODE, {**DECODE, "padding": []}], [(0, 1), (1, 2)]),
        ([DECODE, {**DECODE, "segments": DECODE["segments"][:1]}], [(0, 1), (1, 2)]),
        ([DECODE, {**DECODE, "combined": [[["main"], "x"]]}], [(0, 1), (1, 2)]),
        ([{**DECODE, "then": "discard"}] * 2, [(0, 1), (1, 2)]),
        ([{**DECODE, "commit": False}] * 2, [(0, 1), (1, 2)]),
        ([{**DECODE, "forks_after": [["main", "cfg"]]}] * 2, [(0, 1), (1, 2)]),
        ([{**DECODE, "expect_error": "OUT_OF_PAGES"}] * 2, [(0, 1), (1, 2)]),
        ([{**DECODE, "segments": [["a", "main", 2]]}] * 2, [(0, 1), (1, 2)]),
        ([DECODE, {"op": "reset", "request": "b"}, DECODE], [(0, 1), (1, 2), (2, 3)]),
        ([DECODE, {**DECODE, "op": "plan_ahead"}], [(0, 1), (1, 2)]),
    ],
)
def test_only_equal_consecutive_kept_decode_steps_are_planned_at_once(
    operations: list[Document], runs: list[tuple[int, int]]
) -> None:
    """Padding rows may change their names; everything else that changes ends the run, as do other operations."""
    assert [(run.start, run.stop) for run in build_runs(_build(*operations).ops, 3)] == runs


def test_every_layout_error_has_the_wire_s_name() -> None:
    """A file names errors as the wire does."""
    names = {error.__name__: name_error(error.__new__(error)) for error in LayoutError.__subclasses__()}
    assert names == {
        "OutOfPagesError": "OUT_OF_PAGES",
        "InvalidLayoutError": "INVALID_LAYOUT",
        "UnknownStreamError": "UNKNOWN_STREAM",
        "RingTimeoutError": "RING_TIMEOUT",
        "RegionUnavailableError": "REGION_UNAVAILABLE",
    }


def _list_changes(document: Document) -> Iterator[tuple[int, str, str, Callable[[Document], None]]]:
    """Yields a change of the last number of each array: operation, plan label, array, and what makes the change."""
    for op, operation in enumerate(document["ops"]):
        for i, label in enumerate(operation.get("expect") or ()):
            for array, values in label.items():
                if array in ("name", "rows") or not values:
                    continue

                def change(changed: Document, op: int = op, i: int = i, array: str = array) -> None:
                    changed["ops"][op]["expect"][i][array][-1] += 1

                yield op, label["name"], array, change


@pytest.mark.parametrize(
    ("name", "ahead"),
    [("035_combined_source_order", 1), ("047_labels2_pad_only_cfg", 4), ("115_preplan_fork_promoted", 1)],
)
def test_one_changed_number_is_found_where_it_is(client: PlannerClient, name: str, ahead: int) -> None:
    """In every array of every plan label of every step; in a file that is not exact, page numbers are left out."""
    document = _read(name)
    assert _replay(client, _parse(document), ahead) is None
    for op, label, array, change in _list_changes(document):
        if not document["exact"] and array in ("paged_kv_indices", "slot_mapping"):
            continue
        changed = json.loads(json.dumps(document))
        change(changed)
        found = _replay(client, _parse(changed), ahead)
        assert found is not None
        assert (found.op, found.label, found.array, found.want) == (op, label, array, found.got + 1)


@pytest.mark.parametrize(
    ("change", "array"),
    [
        (lambda label: label["rows"].reverse(), "rows"),
        (lambda label: label["rows"].append(None), "rows"),
        (lambda label: label.update(name="other"), "plan_labels"),
        (lambda label: label["kv_lens"].pop(), "kv_lens"),
    ],
)
def test_changed_row_name_and_length_are_found(
    client: PlannerClient, change: Callable[[Document], None], array: str
) -> None:
    """What a plan is about counts as much as its numbers."""
    document = _read("031_combined3")
    op = next(op for op, step in enumerate(document["ops"]) if step["combined"])
    change(document["ops"][op]["expect"][0])
    found = _replay(client, _parse(document))
    assert found is not None
    assert (found.op, found.kind, found.array) == (op, "step", array)


def test_expected_error_that_is_left_out_is_found(client: PlannerClient) -> None:
    """A refusal that no vector speaks of is a difference, with the planner's reason."""
    document = _read("136_exact_fit")
    op = next(op for op, step in enumerate(document["ops"]) if "expect_error" in step)
    del document["ops"][op]["expect_error"]
    found = _replay(client, _parse(document))
    assert found is not None
    assert (found.op, found.array, found.want) == (op, "plan", "a plan")
    assert found.got.startswith("OUT_OF_PAGES (")


def test_expected_error_that_does_not_come_is_found(client: PlannerClient) -> None:
    """Where there must be no room, a plan is a difference."""
    found = _replay(client, _build({**DECODE, "expect_error": "OUT_OF_PAGES"}))
    assert found == Difference("plan", None, "OUT_OF_PAGES", "a plan", op=0, kind="step")


@pytest.mark.parametrize("kind", ["step", "plan_ahead"])
def test_layout_that_breaks_a_rule_is_refused_with_its_reason(client: PlannerClient, kind: str) -> None:
    """A file may hold layouts that must be refused: nothing has changed then."""
    twice = {"op": kind, "segments": [["a", "main", 1], ["a", "main", 1]], "expect_error": "INVALID_LAYOUT"}
    assert _replay(client, _build(twice, DECODE)) is None
    found = _replay(client, _build({**twice, "expect_error": "OUT_OF_PAGES"}))
    assert found is not None
    assert found.got.startswith("INVALID_LAYOUT (")


def test_example_of_the_documentation_passes(client: PlannerClient) -> None:
    """What docs/conformance.md shows as a vector is one, and its plans are right."""
    (example,) = re.findall(r"```json\n(.*?)```", DOCUMENTATION.read_text(), re.DOTALL)
    vector = Vector.model_validate_json(example)
    assert any(isinstance(step, Step) and step.expect is not None for step in vector.ops)
    assert _replay(client, vector) is None


def test_step_without_expectation_is_only_planned_and_run(client: PlannerClient) -> None:
    """A file may leave open what a plan holds; that it is consistent is looked at nevertheless."""
    document = _read("052_mixed_pad_standalone")
    for operation in document["ops"]:
        operation.pop("expect", None)
    assert _replay(client, _parse(document)) is None


class _BrokenSession:
    """Hands a session's plans on, some of them changed: a planner that is wrong in one way.

    Args:
        session: the session.
        change: returns the plan to hand on.
    """

    def __init__(self, session: PlannerSession, change: Callable[[Plan], Plan]) -> None:
        self._session = session
        self._change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def next_plan(self, timeout_seconds: float | None = None) -> Plan:
        """Returns the session's next plan, changed."""
        return self._change(self._session.next_plan(timeout_seconds))


def _replay_broken(client: PlannerClient, vector: Vector, change: Callable[[Plan], Plan]) -> Difference | None:
    with _open(client, vector) as session:
        return Replay(_BrokenSession(session, change), vector).run()  # type: ignore[arg-type]


def _put_on_page(arrays: PlanArrays, page: int) -> PlanArrays:
    """Returns the arrays with their first page replaced, and the slots with it."""
    old = int(arrays.paged_kv_indices[0])
    indices = np.where(arrays.paged_kv_indices == old, page, arrays.paged_kv_indices)
    slots = arrays.slot_mapping + 4 * (page - old) * (arrays.slot_mapping // 4 == old)
    return dataclasses.replace(arrays, paged_kv_indices=indices.astype(np.int32), slot_mapping=slots.astype(np.int32))


def test_forgotten_page_copy_is_found_when_the_target_is_read(client: PlannerClient) -> None:
    """Every compared array of a fork may be right and its target still hold nothing."""
    nothing = np.zeros((0, 2), dtype=np.int32)
    found = _replay_broken(
        client,
        _parse(_read("100_pre_fork")),
        lambda plan: dataclasses.replace(plan, page_copies_before=nothing),
    )
    assert found is not None
    assert (found.op, found.label, found.array) == (2, "cfg", "paged_kv_indices")
    assert found.got.endswith("with nothing there")


@pytest.mark.parametrize("has_later_reader", [True, False])
def test_page_handed_out_twice_is_found_when_its_first_owner_reads(
    client: PlannerClient, has_later_reader: bool
) -> None:
    """In a file that is not exact, too: at the next step of the stream, or at the end, where every stream is read."""
    steps: list[Document] = [{"op": "step", "segments": [[request, "main", 3]]} for request in ("a", "b")]
    if has_later_reader:
        steps.append({"op": "step", "segments": [["a", "main", 1]]})

    def share_page(plan: Plan) -> Plan:
        arrays = plan.labels["main"]
        if arrays.rows != (("b", "main"),):
            return plan
        return dataclasses.replace(plan, labels={"main": _put_on_page(arrays, 1)})

    found = _replay_broken(client, _build(*steps, exact=False), share_page)
    assert found is not None
    assert (found.op, found.kind) == ((2, "step") if has_later_reader else (None, "end"))
    assert found.want == "the page with token 0 of a.main"
    assert found.got == "page 1, with token 0 of b.main there"


@pytest.mark.parametrize("exact", [True, False])
def test_refusal_that_sharing_makes_needless_is_allowed_where_page_numbers_are_free(
    client: PlannerClient, exact: bool
) -> None:
    """A planner whose forks copy every page runs out earlier than one whose forks share them."""
    vector = _build(
        {"op": "step", "segments": [["a", "main", 8]]},
        {"op": "step", "segments": [["a", "main", 1]], "forks_before": [["main", "cfg"]]},
        {"op": "step", "segments": [["a", "cfg", 1]], "expect_error": "OUT_OF_PAGES"},
        exact=exact,
    )
    found = _replay(client, vector)
    assert found == (Difference("plan", None, "OUT_OF_PAGES", "a plan", op=2, kind="step") if exact else None)


def test_lost_session_is_a_difference(client: PlannerClient) -> None:
    """A planner that ends the session in the middle of a file fails that file, and says why."""
    vector = _build(DECODE, DECODE)
    with _open(client, vector) as session:

        def lose(plan: Plan) -> Plan:
            session.close()
            return plan

        found = Replay(_BrokenSession(session, lose), vector).run()  # type: ignore[arg-type]
    assert found is not None
    assert (found.op, found.array, found.want) == (1, "session", "an answer")


@pytest.fixture
def wrong_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner whose cached plans are wrong from the second hit on."""
    advance = CacheEntry.advance

    def advance_wrongly(entry: CacheEntry, *arguments: Any) -> None:
        advance(entry, *arguments)
        if entry.num_steps > 1:
            entry._fixed[0] += 1

    monkeypatch.setattr(CacheEntry, "advance", advance_wrongly)


@pytest.mark.usefixtures("wrong_cache")
def test_wrong_cached_plan_is_found_in_the_modes_on_and_verify(planner: PlannerThread, client: PlannerClient) -> None:
    """`on` serves it, so an array differs; `verify` serves the right one, and the planner says it had a mismatch."""
    path = VECTORS / "004_page16_40_steps.json"
    vector = read_vector(path)
    with PlannerInspector(f"unix:{planner.socket}") as inspector:
        results = {
            mode: Suite(client, inspector, SuiteOptions(mode)).replay(path, vector).difference for mode in CacheMode
        }
    assert results[CacheMode.OFF] is None
    served, verified = results[CacheMode.ON], results[CacheMode.VERIFY]
    assert served is not None
    assert verified is not None
    assert (served.array, served.index, served.want, served.got) == ("qo_indptr", 0, 0, 1)
    assert (verified.kind, verified.array, verified.want) == ("end", "num_cache_mismatches", 0)


def test_capture_of_a_mismatch_is_a_vector(
    client: PlannerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """What the verify mode writes is replayed: a sound planner passes, and the wrong plan it recorded does not."""
    request.getfixturevalue("wrong_cache")
    vector = read_vector(VECTORS / "046_labels2_pad_by_label.json")
    wrong_planner = PlannerThread(tmp_path)
    try:
        with (
            PlannerClient(f"unix:{wrong_planner.socket}") as wrong_client,
            _open(wrong_client, vector, CacheMode.VERIFY) as session,
        ):
            assert Replay(session, vector).run() is None
        capture = min(wrong_planner.captures.glob("*.json"))
    finally:
        wrong_planner.stop()
    monkeypatch.undo()
    assert _replay(client, read_vector(capture)) is None
    assert _replay(client, read_vector(capture), ahead=4) is None
    document = json.loads(capture.read_text())
    document["ops"][-1]["expect"] = document["cached"]
    found = _replay(client, _parse(document))
    assert found is not None
    assert (found.op, found.array, found.index) == (len(document["ops"]) - 1, "qo_indptr", 0)
