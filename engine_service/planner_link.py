"""The engine's side of its planner session: steps out, plans in, and a new session when one is lost."""

from collections.abc import Hashable
from typing import TYPE_CHECKING, Protocol

from engine_service.plan_pipeline import PlanPipeline
from engine_service.step_layout import StepSpec
from planner_service.client import (
    CacheMode,
    Plan,
    PlannerClient,
    PlannerSession,
    SessionLostError,
)

if TYPE_CHECKING:
    # It loads torch, which who only measures plans does without.
    from engine_service.plan_copies import PlanCopies


class StepPlanner(Protocol):
    """Plans an engine's steps, one at a time; used by the engine's thread alone. Requests are named by any key."""

    @property
    def is_connected(self) -> bool:
        """Whether there is a session."""

    def connect(self, timeout_seconds: float) -> None:
        """Opens a session; nothing of an earlier one remains."""

    @property
    def was_plan_ready(self) -> bool:
        """Whether the last step's plan was there when it was asked for."""

    def plan_step(self, spec: StepSpec, num_steady_steps: int = 1) -> Plan:
        """Returns the plan of a step; so many steps, this one included, will be equal unless something happens."""

    def end_step(self, plan: Plan, *, is_kept: bool) -> None:
        """Says that the step has run and its plan is no longer read; its tokens are kept or taken back."""

    def drop(self, request: Hashable) -> None:
        """Gives up what a request holds."""

    def flush(self) -> None:
        """Sends what has not been sent, and notices a lost session."""

    def close(self) -> None:
        """Ends the session, if there is one."""


class PlannerLink:
    """A step planner over the planner's socket, which plans ahead: see `PlanPipeline`.

    Args:
        target: the planner's address.
        page_size: tokens a page holds.
        num_pages: pages in the pool, the sink page included.
        max_running_requests: requests that hold pages at once.
        ring_depth: buffer sets in the ring; 0 leaves it to the planner.
        cache_mode: how decode plans are cached; None leaves it to the planner.
        engine_name: for the planner's logs.
        plan_ahead: steps to plan ahead while the batch stays the same; 0 plans each step when it begins.
        plan_timeout_seconds: a planner that has not answered for so long counts as lost.
        copies: what copies plans to the device; a set goes back once its copy has been made. None where the model reads
            plans where they are.
    """

    def __init__(  # noqa: PLR0913  # Each is a setting of its own.
        self,
        target: str,
        *,
        page_size: int,
        num_pages: int,
        max_running_requests: int,
        ring_depth: int = 0,
        cache_mode: CacheMode | None = None,
        engine_name: str = "",
        plan_ahead: int = 0,
        plan_timeout_seconds: float = 30.0,
        copies: "PlanCopies | None" = None,
    ) -> None:
        self._target = target
        self._page_size = page_size
        self._num_pages = num_pages
        self._max_streams = max_running_requests
        self._ring_depth = ring_depth
        self._cache_mode = cache_mode
        self._engine_name = engine_name
        self._plan_ahead = plan_ahead
        self._plan_timeout_seconds = plan_timeout_seconds
        self._copies = copies
        self._client: PlannerClient | None = None
        self._session: PlannerSession | None = None
        self._pipeline: PlanPipeline | None = None

    @property
    def is_connected(self) -> bool:
        """Whether there is a session."""
        return self._session is not None

    @property
    def was_plan_ready(self) -> bool:
        """Whether the last step's plan was there when it was asked for."""
        return self._pipeline is not None and self._pipeline.was_plan_ready

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
        self._pipeline = PlanPipeline(
            self._session,
            plan_ahead=self._plan_ahead,
            timeout_seconds=self._plan_timeout_seconds,
            fence=None if self._copies is None else self._copies.fence,
        )

    def plan_step(self, spec: StepSpec, num_steady_steps: int = 1) -> Plan:
        """Returns the plan of a step.

        Args:
            spec: the step.
            num_steady_steps: how many steps, this one included, will be equal to it unless something happens.

        Returns:
            The plan; what it refers to stays as it is until `end_step`.

        Raises:
            LayoutError: there is no plan, and nothing has changed; `OutOfPagesError` where pages were short.
            SessionLostError: the session has ended, or the planner does not answer.
            ProtocolError: the planner ended the session because a message broke the protocol.
        """
        try:
            return self._find_pipeline().plan_step(spec, num_steady_steps)
        except TimeoutError as error:
            raise SessionLostError(f"no answer in {self._plan_timeout_seconds:g} s") from error

    def end_step(self, plan: Plan, *, is_kept: bool) -> None:
        """Says that a step has run and its plan is no longer read.

        A session that is lost meanwhile shows when the next step is planned.

        Args:
            plan: the step's plan.
            is_kept: whether the tokens it wrote are kept.
        """
        self._find_pipeline().end_step(plan, is_kept=is_kept)

    def drop(self, request: Hashable) -> None:
        """Gives up the pages of a request; without a session there are none. Not during a step.

        Args:
            request: its `arrival`.
        """
        if self._pipeline is not None:
            self._pipeline.drop(request)

    def flush(self) -> None:
        """Discards what is planned ahead and sends what has not been sent.

        Raises:
            SessionLostError: the session has ended.
            ProtocolError: the planner ended the session because a message broke the protocol.
        """
        self._find_pipeline().flush()

    def close(self) -> None:
        """Ends the session, if there is one. May be called again."""
        self._pipeline = None
        session, self._session = self._session, None
        client, self._client = self._client, None
        if self._copies is not None:
            self._copies.end_session()
        if session is not None:
            session.close()
        if client is not None:
            client.close()

    def _find_pipeline(self) -> PlanPipeline:
        if self._pipeline is None:
            raise SessionLostError("there is no session")
        return self._pipeline
