"""Replays one plan vector through a session, as an engine would run it, and finds the first difference."""

import dataclasses
from collections.abc import Sequence

from planner_service.client import (
    MAX_REPEAT,
    CombinedLabel,
    ForkRequest,
    LayoutError,
    Plan,
    PlannerSession,
    PlanSource,
    ProtocolError,
    Segment,
    SessionLostError,
)
from planner_service.wire import REASON_BY_LAYOUT_ERROR
from ringplan.planner.v1 import planner_pb2
from ringplan_cli.conformance.difference import Difference, find_difference
from ringplan_cli.conformance.token_pool import StreamKey, TokenPool
from ringplan_cli.conformance.vector import (
    DiscardAhead,
    Operation,
    PlanAhead,
    PlannedStep,
    Remove,
    Reset,
    RunAhead,
    Step,
    Vector,
)

MAX_AHEAD = MAX_REPEAT
PLAN_TIMEOUT_SECONDS = 20.0
A_PLAN = "a plan"


class _FoundError(Exception):
    """Raised within a replay where something differs; it ends the replay."""

    def __init__(self, difference: Difference) -> None:
        self.difference = difference


class Replay:
    """Replays a vector; afterwards every stream is dropped and the planner has seen it.

    Args:
        session: freshly opened with the vector's page size and number of pages.
        vector: the file's content.
        ahead: how many equal, consecutive decode steps are planned at once, 1 to 1,024.

    Attributes:
        num_plans: the plans of the file's steps so far, by how they came to be.
    """

    def __init__(self, session: PlannerSession, vector: Vector, ahead: int = 1) -> None:
        self.num_plans = dict.fromkeys(PlanSource, 0)
        self._session = session
        self._vector = vector
        self._ahead = ahead
        self._pool = TokenPool(vector.page_size, vector.num_pages)
        self._labels: dict[str, dict[str, None]] = {}  # every request's labels, in the order of first use
        self._kept: tuple[PlannedStep, Plan] | None = None
        self._op: int | None = None

    def run(self) -> Difference | None:
        """Replays the vector; returns the first difference, or None if the planner does what the file says."""
        try:
            for run in build_runs(self._vector.ops, self._ahead):
                self._op = run.start
                self._do(run)
            self._op = None
            self._read_everything()
            self._drop_everything()
        except _FoundError as found:
            return self._place(found.difference)
        except (SessionLostError, ProtocolError, TimeoutError) as error:
            return self._place(Difference("session", None, "an answer", str(error)))
        return None

    def _place(self, difference: Difference) -> Difference:
        kind = "end" if self._op is None else self._vector.ops[self._op].op
        return dataclasses.replace(difference, op=self._op, kind=kind)

    def _do(self, run: range) -> None:
        operation = self._vector.ops[run.start]
        if isinstance(operation, Step):
            self._step(operation, run)
        elif isinstance(operation, PlanAhead):
            plan = self._plan(operation)
            self._kept = None if plan is None else (operation, plan)
        elif isinstance(operation, RunAhead):
            assert self._kept is not None
            kept, self._kept = self._kept, None
            self._execute(*kept)
        elif isinstance(operation, DiscardAhead):
            self._discard_kept()
        elif isinstance(operation, Remove):
            self._remove(operation.request)
        elif isinstance(operation, Reset):
            self._reset(operation.request)

    def _step(self, step: Step, run: range) -> None:
        if len(run) > 1:
            self._plan_run(step, run)
            return
        plan = self._plan(step)
        if plan is None:
            return
        if step.then == "discard":
            self._session.discard_from(plan.step_id)
        else:
            self._execute(step, plan)

    def _plan_run(self, first: Step, run: range) -> None:
        """Plans equal steps at once and then runs them one after the other."""
        refusal = self._submit(first, repeat=len(run))
        for self._op in run:
            step = self._vector.ops[self._op]
            assert isinstance(step, Step)
            plan = self._check(step, refusal or self._take_result())
            assert plan is not None
            self._execute(step, plan)

    def _plan(self, step: PlannedStep) -> Plan | None:
        """Plans a step and compares the plan; returns None where the file has an error and the planner too."""
        return self._check(step, self._submit(step) or self._take_result())

    def _submit(self, step: PlannedStep, repeat: int = 1) -> LayoutError | None:
        """Sends a step to be planned; returns the error if the client refuses it already."""
        for request, label, _ in step.rows:
            if request is not None:
                self._note_use(request, label)
        try:
            layout = self._session.build_layout(
                [Segment(*row) for row in step.rows],
                combined_labels=[CombinedLabel(name, sources) for sources, name in step.combined],
                commit=step.commit,
                forks_before=self._build_forks(step, step.forks_before),
                forks_after=self._build_forks(step, step.forks_after),
            )
        except LayoutError as error:
            return error
        self._session.submit(layout, repeat=repeat)
        return None

    def _take_result(self) -> Plan | LayoutError:
        try:
            return self._session.next_plan(PLAN_TIMEOUT_SECONDS)
        except LayoutError as error:
            return error

    def _check(self, step: PlannedStep, result: Plan | LayoutError) -> Plan | None:
        if isinstance(result, LayoutError):
            got = name_error(result)
            if got != step.expect_error:
                raise _FoundError(Difference("plan", None, step.expect_error or A_PLAN, f"{got} ({result})"))
            return None
        self.num_plans[result.source] += self._op is not None
        if step.expect_error is not None:
            if not self._may_find_room(step):
                raise _FoundError(Difference("plan", None, step.expect_error, A_PLAN))
            self._session.discard_from(result.step_id)
            return None
        if step.expect is not None:
            _require_none(find_difference(result, step.expect, is_exact=self._vector.exact))
        return result

    def _may_find_room(self, step: PlannedStep) -> bool:
        """Whether there may be pages left where the file's planner had none: its forks did not share any."""
        return step.expect_error == "OUT_OF_PAGES" and self._vector.has_forks and not self._vector.exact

    def _execute(self, step: PlannedStep, plan: Plan) -> None:
        """Runs a step on the pool of tokens, and says so to the planner."""
        self._pool.fork(_list_keys(self._build_forks(step, step.forks_before)))
        self._pool.copy_pages(plan.page_copies_before)
        _require_none(self._pool.run(plan.labels.values(), keep=step.commit))
        self._pool.fork(_list_keys(self._build_forks(step, step.forks_after)))
        self._pool.copy_pages(plan.page_copies_after)
        self._session.commit(plan.step_id)
        self._session.release(plan.step_id)

    def _discard_kept(self) -> None:
        if self._kept is not None:
            self._session.discard_from(self._kept[1].step_id)
            self._kept = None

    def _remove(self, request: str) -> None:
        self._session.drop(request)
        for label in self._labels.pop(request, ()):
            self._pool.drop((request, label))

    def _reset(self, request: str) -> None:
        for label in self._labels.get(request, ()):
            self._session.truncate(request, label, 0)
            self._pool.truncate((request, label), 0)

    def _build_forks(self, step: PlannedStep, pairs: Sequence[tuple[str, str]]) -> list[ForkRequest]:
        forks = [ForkRequest(request, source, target) for source, target in pairs for request in step.requests]
        for fork in forks:
            self._note_use(str(fork.request), fork.source)
            self._note_use(str(fork.request), fork.target)
        return forks

    def _note_use(self, request: str, label: str) -> None:
        self._labels.setdefault(request, {})[label] = None

    def _read_everything(self) -> None:
        """Reads every stream once more: what was written over since it last stood in a step shows here."""
        self._discard_kept()
        segments = [(request, label, 0) for request, labels in self._labels.items() for label in labels]
        if segments:
            step = Step(op="step", segments=tuple(segments), commit=False)
            plan = self._plan(step)
            assert plan is not None
            self._execute(step, plan)

    def _drop_everything(self) -> None:
        for request in list(self._labels):
            self._remove(request)
        # Parts of messages are applied in order: once this step has its plan, the drops have been applied.
        step = Step(op="step", segments=(("padding", "main", 1),), padding=frozenset({"padding"}))
        plan = self._plan(step)
        assert plan is not None
        self._execute(step, plan)
        self._session.flush()


