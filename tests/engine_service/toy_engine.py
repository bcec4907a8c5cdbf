"""An engine without model and planner process: a toy model whose next token depends on every token it was fed."""

import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from engine_service.answer import AnswerBuilder
from engine_service.backoff import Backoff
from engine_service.engine import Engine
from engine_service.ledger import Deliver, RequestLedger, deliver_directly
from engine_service.loop import EngineLoop
from engine_service.metrics import EngineMetrics
from engine_service.request import (
    GeneratedDelta,
    GenerationEnded,
    GenerationEvent,
    GenerationSpec,
    GuidanceContext,
    Request,
    StoppingParams,
)
from engine_service.sampling_params import SampledToken
from engine_service.scheduler import ScheduledRow, Scheduler
from engine_service.step_layout import StepSpec
from engine_service.streams import find_start
from engine_service.validation import EngineLimits, settle_max_tokens
from planner_service.client import OutOfPagesError, Plan, PlannerUnavailableError, SessionLostError
from tests.engine_service.hand_plans import build_plan

TOY_VOCAB_SIZE = 97


def choose_toy_token(tokens: Sequence[int]) -> int:
    """Returns the toy model's next token: another one for nearly every change of what was fed."""
    return sum((place + 1) * (token + 1) for place, token in enumerate(tokens)) % TOY_VOCAB_SIZE


def choose_guided_toy_token(streams: Sequence[Sequence[int]]) -> int:
    """Returns the toy model's next token after a prompt and its further contexts."""
    return sum((2 * place + 1) * choose_toy_token(tokens) for place, tokens in enumerate(streams)) % TOY_VOCAB_SIZE


def generate_toy_tokens(prompt: Sequence[int], num_tokens: int, contexts: Sequence[Sequence[int]] = ()) -> list[int]:
    """Returns the toy model's answer, computed with no engine at all."""
    streams = [list(prompt), *map(list, contexts)]
    for _ in range(num_tokens):
        token = choose_guided_toy_token(streams)
        for tokens in streams:
            tokens.append(token)
    return streams[0][len(prompt) :]


class ToyPlanner:
    """Counts pages as a planner would, and holds the tokens that stand in them.

    Args:
        page_size: tokens a page holds.
        num_pages: pages in the pool, the sink page included.
    """

    def __init__(self, page_size: int, num_pages: int) -> None:
        self.stored: dict[Hashable, list[int]] = {}
        self.is_connected = True
        self.is_lost = False
        self.is_away = False
        self.was_plan_ready = False
        self.num_plans = 0
        self.num_flushes = 0
        self._page_size = page_size
        self._num_usable_pages = num_pages - 1
        self._tables: dict[Hashable, list[object]] = {}
        self._before_step: dict[Hashable, list[int]] = {}
        self._tables_before_step: dict[Hashable, list[object]] = {}

    @property
    def num_free_pages(self) -> int:
        """Pages nobody holds."""
        return self._num_usable_pages - len({page for key in self.stored for page in self._find_table(key)})

    def connect(self, timeout_seconds: float) -> None:
        """Opens a session, unless the planner is away."""
        if self.is_away:
            raise PlannerUnavailableError("unix:/toy", "away")
        self.stored.clear()
        self.is_connected, self.is_lost = True, False

    def plan_step(self, spec: StepSpec, num_steady_steps: int = 1) -> Plan:
        """Takes the pages that the rows need."""
        self.flush()
        lengths: dict[Hashable, int] = {key: len(tokens) for key, tokens in self.stored.items()}
        num_more = 0
        for fork in spec.forks_before:
            lengths[fork.target_key()] = lengths[fork.request, fork.source]
            num_more += lengths[fork.target_key()] % self._page_size > 0
        for request, label, span in spec.segments:
            if request is not None:
                num_stored = lengths.get((request, label), 0)
                num_more += self._count(num_stored + span) - self._count(num_stored)
        if num_more > self.num_free_pages:
            raise OutOfPagesError(num_more - self.num_free_pages, self.num_free_pages)
        self._before_step = {key: list(tokens) for key, tokens in self.stored.items()}
        self._tables_before_step = {key: list(self._find_table(key)) for key in self.stored}
        for fork in spec.forks_before:
            source = (fork.request, fork.source)
            self.stored[fork.target_key()] = list(self.stored[source])
            num_full_pages = len(self.stored[source]) // self._page_size
            self._tables[fork.target_key()] = self._find_table(source)[:num_full_pages]
        self.num_plans += 1
        return build_plan({}, step_id=self.num_plans)

    def end_step(self, plan: Plan, *, is_kept: bool) -> None:
        """Keeps what the step stored, or takes it back."""
        if not is_kept:
            self.stored = self._before_step
            self._tables = self._tables_before_step

    def drop(self, request: Hashable) -> None:
        """Frees a request's pages."""
        for key in [key for key in self.stored if key == request or (isinstance(key, tuple) and key[0] == request)]:
            del self.stored[key]
            self._tables.pop(key, None)

    def flush(self) -> None:
        """Notices a lost session."""
        self.num_flushes += 1
        if self.is_lost:
            raise SessionLostError("lost", "UNAVAILABLE")

    def close(self) -> None:
        """Ends the session."""
        self.is_connected = False
        self.stored.clear()

    def _find_table(self, key: Hashable) -> list[object]:
        table = self._tables.setdefault(key, [])
        num_pages = self._count(len(self.stored[key]))
        table += [object() for _ in range(num_pages - len(table))]
        return table

    def _count(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)


