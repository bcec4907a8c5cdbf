"""The planner's settings: the only source of their defaults, and the only module that reads the environment."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from planner_service.core.cache import DEFAULT_NUM_ENTRIES
from planner_service.messages import MAX_RING_DEPTH, CacheMode

ENVIRONMENT_PREFIX = "RINGPLAN_PLANNER_"


def build_default_socket() -> Path:
    """Returns where a planner serves unless told otherwise: in this user's runtime folder, or else in /tmp."""
    runtime_folder = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime_folder) / "ringplan" if runtime_folder else Path(f"/tmp/ringplan-{os.geteuid()}")
    return folder / "planner.sock"


def build_default_ring_dir() -> Path:
    """Returns where a planner keeps its regions unless told otherwise."""
    return Path(f"/dev/shm/ringplan-{os.geteuid()}")


def build_default_capture_dir() -> Path:
    """Returns where a planner writes captures unless told otherwise: beside its socket."""
    return build_default_socket().parent / "captures"


def _parse_cache_mode(value: Any) -> Any:
    """Takes a mode by its name in any case, or by its number, also as text."""
    if isinstance(value, str):
        word = value.strip()
        return int(word) if word.isdecimal() else CacheMode.__members__.get(word.upper(), value)
    return value


def _parse_socket(value: Any) -> Any:
    """Takes a path with or without "unix:" before it."""
    if isinstance(value, str):
        value = value.removeprefix("unix:")
        if not value:
            raise ValueError("a path is required")
    return value


def _require_path(value: Any) -> Any:
    """Refuses a path that is empty or that no message can tell to an engine.

    An empty one would mean the folder that the planner happens to be started in.
    """
    if value == "":
        raise ValueError("a path is required")
    try:
        str(value).encode()
    except UnicodeEncodeError as error:
        raise ValueError("the path must be valid UTF-8") from error
    return value


class PlannerSettings(BaseSettings):
    """What a planner process is to be.

    Each setting may be given by name or as an environment variable with the prefix `RINGPLAN_PLANNER_`. An unknown one
    is an error, as is an unknown environment variable with that prefix.

    Raises:
        pydantic.ValidationError: a setting is unknown, malformed or out of range; it names the setting.
    """

    model_config = SettingsConfigDict(env_prefix=ENVIRONMENT_PREFIX, extra="forbid", frozen=True)

    socket: Annotated[Path, BeforeValidator(_parse_socket)] = Field(
        default_factory=build_default_socket, description="The unix socket to serve, a path of at most 107 bytes."
    )
    ring_dir: Annotated[Path, BeforeValidator(_require_path)] = Field(
        default_factory=build_default_ring_dir,
        description="Folder for the regions of shared memory, on a tmpfs and private to this user.",
    )
    ring_depth: int = Field(
        2, ge=2, le=MAX_RING_DEPTH, description="Buffer sets in the ring of an engine that does not choose."
    )
    cache_mode: Annotated[CacheMode, BeforeValidator(_parse_cache_mode)] = Field(
        CacheMode.OFF, description="Plan cache of an engine that does not choose: off (0), on (1) or verify (2)."
    )
    cache_entries: int = Field(
        DEFAULT_NUM_ENTRIES, ge=1, le=1_024, description="Decode layouts that the plan cache of a session keeps."
    )
    capture_dir: Annotated[Path, BeforeValidator(_require_path)] = Field(
        default_factory=build_default_capture_dir,
        description="Folder for captures: what replays a mismatch that the verify mode found.",
    )
    max_captures: int = Field(32, ge=0, le=10_000, description="Captures to write; later mismatches are only counted.")
    allow_drills: bool = Field(
        False, description="Allow `ringplan drill mismatch`: a mismatch made on purpose, which the verify mode finds."
    )
    ring_timeout_seconds: float = Field(
        30.0, ge=0.01, le=86_400, description="How long a step waits for a buffer set before it fails."
    )
    metrics_host: str = Field("127.0.0.1", min_length=1, description="Where to serve metrics over HTTP.")
    metrics_port: int = Field(9464, ge=0, le=65_535, description="Port of the metrics; 0 takes a free one.")
    max_sessions: int = Field(64, ge=1, le=4_096, description="Sessions that may be open at once.")
    shutdown_grace_seconds: float = Field(
        10.0, ge=0, le=3_600, description="How long open sessions may go on after a request to stop."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="The least important to log.")
    log_json: bool = Field(False, description="Log one JSON object a line.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_variables(cls, values: Any) -> Any:
        known = {ENVIRONMENT_PREFIX + name.upper() for name in cls.model_fields}
        for name in os.environ:
            if name.upper().startswith(ENVIRONMENT_PREFIX) and name.upper() not in known:
                raise ValueError(f"the environment variable {name} is no setting of the planner")
        return values
