"""Errors of the client that are not errors of a layout: the planner is not there, or the session has ended."""


class ClientError(Exception):
    """Base of the errors that concern the connection to the planner."""


class PlannerUnavailableError(ClientError):
    """Raised when a planner cannot be reached, or does not open a session.

    Attributes:
        target: the planner's address.
        status: the gRPC status code's name, or "" where there was no answer.
    """

    def __init__(self, target: str, reason: str, status: str = "") -> None:
        super().__init__(f"no planner at {target}: {reason}")
        self.target = target
        self.status = status


class SessionLostError(ClientError):
    """Raised when a session has ended: its pages and plans are gone, and a new one must be opened.

    Attributes:
        reason: what ended it.
        status: the gRPC status code's name; "OK" where the planner ended it in peace, "" where this side did.
    """

    def __init__(self, reason: str, status: str = "") -> None:
        super().__init__(f"the planner session has ended: {reason}" + (f" ({status})" if status else ""))
        self.reason = reason
        self.status = status
