"""Engines in this process on a real planner process, and what their callers get."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry
from transformers import AutoModelForCausalLM

from engine_service.assembly import assemble_engine
from engine_service.config import EngineSettings
from engine_service.engine import Engine
from engine_service.ledger import deliver_directly
from engine_service.request import GeneratedDelta, GenerationEnded, GenerationEvent
from ringplan.planner.v1 import planner_pb2
from tests.planner_process import PlannerProcess


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


@contextmanager
def fill_new_memory_with_nan() -> Iterator[None]:
    """Lets torch fill new memory with NaN: a token that depends on a slot nobody wrote comes out wrong at once."""
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # torch has no stub for it.
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def generate_with_transformers(
    folder: Path, prompts: Sequence[tuple[int, ...]], num_tokens: Sequence[int]
) -> list[list[int]]:
    """Returns what transformers generates greedily, prompt by prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return [
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt, count in zip(prompts, num_tokens, strict=True)
    ]


def wait_until_all_pages_are_free(running: RunningEngine) -> None:
    """Returns once the planner says so; the engine tells it when it comes to rest, right after the last answer."""
    for _ in range(500):
        session = running.find_session()
        if session.num_free_pages == session.num_pages - 1:
            assert (session.num_streams, session.num_steps_in_flight, session.num_leased_sets) == (0, 0, 0)
            return
        threading.Event().wait(0.02)
    raise AssertionError(f"pages are missing: {session}")