class ToyExecutor:
    """Feeds the toy model.

    Args:
        planner: holds what was fed.
    """

    def __init__(self, planner: ToyPlanner) -> None:
        self.failure: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.batches: list[list[int]] = []
        self.num_computed_tokens = 0
        self.forgotten: list[int] = []
        self._planner = planner

    def run(self, rows: Sequence[ScheduledRow], plan: Plan) -> list[SampledToken | None]:
        """Feeds each row's tokens, once the gate is open; what was stored before decides together with them."""
        self.gate.wait()
        self.batches.append([row.num_tokens for row in rows])
        self.num_computed_tokens += sum(sum(row.num_stream_tokens) for row in rows)
        tokens: list[SampledToken | None] = []
        for row in rows:
            streams = []
            for place, stream in enumerate(row.request.streams):
                stored = self._planner.stored.setdefault((row.request.arrival, stream.label), [])
                assert len(stored) == find_start(stream, row.forks), "the engine knows how many tokens stand there"
                stored.extend(row.read_tokens(place))
                streams.append(stored)
            tokens.append(SampledToken(choose_guided_toy_token(streams)) if row.is_sampled else None)
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        return tokens

    def forget(self, request: Request) -> None:
        """Notes that a request has ended."""
        self.forgotten.append(request.arrival)


class ToyDetokenizer:
    """Each token's text is its number and a space."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the tokens' text."""
        return "".join(f"{token_id} " for token_id in token_ids)

    def flush(self) -> str:
        """Returns nothing: nothing is held back."""
        return ""


@dataclass
class Caller:
    """Gathers what a request's caller is told."""

    events: list[GenerationEvent] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """The tokens told of."""
        return [token.token_id for event in self.events if isinstance(event, GeneratedDelta) for token in event.tokens]

    @property
    def text(self) -> str:
        """The text told of."""
        return "".join(event.text for event in self.events if isinstance(event, GeneratedDelta))

    @property
    def ended(self) -> GenerationEnded:
        """The end, which must be the last event."""
        last = self.events[-1]
        assert isinstance(last, GenerationEnded), last
        return last

    @property
    def is_told_of_end(self) -> bool:
        """Whether the last event has come; it comes once."""
        ends = [not isinstance(event, GeneratedDelta) for event in self.events]
        assert sum(ends) <= 1, "a request ends once"
        return bool(ends) and ends[-1]


