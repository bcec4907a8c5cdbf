"""A real planner process and an engine on tiny models: greedy tokens equal those of transformers' own generate."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry
from transformers import AutoModelForCausalLM

from engine_service.assembly import assemble_engine
from engine_service.config import EngineSettings
from engine_service.engine import Engine
from engine_service.ledger import deliver_directly
from engine_service.request import GeneratedDelta, GenerationEnded, GenerationEvent, GenerationSpec, StoppingParams
from ringplan.planner.v1 import planner_pb2
from tests.engine_service.tiny_models import ARCHITECTURES, VOCAB_SIZE, save_tiny_checkpoint
from tests.planner_process import PlannerProcess

# Prompt length, tokens to generate, and how many events must have come before it joins.
CHURN = ((5, 20, 0), (1, 12, 0), (17, 4, 2), (40, 15, 6), (3, 25, 8), (8, 2, 20), (31, 10, 30), (64, 6, 40))


@dataclass
class Answers:
    """Gathers the answers of several requests, in the engine's thread.

    Args:
        num_requests: how many are to come.
    """

    num_requests: int
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    ended: dict[int, GenerationEnded] = field(default_factory=dict)
    num_events: int = 0

    def __post_init__(self) -> None:
        self.changed = threading.Condition()

    def take(self, number: int, event: GenerationEvent) -> None:
        """Takes an event of a request."""
        with self.changed:
            self.num_events += 1
            if isinstance(event, GeneratedDelta):
                self.token_ids.setdefault(number, []).extend(token.token_id for token in event.tokens)
            else:
                assert isinstance(event, GenerationEnded), event
                self.ended[number] = event
            self.changed.notify_all()

    def wait_for_events(self, num_events: int) -> None:
        """Returns once so many events have come, or everything that was asked for has ended."""
        with self.changed:
            assert self.changed.wait_for(
                lambda: self.num_events >= num_events or len(self.ended) == len(self.token_ids) > 0, 50
            )

    def wait(self) -> None:
        """Returns once every request has ended."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.ended) == self.num_requests, 50), self.ended


@dataclass(frozen=True)
class RunningEngine:
    """An engine, its metrics, and its session as the planner sees it."""

    engine: Engine
    registry: CollectorRegistry
    planner: PlannerProcess
    name: str

    def find_session(self) -> planner_pb2.SessionSummary:
        """Returns what the planner says of the engine's session."""
        (session,) = [one for one in self.planner.list_sessions() if one.engine_name == self.name]
        return session


@contextmanager
def run_engine(planner: PlannerProcess, folder: Path, name: str, **settings: object) -> Iterator[RunningEngine]:
    """Runs an engine on a real planner for the length of a `with` block."""
    registry = CollectorRegistry()
    given = {"model": str(folder), "planner": planner.target, "engine_name": name, **settings}
    engine = assemble_engine(
        EngineSettings.model_validate(given),
        registry,
        deliver=deliver_directly,
        on_ready_changed=lambda _is_ready: None,
        on_ended=lambda: None,
    ).engine
    engine.start()
    try:
        yield RunningEngine(engine, registry, planner, name)
    finally:
        engine.stop(30)


def build_prompts(seed: int = 1) -> list[tuple[int, ...]]:
    """Returns a random prompt for each request."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist()) for length, _, _ in CHURN]


def answer_all(engine: Engine, prompts: Sequence[tuple[int, ...]]) -> Answers:
    """Sends the requests, each once so many events have come, and waits for all of them."""
    answers = Answers(len(prompts))
    for number, (prompt, (_, num_tokens, joins_at)) in enumerate(zip(prompts, CHURN, strict=True)):
        answers.wait_for_events(joins_at)
        spec = GenerationSpec(str(number), prompt, stopping=StoppingParams(max_tokens=num_tokens))
        engine.submit(spec, lambda event, number=number: answers.take(number, event))  # type: ignore[misc]  # mypy cannot infer a default.
    answers.wait()
    return answers


@pytest.fixture(scope="module", autouse=True)
def _nan_in_uninitialized_memory() -> Iterator[None]:
    """Lets torch fill new memory with NaN: a token that depends on a slot nobody wrote comes out wrong at once."""
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # torch has no stub for it.
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint of each architecture."""
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny_checkpoint(name, root / name) for name in ARCHITECTURES}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    """For each architecture what transformers generates greedily, prompt by prompt."""
    answers = {}
    for name, folder in folders.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        answers[name] = [
            model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
                max_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )[0, len(prompt) :].tolist()
            for prompt, (_, num_tokens, _) in zip(build_prompts(), CHURN, strict=True)
        ]
    return answers


@pytest.mark.parametrize(("page_size", "cache_mode"), [(1, "off"), (4, "on"), (16, "verify")])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_equal_transformers_while_requests_join_and_leave(
    planner_process: PlannerProcess,
    folders: dict[str, Path],
    expected: dict[str, list[list[int]]],
    architecture: str,
    page_size: int,
    cache_mode: str,
) -> None:
    """Eight requests share batches and prompts go in by chunks; every token is transformers', every page comes back."""
    with run_engine(
        planner_process,
        folders[architecture],
        f"{architecture}-{page_size}",
        page_size=page_size,
        cache_mode=cache_mode,
        num_pages=1 + 400 // page_size,
        max_running_requests=6,
        max_step_tokens=24,
    ) as running:
        answers = answer_all(running.engine, build_prompts())
        assert [answers.token_ids[number] for number in range(len(CHURN))] == expected[architecture]
        assert running.engine.wait_until_finished(10)
        wait_until_all_pages_are_free(running)


def test_tokens_are_the_same_when_pages_run_out(
    planner_process: PlannerProcess, folders: dict[str, Path], expected: dict[str, list[list[int]]]
) -> None:
    """With a pool that holds little more than the largest request, others are put back and recomputed: same tokens."""
    with run_engine(
        planner_process, folders["llama"], "short-of-pages", page_size=4, num_pages=22, max_step_tokens=32
    ) as running:
        answers = answer_all(running.engine, build_prompts())
        assert [answers.token_ids[number] for number in range(len(CHURN))] == expected["llama"]
        preemptions = running.registry.get_sample_value("ringplan_preemptions_total")
        assert preemptions is not None
        assert preemptions > 0
        wait_until_all_pages_are_free(running)


def wait_until_all_pages_are_free(running: RunningEngine) -> None:
    """Returns once the planner says so; the engine tells it when it comes to rest, right after the last answer."""
    for _ in range(500):
        session = running.find_session()
        if session.num_free_pages == session.num_pages - 1:
            assert (session.num_streams, session.num_steps_in_flight, session.num_leased_sets) == (0, 0, 0)
            return
        threading.Event().wait(0.02)
    raise AssertionError(f"pages are missing: {session}")
