"""What sampling one request needs from token to token."""

from collections.abc import Sequence

import numpy as np
import torch

from engine_service.sampling_params import SamplingParams


class SamplingState:
    """What sampling one request needs from token to token. It survives preemption: it is not rebuilt on recomputation.

    Args:
        params: how the request wants its tokens chosen.
        prompt_token_ids: the prompt, which the repetition penalty counts as seen.
        vocab_size: number of logits of a row.
        num_logprobs: None for no log-probabilities, 0 for the chosen token's only, else so many of the likeliest too.
        min_tokens: tokens to choose before one of `end_token_ids` may be.
        end_token_ids: tokens that would end the answer.

    Attributes:
        seen: bool [vocab_size], the tokens of prompt and answer; None where the repetition penalty does nothing.
        counts: float32 [vocab_size], how often the answer has each token; None where nothing depends on it.
    """

    __slots__ = (
        "_end_token_ids",
        "_generator",
        "_min_tokens",
        "_num_sampled",
        "counts",
        "num_logprobs",
        "params",
        "seen",
    )

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        vocab_size: int,
        num_logprobs: int | None = None,
        min_tokens: int = 0,
        end_token_ids: Sequence[int] = (),
    ) -> None:
        self.params = params
        self.num_logprobs = num_logprobs
        self._min_tokens = min_tokens
        self._end_token_ids = tuple(end_token_ids)
        self._num_sampled = 0
        # numpy's, as torch's takes only the lower half of a 64-bit seed.
        self._generator = None if params.is_greedy else np.random.Generator(np.random.PCG64(params.seed))
        self.seen: torch.Tensor | None = None
        if params.repetition_penalty != 1.0:
            self.seen = torch.zeros(vocab_size, dtype=torch.bool)
            self.seen[torch.tensor(list(prompt_token_ids), dtype=torch.int64)] = True
        self.counts: torch.Tensor | None = None
        if params.presence_penalty or params.frequency_penalty:
            self.counts = torch.zeros(vocab_size, dtype=torch.float32)

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """The tokens that may not be chosen next."""
        return self._end_token_ids if self._num_sampled < self._min_tokens else ()

    def draw(self) -> float:
        """Returns the request's next random number, in [0, 1)."""
        assert self._generator is not None, "a greedy request draws no numbers"
        return self._generator.random()

    def append(self, token_id: int) -> None:
        """Takes note of the token that was chosen."""
        self._num_sampled += 1
        if self.seen is not None:
            self.seen[token_id] = True
        if self.counts is not None:
            self.counts[token_id] += 1