def build_runs(operations: Sequence[Operation], ahead: int) -> list[range]:
    """Groups operations into runs: equal, consecutive decode steps up to `ahead` at once, all others one by one.

    Args:
        operations: a vector's.
        ahead: the length of a run at most.

    Returns:
        The places of each run's operations.
    """
    runs: list[range] = []
    for index, operation in enumerate(operations):
        if runs and len(runs[-1]) < ahead and _can_follow(operations[runs[-1].start], operation):
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return runs


def name_error(error: LayoutError) -> str:
    """Returns the wire's word for why a layout has no plan, such as OUT_OF_PAGES."""
    name = planner_pb2.PlanErrorReason.Name(REASON_BY_LAYOUT_ERROR[type(error)])
    return name.removeprefix("PLAN_ERROR_REASON_")


def _can_follow(first: Operation, operation: Operation) -> bool:
    return (
        isinstance(first, Step)
        and isinstance(operation, Step)
        and first.can_be_planned_ahead
        and operation.can_be_planned_ahead
        and operation.is_same_layout(first)
    )


def _require_none(difference: Difference | None) -> None:
    if difference is not None:
        raise _FoundError(difference)


def _list_keys(forks: Sequence[ForkRequest]) -> list[tuple[StreamKey, StreamKey]]:
    return [((fork.request, fork.source), fork.target_key()) for fork in forks]
