"""What the manifests of deploy/kubernetes set, against what the two processes do with it: settings, memory, time."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from engine_service.config import EngineSettings
from engine_service.plan_pipeline import choose_ring_depth
from planner_service.config import PlannerSettings
from planner_service.core.arrays import build_extents
from planner_service.core.capture import MAX_STEPS
from planner_service.core.ring import RegionDescription, Ring, choose_set_bytes
from tests.deploy.manifests import (
    KUBERNETES,
    TARGETS,
    Document,
    find_container,
    find_pod_spec,
    parse_quantity,
    read_environment,
    render,
)

every_target = pytest.mark.parametrize("target", TARGETS)
# Beside the grace periods, as the comment in deployment.yaml has them.
ENGINE_END_SECONDS = 10
PLANNER_END_SECONDS = 5
# The longest context that the comments reckon with.
LONGEST_CONTEXT = 32_768
NUM_PAGES = 1_000_000
PLANNER_PROCESS_BYTES = 200 << 20


def read_settings(monkeypatch: pytest.MonkeyPatch, target: str) -> tuple[PlannerSettings, EngineSettings]:
    """Returns the settings of the two processes as they would read them; an unknown one is an error."""
    documents = render(target)
    pod_spec = find_pod_spec(documents)
    for name in ("planner", "engine"):
        for variable, value in read_environment(documents, pod_spec, name).items():
            monkeypatch.setenv(variable, value)
    return PlannerSettings(), EngineSettings()


def find_volume(pod_spec: Document, name: str) -> Document:
    """Returns a volume of a pod."""
    volume: Document
    (volume,) = [volume for volume in pod_spec["volumes"] if volume["name"] == name]
    return volume


@every_target
def test_settings_are_known_and_the_two_sides_agree(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """The engine looks for the planner where it serves, and its threads are the cores that the container asks for."""
    planner, engine = read_settings(monkeypatch, target)
    assert engine.planner == f"unix:{planner.socket}"
    assert engine.num_threads == int(
        find_container(find_pod_spec(render(target)), "engine")["resources"]["requests"]["cpu"]
    )
    assert engine.engine_name == "ringplan-0"
    assert engine.log_json
    assert planner.log_json


@every_target
def test_services_are_not_told_in_variables(target: str) -> None:
    """A Service "ringplan-engine" would set RINGPLAN_ENGINE_SERVICE_HOST, and the engine refuses unknown settings."""
    assert find_pod_spec(render(target))["enableServiceLinks"] is False


@every_target
def test_whatever_a_process_writes_to_is_a_volume(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """The root is read-only; socket and ring are in memory, at one path for both; nobody writes to the model."""
    planner, engine = read_settings(monkeypatch, target)
    pod_spec = find_pod_spec(render(target))
    mounts = {
        name: {Path(mount["mountPath"]): mount for mount in find_container(pod_spec, name)["volumeMounts"]}
        for name in ("planner", "engine")
    }

    def find_mount(name: str, path: Path) -> Document:
        return next(mounts[name][folder] for folder in (path, *path.parents) if folder in mounts[name])

    shared = find_mount("planner", planner.socket)
    assert find_mount("planner", planner.ring_dir) is shared
    assert find_mount("engine", planner.socket) == shared
    assert find_volume(pod_spec, shared["name"])["emptyDir"]["medium"] == "Memory"
    written = [find_mount("planner", planner.capture_dir), find_mount("engine", engine.model_cache_dir)]
    written += [find_mount(name, Path("/tmp")) for name in mounts]
    for mount in (shared, *written):
        assert not mount.get("readOnly", False)
    assert find_mount("engine", Path(engine.model))["readOnly"] is True
    home = {read_environment(render(target), pod_spec, name)["HOME"] for name in mounts}
    assert home == {"/tmp"}


@every_target
def test_grace_period_is_the_sum_of_what_it_is_for(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """The time to leave the endpoints, the engine's running requests and last step, and the planner's end after it."""
    planner, engine = read_settings(monkeypatch, target)
    pod_spec = find_pod_spec(render(target))
    pre_stop = find_container(pod_spec, "engine")["lifecycle"]["preStop"]["sleep"]["seconds"]
    total = (
        pre_stop
        + engine.shutdown_grace_seconds
        + ENGINE_END_SECONDS
        + planner.shutdown_grace_seconds
        + PLANNER_END_SECONDS
    )
    assert pod_spec["terminationGracePeriodSeconds"] == math.ceil(total)


def reckon_shared_bytes(engine: EngineSettings) -> int:
    """The formula of the comment in deployment.yaml."""
    pages = math.ceil(LONGEST_CONTEXT / engine.page_size)
    set_bytes = 4 * (2 * max(engine.max_step_tokens, 4096) + engine.max_running_requests * (pages + 16))
    return 4 * 2 * engine.plan_ahead * set_bytes


@every_target
def test_shared_memory_is_as_large_as_the_formula_says(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """The volume holds it, and the planner's container, where it counts, has room for it beside the process."""
    _, engine = read_settings(monkeypatch, target)
    pod_spec = find_pod_spec(render(target))
    shared_bytes = reckon_shared_bytes(engine)
    limit = parse_quantity(find_volume(pod_spec, "shared")["emptyDir"]["sizeLimit"])
    assert shared_bytes <= limit
    assert limit + PLANNER_PROCESS_BYTES <= parse_quantity(
        find_container(pod_spec, "planner")["resources"]["limits"]["memory"]
    )


