"""The engine's side of its planner session: steps out, plans in, and a new session when one is lost."""

from collections.abc import Hashable, Sequence
from typing import Protocol

from engine_service.scheduler import ScheduledRow
from planner_service.client import (
    CacheMode,
    Plan,
    PlannerClient,
    PlannerSession,
    Segment,
    SessionLostError,
)

MAIN_LABEL = "main"


class StepPlanner(Protocol):
    """Plans an engine's steps, one at a time; used by the engine's thread alone. Requests are named by any key."""

    @property
    def is_connected(self) -> bool:
        """Whether there is a session."""

    def connect(self, timeout_seconds: float) -> None:
        """Opens a session; nothing of an earlier one remains."""

    def plan_step(self, rows: Sequence[ScheduledRow]) -> Plan:
        """Returns the plan of a step with these rows."""

    def end_step(self, plan: Plan, *, is_kept: bool) -> None:
        """Says that the step has run and its plan is no longer read; its tokens are kept or taken back."""

    def drop(self, request: Hashable) -> None:
        """Gives up what a request holds."""

    def flush(self) -> None:
        """Sends what has not been sent, and notices a lost session."""

    def close(self) -> None:
        """Ends the session, if there is one."""


class PlannerLink:
    """A step planner over the planner's socket.

    What a step brings (its commit, the release of its buffer set, drops) goes out with the next step's layout.

    Args:
        target: the planner's address.
        page_size: tokens a page holds.
        num_pages: pages in the pool, the sink page included.
        max_running_requests: requests that hold pages at once.
        ring_depth: buffer sets in the ring; 0 leaves it to the planner.
        cache_mode: how decode plans are cached; None leaves it to the planner.
        engine_name: for the planner's logs.
        plan_timeout_seconds: a planner that has not answered for so long counts as lost.
    """

    def __init__(
        self,
        target: str,
        *,
        page_size: int,
        num_pages: int,
        max_running_requests: int,
        ring_depth: int = 0,
        cache_mode: CacheMode | None = None,
        engine_name: str = "",
        plan_timeout_seconds: float = 30.0,
    ) -> None:
        self._target = target
        self._page_size = page_size
        self._num_pages = num_pages
        self._max_streams = max_running_requests
        self._ring_depth = ring_depth
        self._cache_mode = cache_mode
        self._engine_name = engine_name
        self._plan_timeout_seconds = plan_timeout_seconds
        self._client: PlannerClient | None = None
        self._session: PlannerSession | None = None

    @property
    def is_connected(self) -> bool:
        """Whether there is a session."""
        return self._session is not None

    @property
    def session(self) -> PlannerSession:
        """The session.

        Raises:
            SessionLostError: there is none.
        """
        if self._session is None:
            raise SessionLostError("there is no session")
        return self._session

    def connect(self, timeout_seconds: float) -> None:
        """Opens a session; nothing of an earlier one remains.

        Args:
            timeout_seconds: how long to wait for the planner.

        Raises:
            PlannerUnavailableError: there is no planner, or it refuses the session.
            InvalidOptionsError: an option is out of range.
        """
        self.close()
        client = PlannerClient(self._target, connect_timeout_seconds=timeout_seconds)
        try:
            self._session = client.open_session(
                page_size=self._page_size,
                num_pages=self._num_pages,
                max_streams=self._max_streams,
                ring_depth=self._ring_depth,
                cache_mode=self._cache_mode,
                engine_name=self._engine_name,
            )
        except BaseException:
            client.close()
            raise
        self._client = client

    def plan_step(self, rows: Sequence[ScheduledRow]) -> Plan:
        """Returns the plan of a step.

        Args:
            rows: its rows, which stand in this order in the plan label `MAIN_LABEL`.

        Returns:
            The plan; what it refers to stays as it is until `end_step`.

        Raises:
            LayoutError: there is no plan, and nothing has changed; `OutOfPagesError` where pages were short.
            SessionLostError: the session has ended, or the planner does not answer.
            ProtocolError: the planner ended the session because a message broke the protocol.
        """
        session = self.session
        layout = session.build_layout([Segment(row.request.arrival, MAIN_LABEL, row.num_tokens) for row in rows])
        session.submit(layout)
        try:
            return session.next_plan(self._plan_timeout_seconds)
        except TimeoutError as error:
            raise SessionLostError(f"no answer in {self._plan_timeout_seconds:g} s") from error

    def end_step(self, plan: Plan, *, is_kept: bool) -> None:
        """Says that a step has run and its plan is no longer read.

        Args:
            plan: the step's plan.
            is_kept: whether the tokens it wrote are kept.
        """
        session = self.session
        if is_kept:
            session.commit(plan.step_id)
            session.release(plan.step_id)
        else:
            session.discard_from(plan.step_id)

    def drop(self, request: Hashable) -> None:
        """Gives up the pages of a request; without a session there are none.

        Args:
            request: its `arrival`.
        """
        if self._session is not None:
            self._session.drop(request)

    def flush(self) -> None:
        """Sends what has not been sent.

        Raises:
            SessionLostError: the session has ended.
            ProtocolError: the planner ended the session because a message broke the protocol.
        """
        self.session.flush()

    def close(self) -> None:
        """Ends the session, if there is one. May be called again."""
        session, self._session = self._session, None
        client, self._client = self._client, None
        if session is not None:
            session.close()
        if client is not None:
            client.close()
