"""Describes a session, and the plans it publishes, as plain values."""

import struct
from collections.abc import Sequence

from planner_service.core.cache_misses import CacheTally
from planner_service.core.plan import BuiltPlan
from planner_service.core.planner import Planner
from planner_service.core.ring import Ring
from planner_service.messages import (
    CacheEntryDescription,
    LeaseDescription,
    PlanReady,
    SessionDump,
    SessionOptions,
    SessionSummary,
    StreamDescription,
)


def describe_plan(step_id: int, plan: BuiltPlan) -> PlanReady:
    """Returns what the engine is told of a plan."""
    return PlanReady(
        step_id=step_id,
        region_id=plan.buffer_set.region_id,
        set_index=plan.buffer_set.set_index,
        num_bytes=plan.num_bytes,
        source=plan.source,
        extents=plan.extents,
        page_copies_before=_pack_copies(plan.copies_before),
        page_copies_after=_pack_copies(plan.copies_after),
    )


def build_summary(
    name: str, options: SessionOptions, opened_seconds: float, now_seconds: float, planner: Planner, ring: Ring
) -> SessionSummary:
    """Returns a session in figures; times are those of its clock."""
    tally = CacheTally() if planner.cache is None else planner.cache.tally
    oldest = ring.leases[0] if ring.num_leased else None
    return SessionSummary(
        name=name,
        options=options,
        age_seconds=now_seconds - opened_seconds,
        num_free_pages=planner.pool.num_free,
        num_shared_pages=planner.pool.num_shared,
        num_streams=len(planner.streams.existing()),
        num_steps_in_flight=len(planner.steps),
        num_leased_sets=ring.num_leased,
        region_bytes=ring.num_bytes,
        locked_bytes=ring.locked_bytes,
        num_cache_hits=tally.num_hits,
        num_cache_mismatches=tally.num_mismatches,
        cache_misses=tuple(tally.misses.items()),
        oldest_lease_step_id=None if oldest is None else oldest.step_id,
        oldest_lease_age_seconds=0.0 if oldest is None else now_seconds - oldest.since_seconds,
        is_drill_pending=planner.is_drill_pending,
    )


def build_dump(summary: SessionSummary, planner: Planner, ring: Ring, now_seconds: float) -> SessionDump:
    """Returns everything a session holds."""
    streams = planner.streams
    num_steps_in_flight = planner.steps.count_by_stream()
    return SessionDump(
        summary=summary,
        streams=tuple(
            StreamDescription(
                stream=stream,
                committed_length=int(streams.committed[stream]),
                planned_length=int(streams.planned[stream]),
                pages=tuple(streams.tables.pages_of(stream).tolist()),
                num_steps_in_flight=int(num_steps_in_flight[stream]),
            )
            for stream in streams.existing().tolist()
        ),
        leases=tuple(
            LeaseDescription(lease.step_id, lease.region_id, lease.set_index, now_seconds - lease.since_seconds)
            for lease in ring.leases
        ),
        cache_entries=tuple(
            CacheEntryDescription(
                plan_labels=tuple(label.name for label in entry.rows.layout.plan_labels),
                num_rows=len(entry.rows.streams),
                num_hits=entry.tally.num_hits,
                misses=tuple(entry.tally.misses.items()),
            )
            for entry in (planner.cache.entries if planner.cache else ())
        ),
    )


def _pack_copies(copies: Sequence[tuple[int, int]]) -> bytes:
    return b"".join(struct.pack("<ii", source, target) for source, target in copies)
