"""The yardsticks as a process of their own, for a benchmark that runs the engine as one (`python -m ...`).

It reads one JSON object a line from standard input and writes one line in answer to each; the first says what to load.
"""

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine_service.model_cache import ModelCache
from engine_service.model_loading import LoadedModel, load_model
from engine_service.yardsticks import Task, generate_continuously, generate_in_batches, time_bare_steps


def serve(lines: Iterable[str], answer: Callable[[dict[str, Any]], None]) -> None:
    """Answers requests until there are no more.

    Args:
        lines: of JSON. The first has the engine's settings `model`, `dtype`, `num_threads`, `model_cache_dir` (None
            converts a GGUF model each time) and `packs_weights`; the others have a `method`, "generate", "continuous"
            or "forward", and its arguments.
        answer: called with each answer.
    """
    requests = (json.loads(line) for line in lines)
    options = next(requests)
    packs_weights: bool = options.pop("packs_weights")
    loaded = bare = _load(**options)
    if packs_weights:
        # transformers has its model as it is; the limit is what the engine's own model can do.
        bare = _load(**options)
        bare.pack_weights()
    answer({"threads": torch.get_num_threads(), "torch": torch.__version__})
    methods: dict[str, Callable[..., float]] = {
        "generate": partial(_time_generate, loaded),
        "continuous": partial(_time_continuous, loaded),
        "forward": partial(_time_forward, bare),
    }
    for request in requests:
        answer({"seconds": methods[request.pop("method")](**request)})


def _load(model: str, dtype: str, num_threads: int, model_cache_dir: str | None) -> LoadedModel:
    if num_threads:
        torch.set_num_threads(num_threads)
    cache = None if model_cache_dir is None else ModelCache(Path(model_cache_dir))
    return load_model(model, dtype=dtype, cache=cache)


def _time_generate(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]], num_new: Sequence[int], batch_size: int
) -> float:
    """Returns the seconds that transformers' `generate` takes for these prompts, in static batches."""
    return generate_in_batches(loaded, _build_tasks(prompts, num_new), batch_size)[1]


def _time_continuous(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]], num_new: Sequence[int], batch_size: int
) -> float:
    """Returns the seconds that transformers' continuous batching takes for these prompts."""
    return generate_continuously(loaded, _build_tasks(prompts, num_new), batch_size)[1]


def _build_tasks(prompts: Sequence[Sequence[int]], num_new: Sequence[int]) -> list[Task]:
    return [Task(tuple(prompt), count) for prompt, count in zip(prompts, num_new, strict=True)]


def _time_forward(loaded: LoadedModel, num_rows: int, num_past_tokens: int, num_steps: int) -> float:
    """Returns the median seconds of a decode step of the bare model."""
    return statistics.median(time_bare_steps(loaded, num_rows, num_past_tokens, num_steps))


def _main() -> None:
    # What libraries print must not get among the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def write(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    serve(sys.stdin, write)


if __name__ == "__main__":
    _main()
