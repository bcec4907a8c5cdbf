"""How the engine's log records look: one line each, as text or as JSON."""

import json
import logging
import sys
import time
from typing import Any

_TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_PLAIN_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class TextFormatter(logging.Formatter):
    """Writes a record as a line of text: what callers put into a message starts no line and moves no cursor."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # As its base has it.
        """Returns the record's line, without its exception.

        Args:
            record: what was logged, its message in place.
        """
        record.message = "".join(
            [c if c.isprintable() else c.encode("unicode_escape").decode() for c in record.message]
        )
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object a line; what a call passes as `extra` becomes further members."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record as JSON.

        Args:
            record: what was logged.
        """
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        members: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        members |= {name: value for name, value in vars(record).items() if name not in _PLAIN_ATTRIBUTES}
        if record.exc_info:
            members["exception"] = self.formatException(record.exc_info)
        return json.dumps(members, default=str)


def configure_logs(level: str, *, as_json: bool) -> None:
    """Sends this process's log records to standard error, in place of whatever was configured.

    Args:
        level: the least important to write: debug, info, warning or error.
        as_json: whether to write JSON.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter(_TEXT_FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
