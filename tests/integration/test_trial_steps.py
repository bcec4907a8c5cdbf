"""Steps that are not kept, on a real planner: a denoising-style loop equals one without any cache."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine_service.guidance import guide
from engine_service.model_loading import load_model
from engine_service.model_runner import ModelRunner
from engine_service.planner_link import PlannerLink
from engine_service.trial_steps import TrialContexts
from planner_service.client import CacheMode, OutOfPagesError
from ringplan.planner.v1 import planner_pb2, planner_pb2_grpc
from tests.engine_service.tiny_models import VOCAB_SIZE, save_tiny_checkpoint
from tests.planner_process import PlannerProcess
from tests.reference.dense_guidance import guide_dense, run_dense

pytestmark = pytest.mark.usefixtures("nan_in_new_memory")

NUM_STEPS = 20
SPAN = 14
PAGE_SIZE = 4
LABELS = ("main", "cfg_text", "cfg_img")
SCALES = (2.0, 1.5)


def _draw(num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(1, VOCAB_SIZE, (num_tokens,), generator=generator)]


# What is added to each label, one step after the other; `cfg_img` starts as a fork of `main`.
MAIN, TEXT, IMAGE = _draw(21, seed=1), _draw(6, seed=2), _draw(3, seed=3)
CONTEXTS = {"main": MAIN, "cfg_text": TEXT, "cfg_img": MAIN[:13] + IMAGE}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    return save_tiny_checkpoint("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    """It, as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    """It, on a paged cache."""
    return ModelRunner(load_model(str(folder)), num_pages=64, page_size=PAGE_SIZE)


@pytest.fixture
def link(planner_process: PlannerProcess) -> Iterator[PlannerLink]:
    """A session of its own."""
    link = PlannerLink(
        planner_process.target,
        page_size=PAGE_SIZE,
        num_pages=64,
        max_running_requests=8,
        cache_mode=CacheMode.VERIFY,
        engine_name="trials",
    )
    link.connect(10)
    yield link
    link.close()


def _dump(planner: PlannerProcess, session: str) -> planner_pb2.DumpSessionResponse:
    with planner.open_channel() as channel:
        stub = planner_pb2_grpc.PlannerServiceStub(channel)
        return stub.DumpSession(planner_pb2.DumpSessionRequest(session=session), timeout=10)


def _fill(contexts: TrialContexts) -> None:
    contexts.extend({"main": MAIN[:13], "cfg_text": TEXT})
    contexts.extend({"main": MAIN[13:], "cfg_img": IMAGE}, forks=[("main", "cfg_img")])


def _denoise(span: Sequence[int], guided: np.ndarray, step: int) -> list[int]:
    """Takes the likeliest token at every third place, in turn."""
    chosen = guided.argmax(axis=-1).tolist()
    return [chosen[place] if (place + step) % 3 == 0 else token for place, token in enumerate(span)]


def _guide(logits: Mapping[str, torch.Tensor]) -> np.ndarray:
    main, *others = (logits[label] for label in LABELS)
    guided: np.ndarray = guide(main, others, [torch.tensor([[scale]]) for scale in SCALES]).numpy()
    return guided


@pytest.mark.parametrize("combined_label", ["guided", None])
def test_denoising_loop_over_three_contexts_equals_one_without_a_cache(
    planner_process: PlannerProcess,
    link: PlannerLink,
    runner: ModelRunner,
    model: PreTrainedModel,
    combined_label: str | None,
) -> None:
    """Twenty guesses at a span read three contexts of other lengths; none is kept, and the last one can be added."""
    contexts = TrialContexts(link, runner, "image", combined_label=combined_label)
    _fill(contexts)
    span = dense_span = _draw(SPAN, seed=4)
    for step in range(NUM_STEPS):
        guided = _guide(contexts.try_spans(dict.fromkeys(LABELS, span)))
        main, *others = (run_dense(model, [*CONTEXTS[label], *span])[-SPAN:] for label in LABELS)
        dense = guide_dense(main, others, SCALES)
        np.testing.assert_allclose(guided, dense, atol=2e-3)
        span, dense_span = _denoise(span, guided, step), _denoise(dense_span, dense, step)
        assert span == dense_span
    link.flush()
    dump = _dump(planner_process, link.session.name)
    lengths = [stream.committed_length for stream in dump.streams]
    assert sorted(lengths) == sorted(len(tokens) for tokens in CONTEXTS.values())
    # One token more than the last guess: what follows depends on the contexts and on nothing else.
    kept = contexts.extend({label: [*span, 5] for label in LABELS})
    for label in LABELS:
        expected = run_dense(model, [*CONTEXTS[label], *span, 5])[-1]
        np.testing.assert_allclose(kept[label][-1].numpy(), expected, atol=2e-3)
    contexts.close()
    assert _dump(planner_process, link.session.name).summary.num_free_pages == 63


def test_loop_runs_on_one_combined_plan_label(
    link: PlannerLink, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All labels stand under one name, label after label."""
    plans = []
    plan_step = link.plan_step

    def record(*given: object, **named: object) -> object:
        plan = plan_step(*given, **named)  # type: ignore[arg-type]  # Handed on as it came.
        plans.append({name: arrays.rows for name, arrays in plan.labels.items()})
        return plan

    contexts = TrialContexts(link, runner, "image", combined_label="guided")
    _fill(contexts)
    monkeypatch.setattr(link, "plan_step", record)
    contexts.try_spans({label: [1, 2, 3] for label in LABELS})
    assert plans == [{"guided": tuple(("image", label) for label in LABELS)}]
    contexts.close()


def test_span_that_does_not_fit_changes_nothing(
    planner_process: PlannerProcess, link: PlannerLink, runner: ModelRunner, model: PreTrainedModel
) -> None:
    """Without pages for it a span is refused; a shorter one then runs as if nothing had been."""
    contexts = TrialContexts(link, runner, "image")
    _fill(contexts)
    with pytest.raises(OutOfPagesError):
        contexts.try_spans({"main": [1] * 300})
    logits = contexts.try_spans({"main": [4, 2]})["main"].numpy()
    np.testing.assert_allclose(logits, run_dense(model, [*MAIN, 4, 2])[-2:], atol=2e-3)
    contexts.close()
    assert _dump(planner_process, link.session.name).summary.num_free_pages == 63
