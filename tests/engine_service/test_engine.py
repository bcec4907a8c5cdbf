"""Rules of the engine as other threads see it."""

import threading
import time
from collections.abc import Iterator

import pytest

from engine_service.engine import Engine
from engine_service.errors import EngineStoppingError, InvalidRequestError, QueueFullError, StepFailedError
from engine_service.loop import EngineLoad
from engine_service.request import (
    FinishReason,
    GeneratedDelta,
    GenerationEnded,
    GenerationEvent,
    GenerationFailed,
    GenerationSpec,
    StoppingParams,
)
from tests.engine_service.toy_engine import ToyEngine, generate_toy_tokens


class WaitingCaller:
    """A caller in another thread than the engine's."""

    def __init__(self) -> None:
        self.events: list[GenerationEvent] = []
        self._ended = threading.Event()

    def on_event(self, event: GenerationEvent) -> None:
        """Takes an event."""
        self.events.append(event)
        if not isinstance(event, GeneratedDelta):
            self._ended.set()

    def wait(self) -> GenerationEvent:
        """Returns the last event once it has come."""
        assert self._ended.wait(30), "the request did not end"
        return self.events[-1]

    @property
    def token_ids(self) -> list[int]:
        """The tokens told of."""
        return [token.token_id for event in self.events if isinstance(event, GeneratedDelta) for token in event.tokens]


@pytest.fixture
def toy() -> ToyEngine:
    """A toy engine whose clock runs."""
    return ToyEngine(clock=time.monotonic)


@pytest.fixture
def engine(toy: ToyEngine) -> Iterator[Engine]:
    """A running engine that takes two requests at once and one more."""
    engine = toy.build_engine(max_running_requests=2, max_queued_requests=1)
    engine.start()
    yield engine
    toy.executor.gate.set()
    engine.stop(30)


def wait_until_refusing(engine: Engine) -> None:
    """Returns once the engine takes no more requests."""
    while True:
        try:
            engine.submit(_spec(), lambda _event: None)
        except QueueFullError:
            continue
        except EngineStoppingError:
            return


def _spec(prompt: tuple[int, ...] = (1, 2), max_tokens: int = 5) -> GenerationSpec:
    return GenerationSpec("r", prompt, stopping=StoppingParams(max_tokens=max_tokens))


def test_requests_from_several_threads_get_their_own_tokens(engine: Engine) -> None:
    """Each caller gets the answer to its own prompt, and then the end."""
    callers = [WaitingCaller() for _ in range(3)]
    for number, caller in enumerate(callers):
        engine.submit(_spec((number, 7), 6), caller.on_event)
    for number, caller in enumerate(callers):
        assert caller.wait() == GenerationEnded(FinishReason.LENGTH, 2, 6)
        assert caller.token_ids == generate_toy_tokens([number, 7], 6)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (_spec(()), "text"),
        (_spec((1, 500)), "text"),
        (_spec((1,) * 1_000), "text"),
        (_spec((1,), 400), "stopping.max_tokens"),
        (GenerationSpec("r", (1,), stopping=StoppingParams(stop_token_ids=(97,))), "stopping.stop_token_ids"),
    ],
)
def test_request_that_breaks_a_rule_is_refused_at_once(engine: Engine, spec: GenerationSpec, field: str) -> None:
    """Bad input never reaches the engine's thread, and the prompt is called what its caller calls it."""
    with pytest.raises(InvalidRequestError) as caught:
        engine.submit(spec, lambda _event: None, prompt_field="text")
    assert caught.value.field == field


def test_full_queue_refuses_at_once(engine: Engine, toy: ToyEngine) -> None:
    """As many requests as run and wait together are taken; the next is refused, and later ones are taken again."""
    toy.executor.gate.clear()
    callers = [WaitingCaller() for _ in range(3)]
    for caller in callers:
        engine.submit(_spec(), caller.on_event)
    with pytest.raises(QueueFullError):
        engine.submit(_spec(), lambda _event: None)
    assert toy.read_metric("ringplan_requests_refused_total") == 1
    toy.executor.gate.set()
    for caller in callers:
        caller.wait()
    last = WaitingCaller()
    engine.submit(_spec(), last.on_event)
    last.wait()


