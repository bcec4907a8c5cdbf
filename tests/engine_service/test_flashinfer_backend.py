"""`flashinfer_backend.py`: on a GPU that runs late every step gives what the reference backend gives for it."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.attention_backends.base import GraphBackend
from engine_service.attention_backends.flashinfer_backend import FlashInferBackend
from engine_service.attention_backends.flashinfer_schedule import Kernels
from engine_service.model_loading import LoadedModel, load_model
from engine_service.model_runner import ModelRunner
from tests.engine_service.churn import ChurnRequest, run_churn
from tests.engine_service.fake_flashinfer import RELEASES, LateGpu
from tests.engine_service.flashinfer_steps import CPU, CountingObserver, GraphSteps, LateSteps, Row
from tests.engine_service.hand_plans import build_plan_arrays
from tests.engine_service.tiny_models import save_tiny_checkpoint

DECODE_ROW = st.none() | st.tuples(st.integers(0, 12), st.just(1))
ANY_ROW = st.none() | st.tuples(st.integers(0, 12), st.integers(0, 5)).filter(any)
LABELS = st.lists(st.lists(DECODE_ROW, min_size=1, max_size=3) | st.lists(ANY_ROW, min_size=1, max_size=3), max_size=3)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A tiny Llama."""
    return load_model(save_tiny_checkpoint("llama", tmp_path_factory.mktemp("llama")))


def has_tokens(rows: list[Row]) -> bool:
    """Whether a plan label has query tokens: the model runner prepares no others."""
    return any(row is None or row[1] for row in rows)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("kernels", Kernels)
@pytest.mark.parametrize("is_sent", [True, False])
def test_a_run_of_mixed_steps_equals_the_reference(release: str, kernels: Kernels, is_sent: bool) -> None:
    """Decode over a page crossing, chunks, rows that only read, padding rows and several labels, in each release."""
    steps = LateSteps(4, kernels, release=release)
    for length in range(1, 7):
        steps.run([[(length, 1), (7, 1), None]], is_sent=is_sent)
    steps.run([[(0, 9)], [(3, 5), (6, 0), None, (8, 1)]], is_sent=is_sent)
    # The same pages as before, shared out differently.
    steps.run([[(1, 8)], [(4, 4), (5, 1), None, (6, 3)]], is_sent=is_sent)
    steps.run([[(3, 1)], [(2, 1)], [(9, 1), (4, 1)]], is_sent=is_sent)
    steps.check()


@settings(max_examples=60)
@given(
    steps=st.lists(LABELS.map(lambda labels: [rows for rows in labels if has_tokens(rows)]), min_size=1, max_size=6),
    repeats=st.integers(1, 3),
    page_size=st.sampled_from([1, 3, 4]),
    kernels=st.sampled_from(Kernels),
    verifies=st.booleans(),
    finishes=st.lists(st.booleans(), min_size=18, max_size=18),
)
def test_any_steps_equal_the_reference_however_late_the_device_is(
    steps: list[list[list[Row]]],
    repeats: int,
    page_size: int,
    kernels: Kernels,
    verifies: bool,
    finishes: list[bool],
) -> None:
    """No schedule is overwritten before its copy, or kept where it does not serve; buffer sets are free at once."""
    late = LateSteps(page_size, kernels, verifies=verifies)
    for step in [step for step in steps for _ in range(repeats) if step]:
        late.run(step)
        if finishes.pop():
            late.gpu.finish()
    assert "unequal" not in late.observer.outcomes
    if any(steps):
        late.check()


def test_a_schedule_is_kept_between_page_crossings() -> None:
    """Pages of 4: lengths 5 to 8 have two pages and share a schedule, 9 has three."""
    steps = LateSteps(4)
    for length in range(4, 9):
        steps.run([[(length, 1), (0, 1)]])
    assert steps.observer.outcomes == ["made", "kept", "kept", "kept", "made"]
    steps.check()


def test_schedules_of_fa3_are_made_each_step() -> None:
    """Its work list holds every row's length."""
    steps = LateSteps(4, Kernels.FA3)
    for length in (4, 5, 5):
        steps.run([[(length, 1)]])
    assert steps.observer.outcomes == ["made", "made", "kept"]
    steps.check()


def test_plan_labels_of_one_step_do_not_share_a_workspace() -> None:
    """Three labels with other schedules each are prepared before the first is run."""
    steps = LateSteps(4)
    steps.run([[(1, 1)], [(5, 1)], [(9, 1)]])
    steps.check()
    assert len(steps.gpu.wrappers) == 3


def test_plan_labels_with_one_schedule_share_it() -> None:
    """It says nothing of which pages they are."""
    steps = LateSteps(4)
    steps.run([[(1, 1), (6, 1)], [(2, 1), (7, 1)]])
    assert steps.observer.outcomes == ["made", "kept"]
    steps.check()


