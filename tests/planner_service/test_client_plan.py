"""Plans are views of shared memory: right in place, read-only, and alive as long as anything refers to them."""

import gc
from pathlib import Path

import numpy as np
import pytest

from planner_service.client_layout import LayoutLabel, Segment, build_layout
from planner_service.client_numbers import StreamNumbers
from planner_service.client_plan import PlanReader
from planner_service.core.arrays import ARRAY_NAMES
from planner_service.errors import RegionUnavailableError
from planner_service.messages import PlanSource
from ringplan.planner.v1 import planner_pb2 as pb
from tests.planner_service.scripted_planner import SET_BYTES, ScriptedPlanner, build_plan


def _labels(*rows: tuple[str, int]) -> tuple[LayoutLabel, ...]:
    segments = [Segment(f"r{number}", name) for name, count in rows for number in range(count)]
    return build_layout(StreamNumbers(64), segments).labels


def _is_mapped(path: str) -> bool:
    return path in Path("/proc/self/maps").read_text()


def test_views_stand_where_the_handle_says(tmp_path: Path) -> None:
    """Each array starts at its offset from the set's start, has the size its counts give, and is int32."""
    region = ScriptedPlanner(tmp_path).build_region()
    Path(region.path).write_bytes(np.arange(region.num_bytes // 4, dtype="<i4").tobytes())
    reader = PlanReader()
    assert reader.map_region(region)
    wire = pb.Plan(step_id=9, region_id=1, set_index=2, num_bytes=1024, source=pb.PLAN_SOURCE_CACHED)
    wire.plan_labels.add(name="main", num_rows=2, num_tokens=5, num_indices=3, offsets=[0, 64, 128, 192, 256, 320, 384])
    plan = reader.read(wire, _labels(("main", 2)))
    first = 2 * SET_BYTES // 4  # each item holds its own index
    sizes = {"qo_indptr": 3, "paged_kv_indptr": 3, "paged_kv_indices": 3, "paged_kv_last_page_len": 2, "kv_lens": 2}
    for place, name in enumerate(ARRAY_NAMES):
        view = getattr(plan.labels["main"], name)
        start = first + place * 16
        assert view.dtype == np.int32
        assert view.tolist() == list(range(start, start + sizes.get(name, 5))), name
    assert (plan.step_id, plan.source, plan.region_id) == (9, PlanSource.CACHED, 1)
    assert (plan.set_offset, plan.num_bytes) == (2 * SET_BYTES, 1024)
    assert plan.labels["main"].extent.offsets == (0, 64, 128, 192, 256, 320, 384)
    assert plan.labels["main"].rows == (("r0", "main"), ("r1", "main"))


def test_views_are_read_only_and_the_region_is_not(tmp_path: Path) -> None:
    """Nobody changes a plan by accident; the region's bytes are writable, as torch wants them, and one object."""
    reader = PlanReader()
    reader.map_region(ScriptedPlanner(tmp_path).build_region())
    first, second = (reader.read(build_plan(step), _labels(("main", 1))) for step in (1, 2))
    with pytest.raises(ValueError, match="read-only"):
        first.labels["main"].kv_lens[0] = 1
    assert first.region_buffer.flags.writeable
    assert first.region_buffer.dtype == np.uint8
    assert first.region_buffer.nbytes == 4 * SET_BYTES
    assert first.region_buffer is second.region_buffer


def test_a_view_shows_what_is_written_to_the_file(tmp_path: Path) -> None:
    """Plans are not copied: what the planner writes to the region is what the engine reads."""
    region = ScriptedPlanner(tmp_path).build_region()
    reader = PlanReader()
    reader.map_region(region)
    plan = reader.read(build_plan(1), _labels(("main", 1)))
    with Path(region.path).open("r+b") as file:
        file.seek(plan.set_offset + plan.labels["main"].extent.offsets[ARRAY_NAMES.index("kv_lens")])
        file.write((77).to_bytes(4, "little"))
    assert plan.labels["main"].kv_lens.tolist() == [77]


def test_labels_keep_the_layouts_order_whatever_the_wires(tmp_path: Path) -> None:
    """The engine sees plan labels in its layout's order."""
    reader = PlanReader()
    reader.map_region(ScriptedPlanner(tmp_path).build_region())
    plan = reader.read(build_plan(1, rows=(("img", 2), ("both", 3))), _labels(("both", 3), ("img", 2)))
    assert list(plan.labels) == ["both", "img"]
    assert [len(arrays.kv_lens) for arrays in plan.labels.values()] == [3, 2]


def test_page_copies_are_pairs(tmp_path: Path) -> None:
    """Page copies come as rows of (source page, target page); where there are none, as no rows."""
    reader = PlanReader()
    reader.map_region(ScriptedPlanner(tmp_path).build_region())
    wire = build_plan(1)
    wire.page_copies_before = np.array([5, 6, 7, 8], dtype="<i4").tobytes()
    plan = reader.read(wire, _labels(("main", 1)))
    assert plan.page_copies_before.tolist() == [[5, 6], [7, 8]]
    assert plan.page_copies_after.shape == (0, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"region_id": 3},
        {"set_index": 4},
        {"num_bytes": 4 * SET_BYTES},
        {"source": pb.PLAN_SOURCE_UNSPECIFIED},
    ],
)
def test_a_handle_outside_its_region_is_refused(tmp_path: Path, change: dict[str, int]) -> None:
    """A handle that names no region, no set, no source or more bytes than there are is an error, never a wild view."""
    reader = PlanReader()
    reader.map_region(ScriptedPlanner(tmp_path).build_region())
    wire = build_plan(1)
    for name, value in change.items():
        setattr(wire, name, value)
    with pytest.raises(ValueError, match=r"step 1|region 3"):
        reader.read(wire, _labels(("main", 1)))


