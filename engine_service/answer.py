"""Turns a request's tokens into its answer: text, stop conditions, and the events its caller gets."""

from collections.abc import Collection, Sequence
from typing import Protocol

from engine_service.request import FinishReason, GeneratedDelta, GenerationEnded, Request
from engine_service.sampling_params import SampledToken
from engine_service.stop_strings import StopStringFinder


class Detokenizer(Protocol):
    """Turns one request's tokens into text, never cutting a character in two."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens; returns the text that is now whole."""

    def flush(self) -> str:
        """Returns what is left: no more tokens are coming."""


class AnswerBuilder:
    """Builds the answer of one request.

    Args:
        request: the request; its `token_ids` already hold each token when `append` gets it.
        detokenizer: fresh, for this request alone.
        eos_token_ids: tokens with which the model ends an answer.
    """

    def __init__(self, request: Request, detokenizer: Detokenizer, eos_token_ids: Collection[int]) -> None:
        stopping = request.spec.stopping
        self._request = request
        self._detokenizer = detokenizer
        self._finder = StopStringFinder(stopping.stop)
        self._eos_token_ids = frozenset() if stopping.ignore_eos else frozenset(eos_token_ids)
        self._stop_token_ids = frozenset(stopping.stop_token_ids)

    def append(self, token: SampledToken) -> tuple[GeneratedDelta, GenerationEnded | None]:
        """Takes the next token of the answer.

        An end-of-sequence token brings no text. A stop token brings its text, if it is not a special token.

        Args:
            token: the token.

        Returns:
            The news for the caller, and how the request ended if this token ended it.
        """
        token_id = token.token_id
        is_eos = token_id in self._eos_token_ids
        is_stop = is_eos or token_id in self._stop_token_ids
        num_generated = self._request.num_generated_tokens
        is_armed = num_generated > self._request.spec.stopping.min_tokens
        text = "" if is_eos else self._finder.push(self._detokenizer.push((token_id,)), is_armed=is_armed)
        is_last = is_stop or num_generated >= self._request.max_tokens
        if is_last:
            text += self._flush(is_armed=is_armed)
        if self._finder.matched is not None:
            ended: GenerationEnded | None = self._end(FinishReason.STOP, matched_stop=self._finder.matched)
        elif is_stop:
            ended = self._end(FinishReason.STOP, matched_token_id=token_id)
        else:
            ended = self._end(FinishReason.LENGTH) if is_last else None
        return GeneratedDelta(text, (token,)), ended

    def abort(self) -> GenerationEnded:
        """Returns the end of a request that was aborted."""
        return self._end(FinishReason.ABORT)

    def _flush(self, *, is_armed: bool) -> str:
        return self._finder.push(self._detokenizer.flush(), is_armed=is_armed) + self._finder.finish()

    def _end(
        self, reason: FinishReason, *, matched_stop: str | None = None, matched_token_id: int | None = None
    ) -> GenerationEnded:
        return GenerationEnded(
            reason,
            num_prompt_tokens=self._request.num_prompt_tokens,
            num_completion_tokens=self._request.num_generated_tokens,
            matched_stop=matched_stop,
            matched_token_id=matched_token_id,
            num_cached_tokens=self._request.num_cached_tokens,
        )
