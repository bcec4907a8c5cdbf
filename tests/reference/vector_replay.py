"""Replays a handed plan vector on the naive planner and compares every plan with what the file says."""

from collections.abc import Sequence
from typing import Any

from planner_service.core.layout import PADDING, Fork, StepLayout
from tests.reference.kv_simulator import KvSimulator
from tests.reference.naive_planner import NaivePlan, NaivePlanner, OutOfPages, pack_int32, pack_rows

Vector = dict[str, Any]
FORK_KEYS = ("forks_before", "forks_after")
PAGE_NUMBERS = ("paged_kv_indices", "slot_mapping")


def group_rows(
    segments: Sequence[tuple[str, str, int]], combined: Sequence[tuple[Sequence[str], str]]
) -> dict[str, list[int]]:
    """Returns plan label -> segment places in row order: combined plan labels first, then labels as they appear."""
    places: dict[str, list[int]] = {}
    for sources, name in combined:
        places[name] = [place for source in sources for place, segment in enumerate(segments) if segment[1] == source]
    taken = {source for sources, _ in combined for source in sources}
    for place, (_, label, _) in enumerate(segments):
        if label not in taken:
            places.setdefault(label, []).append(place)
    return places


class VectorReplay:
    """Replays one vector; `run` raises AssertionError at the first plan that differs."""

    def __init__(self, vector: Vector) -> None:
        self.vector = vector
        self.planner = NaivePlanner(vector["page_size"], vector["num_pages"])
        self.cache = KvSimulator(vector["page_size"])
        self.numbers: dict[tuple[str, str], int] = {}
        self.has_forks = any(when in operation for operation in vector["ops"] for when in FORK_KEYS)
        self.num_numbers = 0
        self.step_id = 0
        self.ahead: NaivePlan | None = None

    def run(self) -> None:
        """Replays every operation."""
        for operation in self.vector["ops"]:
            getattr(self, f"_{operation['op']}")(operation)

    def _number(self, request: str, label: str) -> int:
        if (request, label) not in self.numbers:
            self.numbers[request, label] = self.num_numbers
            self.num_numbers += 1
        return self.numbers[request, label]

    def _build_layout(self, operation: dict[str, Any]) -> StepLayout:
        self.step_id += 1
        segments, padding = operation["segments"], operation["padding"]
        requests = list(dict.fromkeys(request for request, _, _ in segments if request not in padding))
        numbers = [PADDING if request in padding else self._number(request, label) for request, label, _ in segments]
        places = group_rows(segments, operation["combined"])
        labels = [
            pack_rows(name, [(numbers[place], segments[place][2]) for place in label_places])
            for name, label_places in places.items()
        ]
        row_places = [place for label_places in places.values() for place in label_places]
        forks_before, forks_after = (
            tuple(
                Fork(self._number(request, source), self._number(request, target))
                for source, target in operation.get(when, ())
                for request in requests
            )
            for when in FORK_KEYS
        )
        return StepLayout(
            self.step_id,
            tuple(labels),
            commit=operation["commit"],
            forks_before=forks_before,
            forks_after=forks_after,
            page_order=pack_int32(sorted(range(len(row_places)), key=row_places.__getitem__)),
        )

    def _plan(self, operation: dict[str, Any]) -> NaivePlan | None:
        try:
            plan = self.planner.plan(self._build_layout(operation))
        except OutOfPages:
            assert operation.get("expect_error") == "OUT_OF_PAGES"
            return None
        if "expect_error" in operation:
            # Where streams share pages after a fork, there may be room where the file's planner had none.
            assert self.has_forks, f"step {self.step_id} found room"
            self.planner.discard_from(plan.step_id)
            return None
        expect = operation.get("expect")  # a capture tells what to expect of its last step alone
        if expect is None:
            return plan
        assert list(plan.arrays) == [label["name"] for label in expect]
        for label in expect:
            for name, values in plan.arrays[label["name"]].items():
                if self.vector["exact"] or name not in PAGE_NUMBERS:
                    assert values == label[name], f"step {self.step_id}, {label['name']}: {name}"
        return plan

    def _run_plan(self, plan: NaivePlan) -> None:
        self.cache.run(plan, plan.arrays, plan.page_copies_before, plan.page_copies_after)
        self.planner.commit(plan.step_id)

    def _step(self, operation: dict[str, Any]) -> None:
        plan = self._plan(operation)
        if plan is None:
            return
        if operation["then"] == "commit":
            self._run_plan(plan)
        else:
            self.planner.discard_from(plan.step_id)

    def _plan_ahead(self, operation: dict[str, Any]) -> None:
        plan = self._plan(operation)
        assert plan is not None
        self.ahead = plan

    def _run_ahead(self, _: dict[str, Any]) -> None:
        assert self.ahead is not None
        self._run_plan(self.ahead)
        self.ahead = None

    def _discard_ahead(self, _: dict[str, Any]) -> None:
        if self.ahead is not None:
            self.planner.discard_from(self.ahead.step_id)
            self.ahead = None

    def _remove(self, operation: dict[str, Any]) -> None:
        for request, label in [key for key in self.numbers if key[0] == operation["request"]]:
            self.planner.drop(self.numbers.pop((request, label)))

    def _reset(self, operation: dict[str, Any]) -> None:
        for (request, _), number in self.numbers.items():
            if request == operation["request"]:
                self.planner.truncate(number, 0)