@every_target
def test_captures_do_not_fill_their_volume(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """It holds those of three starts, each of the largest plan there can be: a pod that fills a volume is evicted."""
    planner, engine = read_settings(monkeypatch, target)
    num_indices = engine.max_running_requests * math.ceil(LONGEST_CONTEXT / engine.page_size)
    # The plan twice, as it was cached and as it should be, and the steps before it with a segment for each row.
    arrays_bytes = 2 * num_indices * len(f"{NUM_PAGES}, ")
    steps_bytes = MAX_STEPS * 2 * engine.max_running_requests * len('["stream-10000", "cfg_text", 1], ')
    limit = parse_quantity(find_volume(find_pod_spec(render(target)), "captures")["emptyDir"]["sizeLimit"])
    assert 3 * planner.max_captures * (arrays_bytes + steps_bytes) <= limit


@pytest.mark.parametrize(
    ("target", "comment"),
    [("overlays/cpu", "base/deployment.yaml"), ("overlays/cuda", "overlays/cuda/kustomization.yaml")],
)
def test_comments_have_the_figures_of_their_settings(
    monkeypatch: pytest.MonkeyPatch, target: str, comment: str
) -> None:
    """What the comment works out is what the formula gives for the settings beside it."""
    _, engine = read_settings(monkeypatch, target)
    text = (KUBERNETES / comment).read_text()
    ((left, mebibytes),) = re.findall(r"(4 \* [\d *+()/]+) = (\d+) MiB", text)
    assert eval(left) == reckon_shared_bytes(engine)  # The pattern lets numbers and operators through.
    assert int(mebibytes) == reckon_shared_bytes(engine) >> 20


class PlainMemory:
    """A region that is no file: only its size is of interest here."""

    def __init__(self, region_id: int, num_sets: int, set_bytes: int) -> None:
        offsets = tuple(range(0, num_sets * set_bytes, set_bytes))
        self.description = RegionDescription(region_id, "", num_sets * set_bytes, set_bytes, offsets)
        self.buffer = np.empty(num_sets * set_bytes, np.uint8)
        self.locked_bytes = 0

    def unlink(self) -> None:
        """There is no name."""

    def close(self) -> None:
        """There is nothing to give up."""


@pytest.mark.parametrize("target", ["overlays/cpu", "overlays/cuda"])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_formula_covers_whatever_the_ring_grows_to(
    monkeypatch: pytest.MonkeyPatch, target: str, num_labels: int
) -> None:
    """Plans that grow step by step up to the largest there can be, with a lease left in each region they outgrow."""
    _, engine = read_settings(monkeypatch, target)
    depth = engine.ring_depth or choose_ring_depth(engine.plan_ahead)
    ring = Ring(depth, choose_set_bytes(NUM_PAGES, engine.max_running_requests), PlainMemory)
    step_id, largest = 0, ring.num_bytes
    for share in np.linspace(0, 1, 2_000):
        needed = measure_plan(engine, num_labels, float(share))
        has_grown = needed > ring.newest_region.description.set_bytes
        buffer_set = ring.find_free_set(needed)
        if has_grown and ring.num_leased + 1 < depth:
            step_id += 1
            ring.lease(buffer_set, step_id, 0.0)
        largest = max(largest, ring.num_bytes)
    assert ring.newest_region.description.set_bytes >= measure_plan(engine, num_labels, 1.0)
    assert largest <= reckon_shared_bytes(engine)


def measure_plan(engine: EngineSettings, num_labels: int, share: float) -> int:
    """Returns the bytes of a plan of every running request, whose contexts have this share of their longest length.

    Rows are padded up to the next power of two for each plan label, with a token and a page for each row of padding;
    the step has as many tokens as it may have.
    """
    num_rows = engine.max_running_requests // num_labels
    num_padded = 2 * num_rows - 1
    pages = math.ceil(LONGEST_CONTEXT * share / engine.page_size)
    num_indices = num_rows * pages + num_padded - num_rows
    num_tokens = engine.max_step_tokens // num_labels + num_padded - num_rows
    return build_extents([(str(label), num_padded, num_tokens, num_indices) for label in range(num_labels)])[1]
