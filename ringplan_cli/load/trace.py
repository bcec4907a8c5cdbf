"""Traces: a load as lines of JSON, written by hand, taken from a log, or left by an earlier load test."""

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ringplan_cli.errors import BadSettingsError
from ringplan_cli.load.schedule import MAX_REQUESTS, LoadRequest

# What a requests file has beside a trace's keys; a trace that is such a file carries them along to no effect.
MEASURED_KEYS = frozenset(
    {
        "number", "outcome", "reason", "details", "finish_reasons", "sent_seconds", "ended_seconds", "ttft_seconds",
        "inter_token_seconds", "longest_gap_seconds", "end_to_end_seconds", "usage_prompt_tokens", "answer_tokens",
    }
)  # fmt: skip
Count = Annotated[int, Field(ge=1, le=1 << 24)]


class TraceLine(BaseModel):
    """A line of a trace."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    arrival_seconds: float = Field(ge=0, le=1e9)
    prompt_tokens: Count | None = None
    text: str | None = Field(None, min_length=1)
    max_tokens: Count
    n: int = Field(1, ge=1, le=65_536)
    guidance_tokens: list[Count] = Field([], max_length=2)
    seed: int | None = Field(None, ge=0, lt=1 << 64)

    @model_validator(mode="after")
    def _check_prompt(self) -> "TraceLine":
        if (self.prompt_tokens is None) == (self.text is None):
            raise ValueError("give either prompt_tokens or text")
        return self


def read_trace(path: Path) -> list[LoadRequest]:
    """Reads a trace.

    Args:
        path: a file with one JSON object a line; empty lines are left out.

    Returns:
        Its requests in the order of their arrival.

    Raises:
        BadSettingsError: the file cannot be read, or a line is wrong; the message names the line and the key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadSettingsError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not 0 < len(numbered) <= MAX_REQUESTS:
        raise BadSettingsError(f"{path}: a trace has 1 to {MAX_REQUESTS:,} lines, not {len(numbered):,}")
    requests = [_read_line(line, f"{path}:{number}", number) for number, line in numbered]
    return sorted(requests, key=lambda request: request.arrival_seconds)


def _read_line(text: str, place: str, number: int) -> LoadRequest:
    try:
        values: Any = json.loads(text)
    except ValueError as error:
        raise BadSettingsError(f"{place}: no JSON: {error}") from error
    if not isinstance(values, dict):
        raise BadSettingsError(f"{place}: not a JSON object")
    try:
        line = TraceLine.model_validate({key: value for key, value in values.items() if key not in MEASURED_KEYS})
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        message = problem["msg"].removeprefix("Value error, ")
        raise BadSettingsError(f"{place}: {key + ': ' if key else ''}{message}") from error
    return LoadRequest(
        arrival_seconds=line.arrival_seconds,
        seed=number if line.seed is None else line.seed,
        max_tokens=line.max_tokens,
        prompt_tokens=line.prompt_tokens,
        text=line.text,
        n=line.n,
        guidance_tokens=tuple(line.guidance_tokens),
    )