@pytest.mark.parametrize("rows", [(("main", 2),), (("other", 1),), (("main", 1), ("other", 1))])
def test_a_plan_that_does_not_fit_its_layout_is_refused(tmp_path: Path, rows: tuple[tuple[str, int], ...]) -> None:
    """Plan labels and rows must be those that were asked for."""
    reader = PlanReader()
    reader.map_region(ScriptedPlanner(tmp_path).build_region())
    with pytest.raises(ValueError, match="layout"):
        reader.read(build_plan(1, rows=rows), _labels(("main", 1)))


def test_an_older_region_is_unmapped_with_its_last_view(tmp_path: Path) -> None:
    """A grown ring's old region goes when a plan of the new one has come and nothing refers to the old any more."""
    planner, reader = ScriptedPlanner(tmp_path), PlanReader()
    old, new = planner.build_region(1), planner.build_region(2)
    reader.map_region(old)
    first = reader.read(build_plan(1), _labels(("main", 1)))
    view = first.labels["main"].positions
    reader.map_region(new)
    reader.read(build_plan(2, region_id=2), _labels(("main", 1)))
    del first
    gc.collect()
    assert _is_mapped(old.path)
    assert view.tolist() == [0]
    del view
    gc.collect()
    assert not _is_mapped(old.path)
    assert _is_mapped(new.path)


def test_a_region_that_cannot_be_mapped_matters_only_when_a_plan_stands_there(tmp_path: Path) -> None:
    """The planner may have given a region up before its announcement was read; a plan in it is an error."""
    planner, reader = ScriptedPlanner(tmp_path), PlanReader()
    assert reader.map_region(planner.build_region(1))
    gone = planner.build_region(2)
    Path(gone.path).unlink()
    assert not reader.map_region(gone)
    reader.read(build_plan(1), _labels(("main", 1)))
    with pytest.raises(RegionUnavailableError):
        reader.read(build_plan(2, region_id=2), _labels(("main", 1)))
    with pytest.raises(RegionUnavailableError):
        reader.check_regions()
