"""What is asked when: drawn from a seed before anything is sent, so that the load never depends on the answers."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ringplan_cli.load.options import DEFAULT_REQUESTS, LoadOptions

MAX_REQUESTS = 1_000_000
_SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request of a load.

    Args:
        arrival_seconds: when it is due, counted from the start.
        seed: makes its prompt's tokens, its contexts' tokens and its answer.
        max_tokens: tokens to generate.
        prompt_tokens: tokens of the prompt, or None if `text` is the prompt.
        text: the prompt, or None.
        n: samples.
        guidance_tokens: tokens of each further context.
    """

    arrival_seconds: float
    seed: int
    max_tokens: int
    prompt_tokens: int | None = None
    text: str | None = None
    n: int = 1
    guidance_tokens: tuple[int, ...] = ()

    @property
    def num_answer_tokens(self) -> int:
        """Tokens of all samples together, if each has its full length."""
        return self.n * self.max_tokens


def build_schedule(options: LoadOptions) -> list[LoadRequest]:
    """Draws a load.

    Arrivals, lengths and kinds come from random streams of their own: a higher rate brings the same requests sooner,
    and more requests begin with the same ones.

    Args:
        options: what it is to be like.

    Returns:
        Its requests in the order of their arrival, the first at 0.

    Raises:
        ValueError: there would be too many.
    """
    seeds = np.random.SeedSequence(options.seed).spawn(6)
    gaps, prompts, answers, guided, sampled, own = (np.random.default_rng(seed) for seed in seeds)
    requests: list[LoadRequest] = []
    for arrival_seconds in _draw_arrivals(options, gaps):
        if len(requests) == MAX_REQUESTS:
            raise ValueError(f"a load has at most {MAX_REQUESTS:,} requests; give fewer, or a shorter duration")
        prompt_tokens = options.prompt_tokens.draw(prompts)
        is_guided = guided.random() < options.guided_share
        requests.append(
            LoadRequest(
                arrival_seconds=arrival_seconds,
                seed=int(own.integers(1 << _SEED_BITS)),
                max_tokens=options.answer_tokens.draw(answers),
                prompt_tokens=prompt_tokens,
                n=options.samples if sampled.random() < options.samples_share else 1,
                guidance_tokens=(prompt_tokens,) * options.guidance_contexts if is_guided else (),
            )
        )
    return requests


def fit_to_context(requests: list[LoadRequest], max_context_tokens: int) -> tuple[list[LoadRequest], int]:
    """Shortens drawn requests that the model has no room for: the answer gives way first, down to one token.

    Args:
        requests: the load.
        max_context_tokens: tokens of prompt and answer together, at most.

    Returns:
        The load as it fits, and how many requests were shortened.
    """
    fitted = [_fit(request, max_context_tokens) for request in requests]
    return fitted, sum(old != new for old, new in zip(requests, fitted, strict=True))


def _draw_arrivals(options: LoadOptions, random: np.random.Generator) -> Iterator[float]:
    """Yields when requests arrive, until there are enough.

    Source: gaps of a gamma distribution with mean 1 / rate and coefficient of variation `burstiness`: its shape is
    1 / burstiness^2. Shape 1 is the exponential distribution, whose arrivals are a Poisson process.
    """
    most = options.requests
    if most is None and options.duration_seconds is None:
        most = DEFAULT_REQUESTS
    variance = options.burstiness**2
    now, number = 0.0, 0
    while (most is None or number < most) and (options.duration_seconds is None or now < options.duration_seconds):
        yield now
        number += 1
        now += (random.gamma(1 / variance, variance) if variance else 1.0) / options.rate


def _fit(request: LoadRequest, max_context_tokens: int) -> LoadRequest:
    if request.prompt_tokens is None:
        return request
    most = max(1, max_context_tokens - 1)
    prompt_tokens = min(request.prompt_tokens, most)
    guidance_tokens = tuple(min(num_tokens, most) for num_tokens in request.guidance_tokens)
    room = max(1, max_context_tokens - max(prompt_tokens, *guidance_tokens, 0))
    return replace(
        request,
        prompt_tokens=prompt_tokens,
        guidance_tokens=guidance_tokens,
        max_tokens=min(request.max_tokens, room),
    )
