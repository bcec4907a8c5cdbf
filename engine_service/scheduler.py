"""Decides what runs in the next step: continuous batching with chunked prefill, first come first served.

Pure: it knows requests and numbers of pages, no planner and no model. The planner alone knows which pages; the counts
here only keep the scheduler from admitting what would have to be put back at once.
"""

from bisect import insort
from collections.abc import Sequence
from operator import attrgetter

from engine_service.page_counts import count_held_pages, count_pages
from engine_service.request import Request
from engine_service.scheduled_row import ScheduledRow, build_forked_row
from engine_service.streams import share_tokens
from engine_service.validation import EngineLimits

__all__ = ["ScheduledRow", "Scheduler"]

_BY_ARRIVAL = attrgetter("arrival")


class Scheduler:
    """Keeps the waiting and the running requests.

    Args:
        limits: the pool's figures.
        max_running_requests: requests in a step at most; each further context of a request counts as one.
        max_step_tokens: tokens in a step at most; at least `max_running_requests`.
    """

    def __init__(self, limits: EngineLimits, max_running_requests: int, max_step_tokens: int) -> None:
        assert max_step_tokens >= max_running_requests >= 1, "every running request takes one token a step"
        self._limits = limits
        self._max_running_requests = max_running_requests
        self._max_step_tokens = max_step_tokens
        # Both in order of arrival. Every running request arrived before every waiting one that never ran.
        self._waiting: list[Request] = []
        self._running: list[Request] = []

    @property
    def running(self) -> Sequence[Request]:
        """The requests that hold pages, oldest first."""
        return self._running

    @property
    def waiting(self) -> Sequence[Request]:
        """The requests that hold none, oldest first; samples that are to be forked come with their first one."""
        return self._waiting

    @property
    def num_waiting(self) -> int:
        """Requests that hold no pages, samples that are still to be forked included."""
        num_followers = sum(len(request.followers) for request in (*self._waiting, *self._running))
        return len(self._waiting) + num_followers

    @property
    def num_pages_held(self) -> int:
        """Pages that the running requests need for the tokens they have."""
        return count_held_pages(self._running, self._limits)

    @property
    def kv_cache_usage(self) -> float:
        """The share of the usable pages that the running requests need, 0 to 1."""
        return min(1.0, self.num_pages_held / self._limits.num_usable_pages)

    def add(self, request: Request) -> None:
        """Puts a new request in the queue; one that follows another comes to run with that one."""
        if request.leader is None:
            insort(self._waiting, request, key=_BY_ARRIVAL)

    def remove(self, request: Request) -> bool:
        """Takes out a request that has ended.

        Returns:
            Whether it was running, so that its pages are to be given up.
        """
        request.unfollow()
        self._replace_leader(request)
        if request.is_running:
            self._running.remove(request)
            request.is_running = False
            return True
        if request in self._waiting:
            self._waiting.remove(request)
        return False

    def build_step(self) -> list[ScheduledRow]:
        """Admits what fits and chooses the rows of the next step.

        Running requests decode first, so that a long prompt never stops them; what is left of the step's tokens goes
        to prompts, oldest first.

        Returns:
            The rows, oldest request first; empty if there is nothing to do.
        """
        self._start_followers()
        num_tokens_left = self._max_step_tokens
        chosen: dict[int, ScheduledRow] = {}
        prefilling = []
        for request in self._running:
            if request.leader is not None:
                row = build_forked_row(request, request.leader)
            elif request.is_decoding:
                row = ScheduledRow(request, 1, (1,) * len(request.spec.guidance))
            else:
                prefilling.append(request)
                continue
            chosen[request.arrival] = row
            num_tokens_left -= sum(row.num_stream_tokens)
        for request in prefilling:
            num_tokens_left = self._choose_chunk(request, num_tokens_left, chosen)
        while num_tokens_left and (admitted := self._try_admit()) is not None:
            num_tokens_left = self._choose_chunk(admitted, num_tokens_left, chosen)
        return [chosen[request.arrival] for request in self._running if request.arrival in chosen]

    def complete_step(self, rows: Sequence[ScheduledRow]) -> None:
        """Counts the tokens of a step that has run as computed. Call it before adding the tokens it chose."""
        for row in rows:
            row.complete()
            request, leader = row.request, row.request.leader
            if leader is not None:
                request.unfollow()
                num_shared_tokens = tuple(len(stream.prompt_token_ids) - 1 for stream in request.streams)
                request.num_cached_tokens = num_shared_tokens[0]
                for sample in (leader, request):
                    sample.shared_with, sample.num_shared_tokens = leader.arrival, num_shared_tokens

    def preempt_youngest(self) -> Request | None:
        """Puts the youngest running request back in the queue; it is computed again later.

        Returns:
            The request, whose pages are to be given up, or None if only one runs: it has the pool to itself.
        """
        if len(self._running) < 2:
            return None
        return self._preempt(self._running[-1])

    def preempt_all(self) -> list[Request]:
        """Puts every running request back in the queue; returns them, youngest first."""
        return [self._preempt(request) for request in reversed(list(self._running))]

    def check_integrity(self) -> None:
        """Checks the invariants.

        Raises:
            AssertionError: one is broken.
        """
        for requests in (self._running, self._waiting):
            arrivals = [request.arrival for request in requests]
            assert arrivals == sorted(set(arrivals)), "requests stand in order of arrival, each once"
        assert not {r.arrival for r in self._running} & {r.arrival for r in self._waiting}, "a request stands once"
        assert self._count_places() <= self._max_running_requests, "no more run than may"
        for request in self._waiting:
            assert not any(stream.num_computed_tokens for stream in request.streams), "a waiting request holds no pages"
            assert not request.is_running, "a waiting request does not run"
            assert request.leader is None, "a request that is to be forked waits with another one"
        for request in self._running:
            assert request.is_running, "a running request runs"
            assert all(request.count_missing(stream) >= 1 for stream in request.streams), (
                "a running request has a token to compute"
            )
            for follower in request.followers:
                assert follower.leader is request, "a sample is forked from the one that it follows"

    def _try_admit(self) -> Request | None:
        """Lets the oldest waiting request run if its tokens fit beside those that run, with room for them to grow."""
        if not self._waiting:
            return None
        request = self._waiting[0]
        if self._count_places() + _count_places(request) > self._max_running_requests:
            return None
        # One page more for each that runs: a request admitted into the last free page would soon be put back.
        num_pages_needed = count_pages(request, self._limits) + self.num_pages_held + self._count_places()
        if self._running and num_pages_needed > self._limits.num_usable_pages:
            return None
        del self._waiting[0]
        self._run(request)
        return request

    def _choose_chunk(self, request: Request, num_tokens: int, chosen: dict[int, ScheduledRow]) -> int:
        """Chooses what a step computes of a prompt; returns how many of the step's tokens are left."""
        shares = share_tokens(
            request.arrival,
            request.streams,
            request.num_generated_tokens,
            num_tokens,
            keeps_last=bool(request.followers),
        )
        first, *others = shares.num_tokens
        if first or any(others):
            chosen[request.arrival] = ScheduledRow(request, first, tuple(others), shares.forks)
        return num_tokens - sum(shares.num_tokens)

    def _start_followers(self) -> None:
        """Lets samples run whose first one has computed all that they share."""
        for leader in list(self._running):
            if leader.followers and leader.is_decoding:
                for follower in leader.followers:
                    if not follower.is_running:
                        self._run(follower)

    def _run(self, request: Request) -> None:
        request.is_running = True
        insort(self._running, request, key=_BY_ARRIVAL)

    def _preempt(self, request: Request) -> Request:
        request.unfollow()
        self._running.remove(request)
        request.is_running = False
        request.forget_computed()
        insort(self._waiting, request, key=_BY_ARRIVAL)
        return request

    def _replace_leader(self, request: Request) -> None:
        """Gives the samples that were to be forked from a request that ends another one to be forked from."""
        followers = list(request.followers)
        for follower in followers:
            follower.unfollow()
        leader: Request | None = None
        for follower in followers:
            if follower.is_running:
                continue
            if leader is None:
                leader = follower
                insort(self._waiting, follower, key=_BY_ARRIVAL)
            else:
                follower.follow(leader)

    def _count_places(self) -> int:
        return sum(_count_places(request) for request in self._running)


def _count_places(request: Request) -> int:
    """Returns how many streams a request runs, samples that are still to be forked from it included."""
    num_waiting = sum(not follower.is_running for follower in request.followers)
    return len(request.streams) * (1 + num_waiting)