def test_caller_may_send_the_next_request_from_within_the_end_of_the_last(engine: Engine) -> None:
    """When a caller learns of an end, its place is free."""
    done = threading.Event()
    ends: list[GenerationEvent] = []

    def on_event(event: GenerationEvent) -> None:
        if isinstance(event, GeneratedDelta):
            return
        ends.append(event)
        if len(ends) == 3:
            engine.submit(_spec(), on_event)
        if len(ends) == 4:
            done.set()

    for _ in range(3):
        engine.submit(_spec(max_tokens=1), on_event)
    assert done.wait(30)


def test_aborted_request_ends_and_its_pages_are_back(engine: Engine, toy: ToyEngine) -> None:
    """An abort from another thread ends the request; aborting again changes nothing."""
    caller = WaitingCaller()
    request = engine.submit(_spec(max_tokens=200), caller.on_event)
    engine.abort(request)
    ended = caller.wait()
    assert isinstance(ended, GenerationEnded)
    assert ended.finish_reason is FinishReason.ABORT
    engine.abort(request)
    assert engine.wait_until_finished(30)
    assert toy.planner.num_free_pages == toy.limits.num_usable_pages


def test_engine_that_stops_accepting_finishes_what_it_has(engine: Engine) -> None:
    """New requests are refused; those that are there end by themselves."""
    caller = WaitingCaller()
    engine.submit(_spec(max_tokens=50), caller.on_event)
    engine.stop_accepting()
    with pytest.raises(EngineStoppingError):
        engine.submit(_spec(), lambda _event: None)
    assert engine.wait_until_finished(30)
    ended = caller.wait()
    assert isinstance(ended, GenerationEnded)
    assert ended.finish_reason is FinishReason.LENGTH


def test_stopped_engine_aborts_what_it_has(engine: Engine, toy: ToyEngine) -> None:
    """A stop ends the thread after the step it is in; every caller is told, those that never ran too."""
    toy.executor.gate.clear()
    callers = [WaitingCaller() for _ in range(3)]
    for caller in callers:
        engine.submit(_spec(max_tokens=200), caller.on_event)
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    wait_until_refusing(engine)
    toy.executor.gate.set()
    stopping.join(30)
    for caller in callers:
        ended = caller.wait()
        assert isinstance(ended, GenerationEnded)
        assert ended.finish_reason is FinishReason.ABORT
    assert engine.failure is None
    engine.stop(30)


def test_waiting_for_the_end_gives_up_in_time(engine: Engine, toy: ToyEngine) -> None:
    """A request that does not end is not waited for longer than was said."""
    toy.executor.gate.clear()
    engine.submit(_spec(), WaitingCaller().on_event)
    assert not engine.wait_until_finished(0.01)


def test_failed_loop_tells_every_caller_and_why(toy: ToyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the engine itself ends it: requests fail, new ones are refused, and the server can see the reason."""
    engine = toy.build_engine()
    callers = [WaitingCaller() for _ in range(2)]
    for caller in callers:
        engine.submit(_spec(), caller.on_event)

    def fail() -> None:
        raise AssertionError("a request stands twice")

    monkeypatch.setattr(toy.scheduler, "build_step", fail)
    engine.start()
    for caller in callers:
        failed = caller.wait()
        assert isinstance(failed, GenerationFailed)
        assert isinstance(failed.error, StepFailedError)
    engine.stop(30)
    assert isinstance(engine.failure, AssertionError)
    with pytest.raises(EngineStoppingError):
        engine.submit(_spec(), lambda _event: None)


def test_load_counts_what_came_since_the_step_began(toy: ToyEngine, engine: Engine) -> None:
    """One request runs, held up in its step; the next one waits, whether the engine's thread has seen it or not."""
    assert engine.load == EngineLoad()
    held_up = threading.Event()

    def hold_up(_event: GenerationEvent) -> None:
        if not held_up.is_set():
            # In the engine's thread, between two steps.
            toy.executor.gate.clear()
            held_up.set()

    request = engine.submit(GenerationSpec("a", (1,), stopping=StoppingParams(max_tokens=200)), hold_up)
    assert held_up.wait(30)
    later = WaitingCaller()
    engine.submit(GenerationSpec("b", (2,), stopping=StoppingParams(max_tokens=1)), later.on_event)
    load = engine.load
    assert (load.num_running, load.num_waiting) == (1, 1)
    assert 0 < load.kv_cache_usage < 1
    engine.abort(request)
    toy.executor.gate.set()
    later.wait()
    while engine.load.num_running:
        time.sleep(0.005)
    assert engine.load == EngineLoad()
