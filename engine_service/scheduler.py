"""Decides what runs in the next step: continuous batching with chunked prefill, first come first served.

Pure: it knows requests and numbers of pages, no planner and no model. The planner alone knows which pages; the counts
here only keep the scheduler from admitting what would have to be put back at once.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from engine_service.request import Request
from engine_service.validation import EngineLimits

_BY_ARRIVAL = attrgetter("arrival")


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """One request's part in a step.

    Args:
        request: the request.
        num_tokens: how many of its missing tokens the step computes.
    """

    request: Request
    num_tokens: int

    @property
    def is_sampled(self) -> bool:
        """Whether the step computes the request's last token, so that the next one can be chosen."""
        return self.num_tokens == self.request.num_missing_tokens

    @property
    def token_ids(self) -> list[int]:
        """The tokens the step computes."""
        start = self.request.num_computed_tokens
        return self.request.token_ids[start : start + self.num_tokens]


class Scheduler:
    """Keeps the waiting and the running requests.

    Args:
        limits: the pool's figures.
        max_running_requests: requests in a step at most.
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
        """The requests that hold none, oldest first."""
        return self._waiting

    @property
    def num_pages_held(self) -> int:
        """Pages that the running requests need for the tokens they have."""
        return sum(self._count_pages(request) for request in self._running)

    @property
    def kv_cache_usage(self) -> float:
        """The share of the usable pages that the running requests need, 0 to 1."""
        return min(1.0, self.num_pages_held / self._limits.num_usable_pages)

    def add(self, request: Request) -> None:
        """Puts a new request in the queue."""
        insort(self._waiting, request, key=_BY_ARRIVAL)

    def remove(self, request: Request) -> bool:
        """Takes out a request that has ended.

        Returns:
            Whether it was running, so that its pages are to be given up.
        """
        if request in self._running:
            self._running.remove(request)
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
        num_tokens_left = self._max_step_tokens
        shares: dict[int, int] = {}
        for request in self._running:
            if request.num_missing_tokens == 1:
                shares[request.arrival] = 1
                num_tokens_left -= 1
        for request in self._running:
            if request.num_missing_tokens > 1 and num_tokens_left:
                shares[request.arrival] = min(request.num_missing_tokens, num_tokens_left)
                num_tokens_left -= shares[request.arrival]
        while num_tokens_left and (admitted := self._try_admit()) is not None:
            shares[admitted.arrival] = min(admitted.num_missing_tokens, num_tokens_left)
            num_tokens_left -= shares[admitted.arrival]
        return [
            ScheduledRow(request, shares[request.arrival]) for request in self._running if request.arrival in shares
        ]

    def complete_step(self, rows: Sequence[ScheduledRow]) -> None:
        """Counts the tokens of a step that has run as computed. Call it before adding the tokens it chose."""
        for row in rows:
            row.request.num_computed_tokens += row.num_tokens

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
        assert len(self._running) <= self._max_running_requests, "no more run than may"
        for request in self._waiting:
            assert request.num_computed_tokens == 0, "a waiting request holds no pages"
        for request in self._running:
            assert request.num_missing_tokens >= 1, "a running request has a token to compute"

    def _try_admit(self) -> Request | None:
        """Lets the oldest waiting request run if its tokens fit beside those that run, with room for them to grow."""
        if not self._waiting or len(self._running) >= self._max_running_requests:
            return None
        request = self._waiting[0]
        # One page more for each that runs: a request admitted into the last free page would soon be put back.
        num_pages_needed = self._count_pages(request) + self.num_pages_held + len(self._running)
        if self._running and num_pages_needed > self._limits.num_usable_pages:
            return None
        del self._waiting[0]
        insort(self._running, request, key=_BY_ARRIVAL)
        return request

    def _preempt(self, request: Request) -> Request:
        self._running.remove(request)
        request.num_computed_tokens = 0
        insort(self._waiting, request, key=_BY_ARRIVAL)
        return request

    def _count_pages(self, request: Request) -> int:
        return self._limits.count_pages(len(request.token_ids))
