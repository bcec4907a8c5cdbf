"""A planner's sessions as the texts that tables show."""

from collections.abc import Iterable, Sequence

from ringplan.planner.v1 import planner_pb2 as pb
from ringplan_cli.plain_messages import name_value
from ringplan_cli.tables import Column

_KIBIBYTES = 1024
_NONE = "-"

SESSION_COLUMNS = (
    Column("session", is_figure=False),
    Column("engine", is_figure=False),
    Column("age"),
    Column("free pages"),
    Column("streams"),
    Column("in flight"),
    Column("leased sets"),
    Column("cache", is_figure=False),
    Column("hits"),
    Column("misses"),
)
STREAM_COLUMNS = (
    Column("stream"),
    Column("length"),
    Column("planned"),
    Column("in flight"),
    Column("pages"),
    Column("page numbers", is_figure=False),
)
LEASE_COLUMNS = (Column("step"), Column("region"), Column("set"), Column("age"))
CACHE_COLUMNS = (
    Column("plan labels", is_figure=False),
    Column("rows"),
    Column("hits"),
    Column("misses", is_figure=False),
)


def build_session_rows(summaries: Iterable[pb.SessionSummary]) -> list[list[str]]:
    """Returns a row of `SESSION_COLUMNS` for each session."""
    return [
        [
            summary.session,
            summary.engine_name or _NONE,
            write_seconds(summary.age_seconds),
            f"{summary.num_free_pages:,} of {summary.num_pages - 1:,}",
            f"{summary.num_streams:,}",
            f"{summary.num_steps_in_flight:,}",
            f"{summary.num_leased_sets} of {summary.ring_depth}",
            name_value(pb.CacheMode.DESCRIPTOR, summary.cache_mode),
            f"{summary.num_cache_hits:,}",
            f"{_count_misses(summary.cache_misses):,}",
        ]
        for summary in summaries
    ]


def build_summary_rows(summary: pb.SessionSummary) -> list[tuple[str, str]]:
    """Returns a name and a value for each figure of a session."""
    num_pages, num_free = summary.num_pages - 1, summary.num_free_pages
    pages = f"{num_free:,} free, {num_pages - num_free:,} in use, {summary.num_shared_pages:,} shared"
    misses = f"{_count_misses(summary.cache_misses):,} misses, {summary.num_cache_mismatches:,} mismatches"
    cache_mode = name_value(pb.CacheMode.DESCRIPTOR, summary.cache_mode)
    drill = ", a drill is pending" if summary.is_drill_pending else ""
    return [
        ("engine", summary.engine_name or _NONE),
        ("age", write_seconds(summary.age_seconds)),
        ("pages", f"{num_pages:,} of {summary.page_size:,} tokens: {pages}"),
        ("streams", f"{summary.num_streams:,}"),
        ("steps in flight", f"{summary.num_steps_in_flight:,}"),
        ("ring", f"{summary.num_leased_sets} of {summary.ring_depth} sets leased"),
        ("memory", f"{_write_bytes(summary.region_bytes)}, {_write_bytes(summary.locked_bytes)} of it locked"),
        ("plan cache", f"{cache_mode}: {summary.num_cache_hits:,} hits, {misses}{drill}"),
        ("misses", write_misses(summary.cache_misses)),
    ]


def build_stream_rows(streams: Iterable[pb.StreamState]) -> list[list[str]]:
    """Returns a row of `STREAM_COLUMNS` for each stream."""
    return [
        [
            str(stream.stream),
            f"{stream.committed_length:,}",
            f"{stream.planned_length:,}",
            f"{stream.num_steps_in_flight:,}",
            f"{len(stream.pages):,}",
            write_ranges(stream.pages),
        ]
        for stream in streams
    ]


def build_lease_rows(leases: Iterable[pb.LeaseState]) -> list[list[str]]:
    """Returns a row of `LEASE_COLUMNS` for each lease."""
    return [
        [str(lease.step_id), str(lease.region_id), str(lease.set_index), write_seconds(lease.age_seconds)]
        for lease in leases
    ]


def build_cache_rows(entries: Iterable[pb.CacheEntryState]) -> list[list[str]]:
    """Returns a row of `CACHE_COLUMNS` for each cached plan."""
    return [
        [", ".join(entry.plan_labels), f"{entry.num_rows:,}", f"{entry.num_hits:,}", write_misses(entry.misses)]
        for entry in entries
    ]


def write_misses(misses: Iterable[pb.CacheMissCount]) -> str:
    """Returns misses by reason, the most frequent first, such as `rows 3, cold 1`."""
    counts = sorted(misses, key=lambda miss: -miss.num_misses)
    return (
        ", ".join(f"{name_value(pb.CacheMissReason.DESCRIPTOR, miss.reason)} {miss.num_misses:,}" for miss in counts)
        or "none"
    )


def write_ranges(numbers: Sequence[int]) -> str:
    """Returns numbers in their order, with runs of rising ones as ranges, such as `1-3 7 5-6`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or _NONE


def write_seconds(seconds: float) -> str:
    """Returns a length of time as people read it."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _count_misses(misses: Iterable[pb.CacheMissCount]) -> int:
    return sum(miss.num_misses for miss in misses)


def _write_bytes(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if size < _KIBIBYTES:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= _KIBIBYTES
    return f"{size:,.1f} GiB"
