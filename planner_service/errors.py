"""Every error the planner raises. None of them knows gRPC; `rpc.py` maps classes to status codes."""

_MAX_SHOWN_CHARACTERS = 64


class PlannerError(Exception):
    """Base of every error the planner raises."""


class LayoutError(PlannerError):
    """Base of the errors that refuse one layout: it changes nothing, and the session goes on.

    Attributes:
        stream: the stream at fault, or None.
        step_id: the first step that has no plan. Set where the client raises it, 0 before.
        num_steps: how many steps have none: more than one where a run ended early.
    """

    stream: int | None = None
    step_id: int = 0
    num_steps: int = 1


class OutOfPagesError(LayoutError):
    """Raised when the pool has fewer free pages than a step needs.

    Attributes:
        num_short: how many pages were missing.
        num_free: how many pages were free, or None in the client: the wire does not say.
    """

    def __init__(self, num_short: int, num_free: int | None) -> None:
        if num_free is None:
            super().__init__(f"{num_short} pages are missing")
        else:
            super().__init__(f"the step needs {num_short + num_free} pages and {num_free} are free")
        self.num_short = num_short
        self.num_free = num_free


class InvalidLayoutError(LayoutError):
    """Raised when a layout breaks a rule; the message names the value and the rule."""

    def __init__(self, message: str, stream: int | None = None) -> None:
        super().__init__(message)
        self.stream = stream


class UnknownStreamError(LayoutError):
    """Raised when a stream number is outside the session's range."""

    def __init__(self, stream: int, max_streams: int) -> None:
        super().__init__(f"stream {stream} is outside 0..{max_streams - 1}")
        self.stream = stream
        self.max_streams = max_streams


class RingTimeoutError(LayoutError):
    """Raised when no buffer set came free in time.

    Attributes:
        oldest_step_id: the step whose lease is the oldest.
        oldest_age_seconds: how long that lease has been out.
    """

    def __init__(self, oldest_step_id: int, oldest_age_seconds: float) -> None:
        super().__init__(
            f"no buffer set came free: step {oldest_step_id} has held its set for {oldest_age_seconds:.3f} s"
        )
        self.oldest_step_id = oldest_step_id
        self.oldest_age_seconds = oldest_age_seconds


class RegionUnavailableError(LayoutError):
    """Raised when there is no memory for a region.

    Attributes:
        num_bytes: the size that was asked for, or 0 in the client: the wire does not say.
    """

    def __init__(self, num_bytes: int, reason: str) -> None:
        super().__init__(f"a region of {num_bytes} bytes cannot be made: {reason}")
        self.num_bytes = num_bytes


class ProtocolError(PlannerError):
    """Raised when a message breaks the session's protocol; it ends the session."""


class InvalidOptionsError(PlannerError):
    """Raised when a session is opened with an option out of range.

    Attributes:
        field: the option's name.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class SocketError(PlannerError):
    """Base of the errors that keep a server from its unix socket."""


class SocketInUseError(SocketError):
    """Raised when another process serves the socket.

    Attributes:
        path: the socket.
        pid: the process that owns it, or None if that cannot be told.
    """

    def __init__(self, path: str, pid: int | None) -> None:
        super().__init__(f"{path} is in use by process {pid if pid is not None else '(unknown)'}")
        self.path = path
        self.pid = pid


class SocketPathError(SocketError):
    """Raised when a path cannot be a unix socket: too long, or something else stands there."""

    def __init__(self, path: str, rule: str) -> None:
        super().__init__(f"{path}: {rule}")
        self.path = path


class MalformedMessageError(ProtocolError):
    """Raised when a message cannot be read, or a field holds a value that its type does not have."""


class SessionLimitError(PlannerError):
    """Raised when a session is opened while as many as the planner takes are open.

    Attributes:
        max_sessions: how many it takes.
    """

    def __init__(self, max_sessions: int) -> None:
        super().__init__(f"{max_sessions} sessions are open, which is all this planner takes")
        self.max_sessions = max_sessions


class UnknownSessionError(PlannerError):
    """Raised when a session is asked for that is not open.

    Attributes:
        session: the name that was asked for.
    """

    def __init__(self, session: str) -> None:
        # gRPC carries this text as a header, and refuses long ones.
        shown = session if len(session) <= _MAX_SHOWN_CHARACTERS else session[:_MAX_SHOWN_CHARACTERS] + "..."
        super().__init__(f"no session named {shown!r} is open")
        self.session = session


class SessionNotNamedError(PlannerError):
    """Raised when a call leaves the session out and not exactly one is open.

    Attributes:
        num_open: how many are open.
    """

    def __init__(self, num_open: int) -> None:
        super().__init__(f"{num_open} sessions are open: name one of them" if num_open else "no session is open")
        self.num_open = num_open


class DrillRefusedError(PlannerError):
    """Raised when no mismatch can be made on purpose; the message says why."""


class ShuttingDownError(PlannerError):
    """Raised when a session is opened, or still open, while the planner ends."""

    def __init__(self) -> None:
        super().__init__("the planner is shutting down")


class RegionFolderError(PlannerError):
    """Raised when a folder cannot hold regions: not private to this user, or not to be made.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: str, rule: str) -> None:
        super().__init__(f"{path}: {rule}")
        self.path = path


class MetricsAddressError(PlannerError):
    """Raised when metrics cannot be served at their address.

    Attributes:
        address: the host and port.
    """

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"metrics cannot be served at {address}: {reason}")
        self.address = address
