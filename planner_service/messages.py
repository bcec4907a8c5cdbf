"""What goes into a session and what comes out of it, as plain values: `rpc.py` turns them into protos and back."""

from dataclasses import dataclass, field
from enum import Enum

from planner_service.core.arrays import ArraysExtent
from planner_service.core.layout import StepLayout, StreamOperation
from planner_service.core.plan import CacheMode, MissReason, PlanSource
from planner_service.core.ring import MAX_SET_BYTES, RegionDescription
from planner_service.core.rows import MAX_STEP_TOKENS
from planner_service.errors import InvalidOptionsError, LayoutError

__all__ = [
    "ArraysExtent",
    "CacheEntryDescription",
    "CacheMode",
    "LeaseDescription",
    "MissCounts",
    "MissReason",
    "PlanFailed",
    "PlanReady",
    "PlanSource",
    "RegionDescription",
    "SessionDump",
    "SessionMessage",
    "SessionOptions",
    "SessionReply",
    "SessionSummary",
    "StreamDescription",
    "WaitKind",
]

MissCounts = tuple[tuple[MissReason, int], ...]  # reasons that came up, and how often

MAX_PAGE_SIZE = 65_536
MAX_STREAMS = 1 << 20
MAX_RING_DEPTH = 1_024
MAX_SLOTS = (1 << 31) - MAX_STEP_TOKENS  # a length and one more step fit an int32
MAX_ENGINE_NAME_CHARACTERS = 128


class WaitKind(Enum):
    """Why a step waited for a buffer set: the engine had nothing to run, or it was still ahead."""

    STALL = 0
    BACKPRESSURE = 1


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """What a session is to be.

    Args:
        page_size: tokens a page holds.
        num_pages: pages in the pool, the sink page included.
        max_streams: streams are numbered 0 to `max_streams - 1`.
        ring_depth: buffer sets in the ring, at least 2.
        cache_mode: how decode plans are cached.
        engine_name: for people and logs.
        set_bytes: first size of a buffer set in bytes, or 0 for one that suits the other figures.

    Raises:
        InvalidOptionsError: an option is out of range.
    """

    page_size: int
    num_pages: int
    max_streams: int
    ring_depth: int = 2
    cache_mode: CacheMode = CacheMode.OFF
    engine_name: str = ""
    set_bytes: int = 0

    def __post_init__(self) -> None:
        self._require("page_size", 1, MAX_PAGE_SIZE)
        self._require("num_pages", 2, MAX_SLOTS // self.page_size)
        self._require("max_streams", 1, MAX_STREAMS)
        self._require("ring_depth", 2, MAX_RING_DEPTH)
        self._require("set_bytes", 0, MAX_SET_BYTES)
        if len(self.engine_name) > MAX_ENGINE_NAME_CHARACTERS:
            raise InvalidOptionsError("engine_name", f"more than {MAX_ENGINE_NAME_CHARACTERS} characters")

    def _require(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if not low <= value <= high:
            raise InvalidOptionsError(name, f"{value} is outside {low}..{high}")


@dataclass(frozen=True, slots=True)
class SessionMessage:
    """One message of the engine; its parts are applied in the order of its fields. 0 means nothing new."""

    released_through: int = 0
    committed_through: int = 0
    discard_from: int = 0
    region_mapped: int = 0
    operations: tuple[StreamOperation, ...] = ()
    layouts: tuple[StepLayout, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanReady:
    """A published plan: where it stands and what the engine copies around the step.

    Args:
        page_copies_before: packed little-endian int32 pairs (source page, target page).
        page_copies_after: the same, to be copied after the forward.
    """

    step_id: int
    region_id: int
    set_index: int
    num_bytes: int
    source: PlanSource
    extents: tuple[ArraysExtent, ...]
    page_copies_before: bytes = b""
    page_copies_after: bytes = b""


@dataclass(frozen=True, slots=True)
class PlanFailed:
    """Steps that have no plan: `num_steps` of them, from `step_id` on."""

    step_id: int
    num_steps: int
    error: LayoutError


@dataclass(frozen=True, slots=True)
class SessionReply:
    """What one message, or the passing of time, brought: new regions first, then results in step order."""

    regions: tuple[RegionDescription, ...] = ()
    results: tuple[PlanReady | PlanFailed, ...] = ()


@dataclass(frozen=True, slots=True)
class StreamDescription:
    """One stream: lengths in tokens, pages in order, and how many steps in flight have a row of it."""

    stream: int
    committed_length: int
    planned_length: int
    pages: tuple[int, ...]
    num_steps_in_flight: int = 0


@dataclass(frozen=True, slots=True)
class LeaseDescription:
    """One leased buffer set."""

    step_id: int
    region_id: int
    set_index: int
    age_seconds: float


@dataclass(frozen=True, slots=True)
class CacheEntryDescription:
    """One cached plan; `misses` are those of its layout."""

    plan_labels: tuple[str, ...]
    num_rows: int
    num_hits: int
    misses: MissCounts = ()


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """A session in figures; without a lease its oldest one has no step and the age 0."""

    name: str
    options: SessionOptions
    age_seconds: float
    num_free_pages: int
    num_shared_pages: int
    num_streams: int
    num_steps_in_flight: int
    num_leased_sets: int
    region_bytes: int
    locked_bytes: int
    num_cache_hits: int = 0
    num_cache_mismatches: int = 0
    cache_misses: MissCounts = ()
    oldest_lease_step_id: int | None = None
    oldest_lease_age_seconds: float = 0.0
    is_drill_pending: bool = False


@dataclass(frozen=True, slots=True)
class SessionDump:
    """Everything a session holds."""

    summary: SessionSummary
    streams: tuple[StreamDescription, ...] = field(default=())
    leases: tuple[LeaseDescription, ...] = field(default=())
    cache_entries: tuple[CacheEntryDescription, ...] = field(default=())
