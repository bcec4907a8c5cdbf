"""Errors that end a command with one clear line."""


class CommandError(Exception):
    """Raised when a command cannot do what it was asked; its text is all that the person sees.

    Attributes:
        exit_code: what the command ends with.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class BadSettingsError(CommandError):
    """Raised when a flag or an environment variable is unknown, malformed or out of range."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_code=2)
