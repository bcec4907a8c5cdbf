"""The open sessions of a planner: their names, their number, and what ends with them.

Owned by the event loop's thread.
"""

from collections.abc import Callable

from planner_service.errors import SessionLimitError, SessionNotNamedError, ShuttingDownError, UnknownSessionError
from planner_service.messages import SessionOptions, SessionSummary
from planner_service.metrics import PlannerMetrics, SessionMetrics
from planner_service.region import RegionFolder
from planner_service.session import Session


class OpenSessions:
    """The open sessions, oldest first.

    Args:
        folder: where their regions are made.
        metrics: where they are counted.
        max_sessions: how many may be open at once.
        ring_timeout_seconds: how long a step waits for a buffer set.
        num_cache_entries: how many layouts a session's plan cache keeps.
        clock: returns seconds; it never goes back.
    """

    def __init__(
        self,
        folder: RegionFolder,
        metrics: PlannerMetrics,
        *,
        max_sessions: int,
        ring_timeout_seconds: float,
        num_cache_entries: int,
        clock: Callable[[], float],
    ) -> None:
        self._folder = folder
        self._metrics = metrics
        self._max_sessions = max_sessions
        self._num_cache_entries = num_cache_entries
        self.ring_timeout_seconds = ring_timeout_seconds
        self._clock = clock
        self._sessions: dict[str, tuple[Session, SessionMetrics]] = {}
        self._num_opened = 0
        self._is_closed_to_new = False

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, options: SessionOptions) -> Session:
        """Makes a session.

        Args:
            options: what it is to be.

        Raises:
            ShuttingDownError: the planner takes no new sessions any more.
            SessionLimitError: as many as may be are open.
            RegionUnavailableError: there is no memory for its first region.
        """
        self.require_room()
        self._num_opened += 1
        name = f"session-{self._num_opened}"
        observer = self._metrics.observe_session(name)
        try:
            session = Session(
                name,
                options,
                self._folder.allocate,
                clock=self._clock,
                ring_timeout_seconds=self.ring_timeout_seconds,
                observer=observer,
                num_cache_entries=self._num_cache_entries,
            )
        except BaseException:
            observer.remove()
            raise
        self._sessions[name] = (session, observer)
        return session

    def require_room(self) -> None:
        """Refuses a session that could not be made now.

        Raises:
            ShuttingDownError: the planner takes no new sessions any more.
            SessionLimitError: as many as may be are open.
        """
        if self._is_closed_to_new:
            raise ShuttingDownError
        if len(self._sessions) >= self._max_sessions:
            raise SessionLimitError(self._max_sessions)

    def remove(self, session: Session) -> None:
        """Closes a session: its pages, its region and its series are gone."""
        _, observer = self._sessions.pop(session.name)
        try:
            session.close()
        finally:
            observer.remove()

    def get(self, name: str) -> Session:
        """Returns a session by its name.

        Raises:
            UnknownSessionError: no session of this name is open.
        """
        entry = self._sessions.get(name)
        if entry is None:
            raise UnknownSessionError(name)
        return entry[0]

    def get_named_or_only(self, name: str) -> Session:
        """Returns a session by its name, or the only one if the name is empty.

        Raises:
            UnknownSessionError: no session of this name is open.
            SessionNotNamedError: the name is empty, and not exactly one session is open.
        """
        if not name and len(self._sessions) != 1:
            raise SessionNotNamedError(len(self._sessions))
        return self.get(name or next(iter(self._sessions)))

    def summarize(self) -> tuple[SessionSummary, ...]:
        """Returns the sessions in figures, oldest first."""
        return tuple([session.summarize() for session, _ in self._sessions.values()])

    def refuse_new(self) -> None:
        """Takes no new sessions from now on."""
        self._is_closed_to_new = True