class ToyEngine:
    """The engine's loop on a toy planner and a toy model; time stands still unless a test moves it.

    Args:
        page_size: tokens a page holds.
        num_pages: pages in the pool, the sink page included.
        max_running_requests: requests in a step.
        max_step_tokens: tokens in a step.
        eos_token_ids: tokens that end an answer.
        vocab_size: token ids that are allowed; the toy model itself chooses below `TOY_VOCAB_SIZE`.
        clock: tells seconds; None is `now`, which only the test moves.
        deliver: takes events.
    """

    def __init__(
        self,
        *,
        page_size: int = 4,
        num_pages: int = 65,
        max_running_requests: int = 8,
        max_step_tokens: int = 16,
        eos_token_ids: Collection[int] = (),
        vocab_size: int = TOY_VOCAB_SIZE,
        clock: Callable[[], float] | None = None,
        deliver: Deliver = deliver_directly,
    ) -> None:
        self.now = 0.0
        self.clock = clock or (lambda: self.now)
        self.registry = CollectorRegistry()
        self.metrics = EngineMetrics(self.registry)
        self.limits = EngineLimits(vocab_size, 1_000, page_size, num_pages)
        self.planner = ToyPlanner(page_size, num_pages)
        self.executor = ToyExecutor(self.planner)
        self.readiness: list[bool] = []
        self.scheduler = Scheduler(self.limits, max_running_requests, max_step_tokens)
        self.open_answer: Callable[[Request], AnswerBuilder] = lambda request: AnswerBuilder(
            request, ToyDetokenizer(), eos_token_ids
        )
        # Looked up anew for each request, so that a test can replace it.
        self.ledger = RequestLedger(
            self.clock,
            self.metrics,
            lambda request: self.open_answer(request),  # noqa: PLW0108  # See above.
            deliver,
        )
        self.loop = EngineLoop(
            self.scheduler,
            self.planner,
            self.executor,
            self.ledger,
            self.metrics,
            on_ready_changed=self.readiness.append,
            clock=self.clock,
            backoff=Backoff(1.0, 8.0),
        )
        self._num_arrived = 0

    def build_engine(self, *, max_running_requests: int = 8, max_queued_requests: int = 100) -> Engine:
        """Returns an engine with a thread of its own around the loop; `tick` is not to be used then."""
        return Engine(
            self.limits,
            self.loop,
            self.ledger,
            self.metrics,
            max_running_requests=max_running_requests,
            max_queued_requests=max_queued_requests,
            clock=self.clock,
        )

    def add(
        self, prompt: Sequence[int], max_tokens: int, stopping: StoppingParams | None = None
    ) -> tuple[Request, Caller]:
        """Brings a request to the loop."""
        self._num_arrived += 1
        spec = GenerationSpec(f"toy-{self._num_arrived}", tuple(prompt), stopping=stopping or StoppingParams())
        settled = settle_max_tokens(len(prompt), max_tokens, self.limits, "token_ids")
        request, caller = Request(spec, self._num_arrived, settled), Caller()
        self.loop.add(request, caller.events.append, self.now)
        return request, caller

    def add_samples(
        self, prompt: Sequence[int], num_tokens: int, num_samples: int, contexts: Sequence[Sequence[int]] = ()
    ) -> list[tuple[Request, Caller]]:
        """Brings a request for several samples to the loop, perhaps with further contexts."""
        guidance = tuple(GuidanceContext(tuple(context), 2.0) for context in contexts)
        spec = GenerationSpec("toy", tuple(prompt), guidance=guidance, num_samples=num_samples)
        added: list[tuple[Request, Caller]] = []
        for sample in spec.split_samples():
            self._num_arrived += 1
            request, caller = Request(sample, self._num_arrived, num_tokens), Caller()
            if added:
                request.follow(added[0][0])
            added.append((request, caller))
        for request, caller in added:
            self.loop.add(request, caller.events.append, self.now)
        return added

    def tick(self) -> float:
        """Does one tick, delivers, and checks what must always hold."""
        seconds = self.loop.tick()
        self.ledger.deliver()
        self.scheduler.check_integrity()
        return seconds

    def run_until_idle(self, max_ticks: int = 10_000) -> None:
        """Ticks until nothing is left to do; where the loop waits, time passes at once."""
        for _ in range(max_ticks):
            seconds = self.tick()
            if not len(self.ledger):
                return
            self.now += seconds
        raise AssertionError(f"requests are left after {max_ticks} ticks")

    def read_metric(self, name: str, **labels: str) -> float:
        """Returns a sample's value."""
        value = self.registry.get_sample_value(name, labels)
        assert value is not None, name
        return value