def test_a_batch_that_still_exists_keeps_its_schedule() -> None:
    """Plans may be prepared ahead: what comes in between takes other wrappers, and gives these back."""
    steps = LateSteps(4)
    arrays = build_plan_arrays("main", steps.build_arrays([(6, 1), (2, 1)]))
    ahead = steps.backend.prepare(arrays, steps.send(arrays))
    for length in (1, 9, 13, 17):
        steps.run([[(length, 1)]])
    query = steps.draw_query(arrays)
    steps.expect(steps.backend.attend(steps.pages, query, ahead, 0.3), query, [(6, 1), (2, 1)], arrays, 0.3)
    steps.check()
    num_wrappers = len(steps.gpu.wrappers)
    del ahead
    gc.collect()
    for length in (1, 9, 13, 17):
        steps.run([[(length, 1)]])
    assert len(steps.gpu.wrappers) == num_wrappers == 2


def test_a_schedule_waits_for_the_copy_of_the_last_one_in_its_memory() -> None:
    """With nothing done on the device, the third schedule has to wait for the first: two wrappers take turns."""
    steps = LateSteps(4)
    waits = []
    for length in (1, 5, 9, 13):
        steps.run([[(length, 1)]])
        waits.append(steps.gpu.num_waits)
    assert waits == [0, 0, 1, 2]
    steps.check()


def test_verifying_serves_fresh_schedules_and_finds_them_equal() -> None:
    """Each step makes its own; where one could have been kept the two are compared."""
    steps = LateSteps(4, verifies=True)
    for length in (4, 5, 6, 8):
        steps.run([[(length, 1)]])
    assert steps.observer.outcomes == ["made", "equal", "equal", "made"]
    steps.check()


@pytest.mark.parametrize("verifies", [False, True])
def test_a_captured_batch_equals_the_reference_at_every_replay(verifies: bool) -> None:
    """Its buffers are refilled, whether the schedule is kept or made again, and whichever rows are padding."""
    steps = GraphSteps(3, 4, verifies=verifies)
    for length in range(4, 12):
        steps.replay([(length, 1), (2, 1), None if length > 8 else (13, 1)])
    steps.check()
    kept = "equal" if verifies else "kept"
    # The first row has its third page from length 8 on, the last one gives up three of its four at 9.
    assert steps.observer.outcomes[1:] == ["made", kept, kept, kept, "made", "made", kept, kept]


def test_a_captured_batch_takes_no_other_rows() -> None:
    """Neither their number nor their spans, nor more pages than it has room for."""
    steps = GraphSteps(2, 4)
    for rows, reason in (
        ([(3, 1)], "for a graph of 2 rows"),
        ([(3, 2), (3, 0)], "for a graph of 2 rows"),
        ([(31, 1), (35, 1)], "17 page indices for a graph that has room for 16"),
    ):
        with pytest.raises(ValueError, match=reason):
            steps.replan(rows)


def test_a_schedule_that_moves_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph holds the layout that its schedule had: another one is an error, not a wrong result."""
    steps = GraphSteps(2, 4)
    wrapper = steps.gpu.wrappers[0]
    schedule = wrapper._schedule

    def move(*args: object) -> None:
        schedule(*args)
        wrapper._plan_info = [16, *wrapper._plan_info[1:]]

    monkeypatch.setattr(wrapper, "_schedule", move)
    with pytest.raises(RuntimeError, match=r"moved the schedule of 2 rows from \(2, 1\) to \(16, 1\).*cuda_graphs off"):
        steps.replan([(9, 1), (3, 1)])


@pytest.mark.parametrize("kernels", Kernels)
@pytest.mark.parametrize("verifies", [False, True])
def test_a_model_gives_the_tokens_that_it_gives_in_torch(llama: LoadedModel, kernels: Kernels, verifies: bool) -> None:
    """Requests that join and leave, prompts in chunks, padding rows, and NaN wherever nothing reads."""
    answers, observer = [], CountingObserver()
    flashinfer = FlashInferBackend(
        LateGpu(is_late=False).build_library(),
        llama.kv_shape,
        num_heads=llama.model.config.num_attention_heads,
        page_size=4,
        device=CPU,
        workspace_bytes=64,
        kernels=kernels,
        observer=observer,
        verifies=verifies,
    )
    for backend in (None, flashinfer):
        runner = ModelRunner(llama, num_pages=60, page_size=4, backend=backend)
        runner.cache.pages.fill_(torch.nan)
        requests = [
            ChurnRequest(list(range(start, start + length)), count, joins_at)
            for start, length, count, joins_at in ((5, 5, 20, 0), (90, 1, 12, 0), (30, 17, 4, 1), (200, 30, 9, 3))
        ]
        run_churn(runner, requests, chunk=7, num_padding=2)
        answers.append([request.generated for request in requests])
    assert answers[0] == answers[1]
    assert len({token for answer in answers[0] for token in answer}) > 10
    # FA3 has no two steps with one schedule, as every row grows.
    assert ("kept" in observer.outcomes) == (kernels is Kernels.FA2 and not verifies)
    assert "unequal" not in observer.outcomes


def test_the_backend_can_be_captured() -> None:
    """It has what the graphs ask of a backend."""
    assert isinstance(LateSteps(4).backend, GraphBackend)
