"""Random engines against sessions and their naive twins: nothing an engine does makes a plan wrong or loses a page."""

from dataclasses import replace

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from planner_service.core.layout import PADDING, Drop, Fork, PlanLabelRows, StepLayout, StreamOperation, Truncate
from planner_service.messages import CacheMode, SessionMessage, SessionOptions
from tests.planner_service.mirrored_session import MirroredSession
from tests.reference.naive_planner import pack_int32, pack_rows

NUM_STREAMS = 6
stream_numbers = st.integers(0, NUM_STREAMS - 1)
spans = st.one_of(st.just(1), st.just(1), st.integers(0, 9))


@st.composite
def plan_labels(draw: st.DrawFn, *, is_decode: bool) -> tuple[PlanLabelRows, ...]:
    """Draws one to three plan labels; a stream stands in at most one row."""
    numbers = draw(st.permutations(range(NUM_STREAMS)))[: draw(st.integers(1, NUM_STREAMS))]
    rows: list[list[tuple[int, int]]] = [[] for _ in range(draw(st.sampled_from([1, 1, 2, 3])))]
    for number in numbers:
        place = draw(st.integers(0, len(rows) - 1))
        rows[place].append((number, 1 if is_decode else draw(spans)))
    for label_rows in rows:
        for _ in range(draw(st.sampled_from([0, 0, 1, 2])) or not label_rows):
            padding = (PADDING, draw(st.sampled_from([1, 1, 1, 7])))
            label_rows.insert(draw(st.integers(0, len(label_rows))), padding)
    return tuple(pack_rows(f"label{place}", label_rows) for place, label_rows in enumerate(rows))


forks = st.lists(
    st.tuples(stream_numbers, stream_numbers).filter(lambda pair: pair[0] != pair[1]).map(lambda pair: Fork(*pair)),
    max_size=2,
).map(tuple)
# Step ids are put in when a layout is sent.
decode_layouts = st.builds(StepLayout, st.just(1), plan_labels(is_decode=True), repeat=st.sampled_from([1, 1, 2, 4, 9]))
mixed_layouts = st.builds(
    StepLayout, st.just(1), plan_labels(is_decode=False), commit=st.sampled_from([True, True, False])
)
forking_layouts = st.builds(
    StepLayout,
    st.just(1),
    plan_labels(is_decode=False),
    commit=st.sampled_from([True, True, False]),
    forks_before=forks,
    forks_after=forks,
)


class EnginesAgainstTwins(RuleBasedStateMachine):
    """The same messages go to sessions of every ring depth and cache mode; each is compared with its naive twin."""

    has_forks = True
    is_sound = False

    @initialize(page_size=st.sampled_from([1, 2, 4]), num_pages=st.integers(4, 40), set_bytes=st.sampled_from([64, 0]))
    def open(self, page_size: int, num_pages: int, set_bytes: int) -> None:
        """Opens the sessions."""
        options = SessionOptions(page_size, num_pages, NUM_STREAMS, set_bytes=set_bytes)
        # Who looks at a session may change it: what cached steps add is written down when somebody does.
        kinds = [(2, CacheMode.ON, 1), (3, CacheMode.OFF, 1), (8, CacheMode.VERIFY, 1), (4, CacheMode.ON, 6)]
        self.sessions = [
            MirroredSession(replace(options, ring_depth=depth, cache_mode=cache_mode), replies_a_look=replies)
            for depth, cache_mode, replies in kinds
        ]
        self.last_step = 0
        self.committed = 0
        self.released = 0
        self.last_layouts: list[StepLayout] = []
        self.is_sound = True

    @rule(data=st.data(), num_committed=st.integers(0, 4), num_released=st.integers(0, 4), is_lazy=st.booleans())
    def tick(self, data: st.DataObject, num_committed: int, num_released: int, is_lazy: bool) -> None:
        """Sends a message with any parts."""
        answered = min(session.last_answered for session in self.sessions)
        self.committed = max(self.committed, min(answered, self.committed + num_committed))
        # Plans are released as they are copied, or after they ran.
        limit = self.committed if is_lazy else answered
        self.released = max(self.released, min(limit, self.released + num_released))
        discard_from = 0
        if data.draw(st.integers(0, 3), label="discard") == 0 and self.last_step > self.committed:
            discard_from = data.draw(st.integers(self.committed + 1, self.last_step), label="discard from")
        operations = self._draw_operations(data)
        layouts = data.draw(st.lists(self._layouts(), max_size=3), label="layouts")
        message = SessionMessage(
            released_through=self.released,
            committed_through=self.committed,
            discard_from=discard_from,
            operations=tuple(operations),
            layouts=tuple(self._number(layout) for layout in layouts),
        )
        self.last_layouts = (self.last_layouts + layouts)[-3:]
        self.is_sound = False  # until every session has answered as it should
        for session in self.sessions:
            session.send(message)
        self.is_sound = True

    @rule()
    def expire(self) -> None:
        """Lets the ring time-out pass."""
        self.is_sound = False
        for session in self.sessions:
            session.expire()
        self.is_sound = True

    def teardown(self) -> None:
        """Ends everything: every page must be back."""
        if self.is_sound:
            for session in self.sessions:
                session.check_all_is_free()

    def _number(self, layout: StepLayout) -> StepLayout:
        numbered = replace(layout, step_id=self.last_step + 1)
        self.last_step += layout.repeat
        return numbered

    def _layouts(self) -> st.SearchStrategy[StepLayout]:
        kinds = [decode_layouts, mixed_layouts]
        if self.has_forks:
            kinds.append(forking_layouts)
        if self.last_layouts:
            kinds.append(st.sampled_from(self.last_layouts))
        return st.one_of(kinds)

    def _draw_operations(self, data: st.DataObject) -> list[StreamOperation]:
        is_any_waiting = any(session.is_waiting for session in self.sessions)
        limits = [
            0 if is_any_waiting else min(session.committed_length(stream) for session in self.sessions)
            for stream in range(NUM_STREAMS)
        ]
        operations: list[StreamOperation] = []
        for _ in range(data.draw(st.sampled_from([0, 0, 1, 2]), label="operations")):
            if data.draw(st.booleans(), label="is a drop"):
                streams = data.draw(st.lists(stream_numbers, max_size=3), label="dropped")
                operations.append(Drop(pack_int32(streams)))
                for stream in streams:
                    limits[stream] = 0
            else:
                stream = data.draw(stream_numbers, label="truncated")
                limits[stream] = data.draw(st.integers(0, limits[stream]), label="length")
                operations.append(Truncate(stream, limits[stream]))
        return operations


class EnginesThatFork(EnginesAgainstTwins):
    """Any operation."""


class EnginesThatDoNotFork(EnginesAgainstTwins):
    """Any operation but forks."""

    has_forks = False


# Shrinking takes minutes here, longer than a test may run; a failing example is printed as it was drawn.
SETTINGS = settings(max_examples=120, stateful_step_count=20, phases=[Phase.explicit, Phase.generate])
EnginesThatFork.TestCase.settings = SETTINGS
EnginesThatDoNotFork.TestCase.settings = SETTINGS

TestEnginesThatFork = EnginesThatFork.TestCase
TestEnginesThatDoNotFork = EnginesThatDoNotFork.TestCase
