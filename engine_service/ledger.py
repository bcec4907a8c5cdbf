"""What the engine keeps of each request from its arrival to its end: its answer, its caller, and its times."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine_service.answer import AnswerBuilder
from engine_service.errors import EngineError, StepFailedError
from engine_service.metrics import EngineMetrics
from engine_service.request import (
    GenerationEnded,
    GenerationEvent,
    GenerationFailed,
    OnEvent,
    PromptComputed,
    Request,
)
from engine_service.sampling_params import SampledToken

Deliver = Callable[[Sequence[tuple[OnEvent, GenerationEvent]]], None]

_logger = logging.getLogger(__name__)


def deliver_directly(events: Sequence[tuple[OnEvent, GenerationEvent]]) -> None:
    """Hands events to their callers in the engine's own thread."""
    for on_event, event in events:
        on_event(event)


@dataclass(slots=True)
class _Entry:
    answer: AnswerBuilder
    on_event: OnEvent
    arrived_at: float
    has_started: bool = False
    last_token_at: float | None = None


class RequestLedger:
    """The requests that have not ended. Used by the engine's thread alone.

    Events are gathered and delivered together, so that a step wakes the server's thread once.

    Args:
        clock: tells seconds.
        metrics: the engine's metrics.
        open_answer: makes the answer of a new request.
        deliver: takes gathered events.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        metrics: EngineMetrics,
        open_answer: Callable[[Request], AnswerBuilder],
        deliver: Deliver = deliver_directly,
    ) -> None:
        self._clock = clock
        self._metrics = metrics
        self._open_answer = open_answer
        self._deliver = deliver
        self._entries: dict[Request, _Entry] = {}
        self._events: list[tuple[OnEvent, GenerationEvent]] = []

    def __contains__(self, request: Request) -> bool:
        return request in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def requests(self) -> list[Request]:
        """The requests, in the order in which they were opened."""
        return list(self._entries)

    def open(self, request: Request, on_event: OnEvent, arrived_at: float) -> bool:
        """Takes in a request.

        Args:
            request: the request.
            on_event: gets its events.
            arrived_at: when it came, by the ledger's clock.

        Returns:
            Whether it was taken in; if not, its caller is told why.
        """
        try:
            answer = self._open_answer(request)
        except Exception as error:
            name = request.spec.request_id
            _logger.exception("request %s cannot be taken in", name, extra={"request_id": name})
            failure = StepFailedError(f"the request cannot be taken in: {error!r}")
            self._events.append((on_event, GenerationFailed(failure)))
            return False
        self._entries[request] = _Entry(answer, on_event, arrived_at)
        return True

    def note_started(self, requests: Sequence[Request]) -> None:
        """Notes that requests take part in a step."""
        for request in requests:
            entry = self._entries[request]
            if not entry.has_started:
                entry.has_started = True
                self._metrics.request_started(self._clock() - entry.arrived_at)

    def append(self, request: Request, token: SampledToken) -> GenerationEnded | None:
        """Adds a token to a request's answer and tells its caller.

        Returns:
            How the request ended, if this token ended it; it is then to be closed.
        """
        entry = self._entries[request]
        request.token_ids.append(token.token_id)
        now = self._clock()
        if entry.last_token_at is None:
            self._metrics.first_token_generated(now - entry.arrived_at, request.num_prompt_tokens)
            if request.spec.tells_prompt:
                self._events.append((entry.on_event, PromptComputed(tuple(request.prompt_logprobs))))
        else:
            self._metrics.next_token_generated(now - entry.last_token_at)
        entry.last_token_at = now
        delta, ended = entry.answer.append(token)
        self._events.append((entry.on_event, delta))
        return ended

    def close(self, request: Request, event: GenerationEnded | EngineError | None) -> None:
        """Lets go of a request and tells its caller how it ended.

        Args:
            request: the request.
            event: its end, or what kept it from ending well, or None if it was aborted.
        """
        entry = self._entries.pop(request)
        if isinstance(event, EngineError):
            self._events.append((entry.on_event, GenerationFailed(event)))
            reason = "error"
        else:
            ended = entry.answer.abort() if event is None else event
            self._events.append((entry.on_event, ended))
            reason = ended.finish_reason.value
        seconds = self._clock() - entry.arrived_at
        self._metrics.request_finished(reason, seconds)
        _logger.info(
            "request %s ended (%s): %d prompt tokens, %d generated, %.3f s",
            request.spec.request_id,
            reason,
            request.num_prompt_tokens,
            request.num_generated_tokens,
            seconds,
            extra={
                "request_id": request.spec.request_id,
                "finish_reason": reason,
                "prompt_tokens": request.num_prompt_tokens,
                "completion_tokens": request.num_generated_tokens,
                "cached_tokens": request.num_cached_tokens,
                "duration_seconds": round(seconds, 6),
                **({"error": str(event)} if isinstance(event, EngineError) else {}),
            },
        )

    def deliver(self) -> None:
        """Delivers what has been gathered."""
        if self._events:
            events, self._events = self._events, []
            self._deliver(events)
