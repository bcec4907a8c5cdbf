"""What a session tells of itself: which steps in flight have which streams, and which lease is the oldest."""

from planner_service.core.layout import StepLayout
from planner_service.messages import SessionMessage, SessionOptions
from tests.planner_service.mirrored_session import MirroredSession
from tests.reference.naive_planner import pack_rows

OPTIONS = SessionOptions(page_size=4, num_pages=64, max_streams=8, ring_depth=8)


def _count_in_flight(session: MirroredSession) -> dict[int, int]:
    return {stream.stream: stream.num_steps_in_flight for stream in session.session.dump().streams}


def test_steps_in_flight_are_counted_for_each_stream() -> None:
    """A step counts for the streams of its rows, of every plan label, until it is committed or discarded."""
    session = MirroredSession(OPTIONS)
    session.send(SessionMessage(layouts=(StepLayout(1, (pack_rows("main", [(0, 3), (1, 2), (-1, 1)]),)),)))
    both = (pack_rows("main", [(0, 1)]), pack_rows("cfg", [(2, 1)]))
    session.send(SessionMessage(layouts=(StepLayout(2, both, repeat=3),)))
    assert _count_in_flight(session) == {0: 4, 1: 1, 2: 3}
    session.send(SessionMessage(committed_through=2))
    assert _count_in_flight(session) == {0: 2, 1: 0, 2: 2}
    session.send(SessionMessage(discard_from=4))
    assert _count_in_flight(session) == {0: 1, 1: 0, 2: 1}


def test_the_oldest_lease_is_the_one_held_longest() -> None:
    """Its step and its age are told; without a lease there is no step, and the age is 0."""
    session = MirroredSession(OPTIONS)

    def read_oldest() -> tuple[int | None, float]:
        summary = session.session.summarize()
        return summary.oldest_lease_step_id, summary.oldest_lease_age_seconds

    assert read_oldest() == (None, 0.0)
    for step_id, released_through in ((4, 0), (7, 4)):
        layout = StepLayout(step_id, (pack_rows("main", [(0, 1)]),), repeat=2)
        session.send(SessionMessage(released_through=released_through, layouts=(layout,)))
        session.clock.now += 1.5
    assert read_oldest() == (5, 3.0)
    session.send(SessionMessage(released_through=5))
    assert read_oldest() == (7, 1.5)
    session.send(SessionMessage(released_through=8))
    assert read_oldest() == (None, 0.0)
