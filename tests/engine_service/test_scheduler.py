"""Rules of the scheduler."""

import pytest

from engine_service.request import GenerationSpec, Request
from engine_service.scheduler import ScheduledRow, Scheduler
from engine_service.validation import EngineLimits


def _make_scheduler(*, num_pages: int = 65, running: int = 4, tokens: int = 16, page_size: int = 4) -> Scheduler:
    return Scheduler(EngineLimits(1_000, 1_000, page_size, num_pages), running, tokens)


def _make_request(arrival: int, num_tokens: int) -> Request:
    return Request(GenerationSpec(str(arrival), (1,) * num_tokens), arrival, max_tokens=100)


def _run(scheduler: Scheduler) -> list[tuple[int, int]]:
    """Runs a step: every row that is sampled gets a token. Returns (arrival, tokens) of each row."""
    rows = scheduler.build_step()
    sampled = [row.request for row in rows if row.is_sampled]
    scheduler.complete_step(rows)
    for request in sampled:
        request.token_ids.append(7)
    scheduler.check_integrity()
    return [(row.request.arrival, row.num_tokens) for row in rows]


def test_nothing_to_do_is_an_empty_step() -> None:
    """Without requests there are no rows."""
    assert _make_scheduler().build_step() == []


def test_requests_are_admitted_in_order_of_arrival_until_the_batch_is_full() -> None:
    """No more run than may, and the oldest come first, in whatever order they were added."""
    scheduler = _make_scheduler(running=2)
    for arrival in (3, 1, 2):
        scheduler.add(_make_request(arrival, 2))
    assert _run(scheduler) == [(1, 2), (2, 2)]
    assert [request.arrival for request in scheduler.waiting] == [3]


def test_step_never_exceeds_its_tokens() -> None:
    """Prompts share what decodes leave, oldest first; the next one waits for a later step."""
    scheduler = _make_scheduler(tokens=10)
    for arrival, num_tokens in ((1, 3), (2, 12), (3, 5)):
        scheduler.add(_make_request(arrival, num_tokens))
    assert _run(scheduler) == [(1, 3), (2, 7)]
    assert _run(scheduler) == [(1, 1), (2, 5), (3, 4)]
    assert _run(scheduler) == [(1, 1), (2, 1), (3, 1)]


def test_prefill_goes_on_where_it_stopped() -> None:
    """A chunk's tokens are those that the chunk before left."""
    scheduler = _make_scheduler(tokens=4)
    request = Request(GenerationSpec("a", tuple(range(6))), 1, max_tokens=5)
    scheduler.add(request)
    first = scheduler.build_step()
    assert (first[0].token_ids, first[0].is_sampled) == ([0, 1, 2, 3], False)
    scheduler.complete_step(first)
    second = scheduler.build_step()
    assert (second[0].token_ids, second[0].is_sampled) == ([4, 5], True)


def test_request_waits_until_its_pages_fit_with_room_for_those_that_run() -> None:
    """Admission counts every page that running requests need now, and one more for each."""
    scheduler = _make_scheduler(num_pages=8)
    scheduler.add(_make_request(1, 9))
    _run(scheduler)
    # 10 tokens take 3 pages of 7; with one to spare, 3 are left.
    scheduler.add(_make_request(2, 13))
    scheduler.add(_make_request(3, 1))
    assert _run(scheduler) == [(1, 1)], "4 pages do not fit, and nobody overtakes"
    scheduler.remove(scheduler.running[0])
    assert _run(scheduler) == [(2, 13), (3, 1)]


def test_request_that_fills_the_whole_pool_runs_alone() -> None:
    """The room to grow is for others: a request that is alone may take every page."""
    scheduler = _make_scheduler(num_pages=5)
    scheduler.add(_make_request(1, 16))
    assert _run(scheduler) == [(1, 16)]


def test_preemption_takes_the_youngest_and_recomputes_all_its_tokens() -> None:
    """The youngest running request goes back ahead of every younger one; nothing of it counts as computed."""
    scheduler = _make_scheduler()
    for arrival in (1, 2, 3):
        scheduler.add(_make_request(arrival, 3))
    _run(scheduler)
    scheduler.add(_make_request(4, 3))
    victim = scheduler.preempt_youngest()
    assert victim is not None
    assert victim.arrival == 3
    assert (victim.num_computed_tokens, victim.num_missing_tokens) == (0, 4)
    assert [request.arrival for request in scheduler.waiting] == [3, 4]
    assert _run(scheduler) == [(1, 1), (2, 1), (3, 4), (4, 3)]


def test_request_that_runs_alone_is_not_preempted() -> None:
    """The oldest request keeps the pool, so that there is always progress."""
    scheduler = _make_scheduler()
    scheduler.add(_make_request(1, 3))
    _run(scheduler)
    assert scheduler.preempt_youngest() is None


def test_all_can_be_put_back_at_once() -> None:
    """When every page is lost all requests wait again, in order of arrival."""
    scheduler = _make_scheduler()
    for arrival in (1, 2):
        scheduler.add(_make_request(arrival, 3))
    _run(scheduler)
    assert [request.arrival for request in scheduler.preempt_all()] == [2, 1]
    assert [request.arrival for request in scheduler.waiting] == [1, 2]
    assert scheduler.num_pages_held == 0


def test_remove_tells_whether_pages_are_to_be_given_up() -> None:
    """Only a running request holds pages; one that is gone already is no error."""
    scheduler = _make_scheduler(running=1)
    running, waiting = _make_request(1, 2), _make_request(2, 2)
    scheduler.add(running)
    scheduler.add(waiting)
    _run(scheduler)
    assert scheduler.remove(running) is True
    assert scheduler.remove(waiting) is False
    assert scheduler.remove(waiting) is False
    assert scheduler.build_step() == []


def test_usage_is_the_share_of_usable_pages() -> None:
    """The sink page is nobody's: 2 of 4 pages are half."""
    scheduler = _make_scheduler(num_pages=5)
    scheduler.add(_make_request(1, 7))
    _run(scheduler)
    assert scheduler.kv_cache_usage == 0.5


def test_integrity_check_finds_a_request_that_stands_twice() -> None:
    """The check that the engine runs when idle does find a broken state."""
    scheduler = _make_scheduler()
    request = _make_request(1, 2)
    scheduler.add(request)
    _run(scheduler)
    scheduler.add(request)
    with pytest.raises(AssertionError, match="stands once"):
        scheduler.check_integrity()


def test_row_knows_whether_the_next_token_can_be_chosen() -> None:
    """Only a row that computes the last known token is sampled."""
    request = _make_request(1, 5)
    assert not ScheduledRow(request, 4).is_sampled
    assert ScheduledRow(request, 5).is_sampled
