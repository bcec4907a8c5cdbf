"""Plan vectors as they stand in their files, checked against the format (docs/conformance.md)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ringplan_cli.errors import CommandError

Row = tuple[str, str]  # (request, label)
ErrorName = Literal["OUT_OF_PAGES", "INVALID_LAYOUT"]


class VectorError(CommandError):
    """Raised when a file cannot be read as a plan vector.

    Attributes:
        path: the file.
    """

    def __init__(self, path: Path, rule: str) -> None:
        super().__init__(f"{path}: {rule}", exit_code=2)
        self.path = path


class _Part(BaseModel):
    """A part of a vector: a key that the format does not have would be passed over in silence, so it is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ExpectedLabel(_Part):
    """What a plan must hold for one plan label: its rows (None is a padding row) and its arrays."""

    name: str
    rows: tuple[Row | None, ...]
    qo_indptr: tuple[int, ...]
    paged_kv_indptr: tuple[int, ...]
    paged_kv_indices: tuple[int, ...]
    paged_kv_last_page_len: tuple[int, ...]
    kv_lens: tuple[int, ...]
    slot_mapping: tuple[int, ...]
    positions: tuple[int, ...]


class PlannedStep(_Part):
    """A step to plan, and what its plan must hold; `expect` None leaves that open."""

    op: str
    segments: Annotated[tuple[tuple[str, str, int], ...], Field(min_length=1)]
    padding: frozenset[str] = frozenset()
    combined: tuple[tuple[tuple[str, ...], str], ...] = ()
    commit: bool = True
    forks_before: tuple[tuple[str, str], ...] = ()
    forks_after: tuple[tuple[str, str], ...] = ()
    expect: tuple[ExpectedLabel, ...] | None = None
    expect_error: ErrorName | None = None

    @model_validator(mode="after")
    def _refuse_both_expectations(self) -> Self:
        if self.expect is not None and self.expect_error is not None:
            raise ValueError("expect and expect_error exclude each other")
        return self

    @property
    def rows(self) -> tuple[tuple[str | None, str, int], ...]:
        """The segments in batch order, with None for the request of a padding row."""
        return tuple(
            (None if request in self.padding else request, label, span) for request, label, span in self.segments
        )

    @property
    def requests(self) -> tuple[str, ...]:
        """The real requests, in the order of their first segments."""
        return tuple(dict.fromkeys(request for request, _, _ in self.rows if request is not None))

    @property
    def has_forks(self) -> bool:
        """Whether the step forks streams."""
        return bool(self.forks_before or self.forks_after)

    @property
    def streams(self) -> set[Row]:
        """Every (request, label) that exists after this step, if it is run."""
        labels = {label for pair in (*self.forks_before, *self.forks_after) for label in pair}
        return {(request, label) for request, label, _ in self.rows if request is not None} | {
            (request, label) for request in self.requests for label in labels
        }


class Step(PlannedStep):
    """A step that is planned, and then run or discarded."""

    op: Literal["step"]
    then: Literal["commit", "discard"] = "commit"

    @property
    def can_be_planned_ahead(self) -> bool:
        """Whether the step may stand in a run of equal steps: a decode step that is kept."""
        return (
            self.then == "commit"
            and self.commit
            and not self.has_forks
            and self.expect_error is None
            and all(span == 1 for request, _, span in self.rows if request is not None)
        )

    def is_same_layout(self, other: "Step") -> bool:
        """Whether both ask for the same plan, but for the names of padding rows."""
        return (self.rows, self.combined) == (other.rows, other.combined)


class PlanAhead(PlannedStep):
    """A step that is planned and kept."""

    op: Literal["plan_ahead"]


class RunAhead(_Part):
    """The kept step runs."""

    op: Literal["run_ahead"]


class DiscardAhead(_Part):
    """The kept step, if there is one, will not run."""

    op: Literal["discard_ahead"]


class Remove(_Part):
    """Every stream of a request ends."""

    op: Literal["remove"]
    request: str


class Reset(_Part):
    """Every stream of a request is cut back to nothing."""

    op: Literal["reset"]
    request: str


Operation = Annotated[Step | PlanAhead | RunAhead | DiscardAhead | Remove | Reset, Field(discriminator="op")]


class Vector(BaseModel):
    """A run of a planner over one session, with what every plan must hold. Further keys are notes of its writer."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    name: str
    note: str = ""
    tags: tuple[str, ...] = ()
    page_size: Annotated[int, Field(ge=1, le=65_536)]
    num_pages: Annotated[int, Field(ge=2)]
    exact: bool
    ops: tuple[Operation, ...]

    @model_validator(mode="after")
    def _check_kept_steps(self) -> Self:
        _KeptStepRules().check(self.ops)
        return self

    @property
    def has_forks(self) -> bool:
        """Whether any step forks streams."""
        return any(isinstance(operation, PlannedStep) and operation.has_forks for operation in self.ops)

    @property
    def num_streams(self) -> int:
        """How many (request, label) pairs the file names."""
        return len(
            {stream for operation in self.ops if isinstance(operation, PlannedStep) for stream in operation.streams}
        )


class _KeptStepRules:
    """At most one step is kept, and it is run or discarded before another is planned."""

    def __init__(self) -> None:
        self._kept: PlanAhead | None = None
        self._kept_index = 0
        self._changed: set[str] = set()

    def check(self, operations: Sequence[Any]) -> None:
        """Raises ValueError where the operations break the rules."""
        for index, operation in enumerate(operations):
            problem = self._find_problem(operation)
            if problem is not None:
                raise ValueError(f"ops[{index}], {operation.op}: {problem}")
            self._take(index, operation)

    def _find_problem(self, operation: Any) -> str | None:
        if isinstance(operation, PlannedStep) and self._kept is not None:
            return f"the step kept by ops[{self._kept_index}] is neither run nor discarded"
        if isinstance(operation, RunAhead):
            if self._kept is None:
                return "no step is kept"
            changed = [request for request in self._kept.requests if request in self._changed]
            if changed:
                return f"request {changed[0]!r} was removed or reset since the step was planned"
        return None

    def _take(self, index: int, operation: Any) -> None:
        if isinstance(operation, PlanAhead) and operation.expect_error is None:
            self._kept, self._kept_index = operation, index
            self._changed.clear()
        elif isinstance(operation, RunAhead | DiscardAhead):
            self._kept = None
        elif isinstance(operation, Remove | Reset):
            self._changed.add(operation.request)


def read_vector(path: Path) -> Vector:
    """Reads a plan vector.

    Args:
        path: the file.

    Raises:
        VectorError: the file cannot be read, or is no plan vector.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise VectorError(path, f"cannot be read: {error.strerror}") from error
    try:
        return Vector.model_validate_json(content)
    except ValidationError as error:
        raise VectorError(path, f"no plan vector: {_describe(error.errors()[0])}") from None


def _describe(problem: Any) -> str:
    """Returns where a file breaks the format and which rule, in words."""
    place = list(problem["loc"])
    if place[:1] == ["ops"] and len(place) > 2:
        del place[2]  # The kind of operation, which pydantic puts between.
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
    rule = str(problem["msg"]).removeprefix("Value error, ")
    value = problem["input"]
    shown = f" (got {value!r})" if isinstance(value, str | int | float | bool) and path else ""
    return f"{path}: {rule}{shown}" if path else rule
