"""Replays one plan vector through a session and says where the planner's plans differ from it."""

from collections.abc import Callable, Sequence
from typing import Any

from planner_service.client import (
    ARRAY_NAMES,
    CombinedLabel,
    ForkRequest,
    OutOfPagesError,
    Plan,
    PlanArrays,
    PlannerSession,
    Segment,
)
from tests.conformance.token_pool import TokenPool

PLAN_TIMEOUT_SECONDS = 20.0
PAGE_NUMBERS = ("paged_kv_indices", "slot_mapping")
FORK_KEYS = ("forks_before", "forks_after")

Operation = dict[str, Any]
Vector = dict[str, Any]


def replay_vector(session: PlannerSession, vector: Vector) -> list[str]:
    """Replays a vector; afterwards every stream is dropped and the planner has seen it.

    Args:
        session: freshly opened with the vector's page size and number of pages.
        vector: the file's content.

    Returns:
        What differs at the first operation where anything does, one line each; empty where nothing does.
    """
    return _Replay(session, vector).run()


class _Replay:
    def __init__(self, session: PlannerSession, vector: Vector) -> None:
        self._session = session
        self._vector = vector
        self._pool = TokenPool(vector["page_size"], vector["num_pages"])
        self._labels: dict[str, dict[str, None]] = {}  # every request's labels, in the order of first use
        self._ahead: tuple[Operation, Plan] | None = None
        self._has_forks = any(key in operation for operation in vector["ops"] for key in FORK_KEYS)

    def run(self) -> list[str]:
        handlers: dict[str, Callable[[Operation], list[str]]] = {
            "step": self._step,
            "plan_ahead": self._plan_ahead,
            "run_ahead": self._run_ahead,
            "discard_ahead": self._discard_ahead,
            "remove": self._remove,
            "reset": self._reset,
        }
        for index, operation in enumerate(self._vector["ops"]):
            differences = handlers[operation["op"]](operation)
            if differences:
                return [f"operation {index}, {operation['op']}: {difference}" for difference in differences]
        self._drop_everything()
        return []

    def _step(self, operation: Operation) -> list[str]:
        plan = self._plan(operation)
        expected_error = operation.get("expect_error")
        if plan is None:
            return [] if expected_error else ["OUT_OF_PAGES, and there is room"]
        if expected_error:
            # Streams that share pages after a fork may leave room where the vector's planner had none.
            self._session.discard_from(plan.step_id)
            return [] if self._has_forks else [f"a plan, and {expected_error} is expected"]
        differences = self._compare(plan, operation)
        if operation["then"] == "discard":
            self._session.discard_from(plan.step_id)
            return differences
        return differences or self._run(operation, plan)

    def _plan_ahead(self, operation: Operation) -> list[str]:
        plan = self._plan(operation)
        if plan is None:
            return ["OUT_OF_PAGES, and there is room"]
        self._ahead = (operation, plan)
        return self._compare(plan, operation)

    def _run_ahead(self, _: Operation) -> list[str]:
        assert self._ahead is not None
        ahead, self._ahead = self._ahead, None
        return self._run(*ahead)

    def _discard_ahead(self, _: Operation) -> list[str]:
        if self._ahead is not None:
            self._session.discard_from(self._ahead[1].step_id)
            self._ahead = None
        return []

    def _remove(self, operation: Operation) -> list[str]:
        request = operation["request"]
        self._session.drop(request)
        for label in self._labels.pop(request, ()):
            self._pool.drop((request, label))
        return []

    def _reset(self, operation: Operation) -> list[str]:
        request = operation["request"]
        for label in self._labels.get(request, ()):
            self._session.truncate(request, label, 0)
            self._pool.truncate((request, label), 0)
        return []

    def _plan(self, operation: Operation) -> Plan | None:
        """Plans a step; returns None where pages run out."""
        padding = set(operation["padding"])
        segments = [
            Segment(None if request in padding else request, label, span)
            for request, label, span in operation["segments"]
        ]
        for request, label, _ in segments:
            if request is not None:
                self._note_use(request, label)
        forks = {key: self._build_forks(segments, operation.get(key, ())) for key in FORK_KEYS}
        layout = self._session.build_layout(
            segments,
            combined_labels=[CombinedLabel(name, tuple(sources)) for sources, name in operation["combined"]],
            commit=operation["commit"],
            forks_before=forks["forks_before"],
            forks_after=forks["forks_after"],
        )
        self._session.submit(layout)
        try:
            return self._session.next_plan(PLAN_TIMEOUT_SECONDS)
        except OutOfPagesError:
            return None

    def _build_forks(self, segments: Sequence[Segment], pairs: Sequence[tuple[str, str]]) -> list[ForkRequest]:
        requests = list(dict.fromkeys(str(segment.request) for segment in segments if segment.request is not None))
        forks = [ForkRequest(request, source, target) for source, target in pairs for request in requests]
        for fork in forks:
            self._note_use(fork.request, fork.source)
            self._note_use(fork.request, fork.target)
        return forks

    def _note_use(self, request: Any, label: str) -> None:
        self._labels.setdefault(request, {})[label] = None

    def _compare(self, plan: Plan, operation: Operation) -> list[str]:
        expected_labels = operation["expect"]
        names = [label["name"] for label in expected_labels]
        if list(plan.labels) != names:
            return [f"plan labels {list(plan.labels)}, expected {names}"]
        return [
            difference
            for expected in expected_labels
            for difference in self._compare_arrays(plan.labels[expected["name"]], expected)
        ]

    def _compare_arrays(self, arrays: PlanArrays, expected: dict[str, Any]) -> list[str]:
        differences = []
        rows = [None if row is None else list(row) for row in arrays.rows]
        if rows != expected["rows"]:
            differences.append(f"{arrays.name}: rows {rows}, expected {expected['rows']}")
        for name in ARRAY_NAMES:
            if name in PAGE_NUMBERS and not self._vector["exact"]:
                continue
            values = getattr(arrays, name).tolist()
            if values != expected[name]:
                differences.append(f"{arrays.name}: {name} {values}, expected {expected[name]}")
        return differences

    def _run(self, operation: Operation, plan: Plan) -> list[str]:
        forks = {
            key: [
                ((fork.request, fork.source), fork.target_key())
                for fork in self._build_forks([Segment(*row) for row in self._real_rows(operation)], pairs)
            ]
            for key, pairs in ((key, operation.get(key, ())) for key in FORK_KEYS)
        }
        self._pool.fork(forks["forks_before"])
        self._pool.copy_pages(plan.page_copies_before)
        faults = self._pool.run(plan.labels.values(), keep=operation["commit"])
        self._pool.fork(forks["forks_after"])
        self._pool.copy_pages(plan.page_copies_after)
        self._session.commit(plan.step_id)
        self._session.release(plan.step_id)
        return faults

    def _real_rows(self, operation: Operation) -> list[tuple[str, str, int]]:
        return [row for row in operation["segments"] if row[0] not in operation["padding"]]

    def _drop_everything(self) -> None:
        for request in self._labels:
            self._session.drop(request)
        # Parts of messages are applied in order: once this step has its plan, the drops have been applied.
        step = self._session.submit(self._session.build_layout([Segment(None, "main")])).start
        self._session.next_plan(PLAN_TIMEOUT_SECONDS)
        self._session.commit(step)
        self._session.release(step)
        self._session.flush()
