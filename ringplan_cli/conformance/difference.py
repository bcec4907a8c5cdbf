"""Where a plan differs from what it must hold."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from planner_service.client import ARRAY_NAMES, Plan, PlanArrays
from ringplan_cli.conformance.vector import ExpectedLabel

NUMBERS_OF_PAGES = ("paged_kv_indices", "slot_mapping")
NOTHING = "nothing"  # stands where one side has no value


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a planner does something else than a vector says.

    Args:
        array: the array; or what else differs: `plan`, `plan_labels`, `rows`, `session`, ...
        index: the place in it, or None.
        want: what must be there.
        got: what is there.
        label: the plan label, or None.
        op: the operation's place in the file, from 0; None is the end of the file.
        kind: the operation's name, or `end`.
    """

    array: str
    index: int | None
    want: Any
    got: Any
    label: str | None = None
    op: int | None = None
    kind: str = "end"

    def write(self, file: str) -> str:
        """Returns it in one line: file / op / label / array / index / want / got."""
        place = self.kind if self.op is None else f"op {self.op} {self.kind}"
        index = "-" if self.index is None else str(self.index)
        values = (f"want {_show(self.want)}", f"got {_show(self.got)}")
        return " / ".join((file, place, self.label or "-", self.array, index, *values))

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON knows it."""
        return asdict(self)


def find_difference(plan: Plan, expected: Sequence[ExpectedLabel], *, is_exact: bool) -> Difference | None:
    """Compares a plan with what it must hold.

    Args:
        plan: the plan.
        expected: its plan labels.
        is_exact: whether page numbers count.

    Returns:
        The first difference, or None.
    """
    found = _find_first("plan_labels", [label.name for label in expected], list(plan.labels))
    if found is not None:
        return found
    return next(
        (
            difference
            for label in expected
            for difference in _compare_label(plan.labels[label.name], label, is_exact=is_exact)
        ),
        None,
    )


def _compare_label(arrays: PlanArrays, expected: ExpectedLabel, *, is_exact: bool) -> Iterator[Difference]:
    names = [name for name in ARRAY_NAMES if is_exact or name not in NUMBERS_OF_PAGES]
    pairs: list[tuple[str, Sequence[Any], Sequence[Any]]] = [
        ("rows", expected.rows, arrays.rows),
        *((name, getattr(expected, name), getattr(arrays, name).tolist()) for name in names),
    ]
    for name, want, got in pairs:
        found = _find_first(name, want, got, expected.name)
        if found is not None:
            yield found


def _find_first(array: str, want: Sequence[Any], got: Sequence[Any], label: str | None = None) -> Difference | None:
    """Returns the first place where two sequences differ; the shorter one has nothing beyond its end."""
    for index in range(max(len(want), len(got))):
        wanted, found = (values[index] if index < len(values) else NOTHING for values in (want, got))
        if wanted != found:
            return Difference(array, index, wanted, found, label)
    return None


def _show(value: Any) -> str:
    """Returns a value as it reads best: a row as request.label, None as a padding row."""
    if value is None:
        return "padding"
    return ".".join(map(str, value)) if isinstance(value, tuple) else str(value)
