"""What loading a model through transformers needs while it lasts: progress that is reported, and no parsing twice."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import transformers.modeling_gguf_pytorch_utils as transformers_gguf
from transformers.utils import logging as transformers_logging

Report = Callable[[str, float], None]


@contextmanager
def reported_progress(report: Report, stage: str) -> Iterator[None]:
    """While it lasts, transformers' progress bars report instead of drawing.

    Args:
        report: called with `stage` and how far it is, 0 to 1.
        stage: what is being done.
    """

    def build_loop(
        _factory: Callable[..., Any], arguments: tuple[Any, ...], _keywords: dict[str, Any]
    ) -> _ReportedLoop:
        return _ReportedLoop(arguments[0] if arguments else (), stage, report)

    previous = transformers_logging.set_tqdm_hook(build_loop)
    try:
        # Its GGUF reader takes its bar from tqdm itself, past the hook.
        with _replaced(
            transformers_gguf,
            "tqdm",
            lambda items, **_keywords: _ReportedLoop(items, stage, report),
        ):
            yield
    finally:
        transformers_logging.set_tqdm_hook(previous)


@contextmanager
def gguf_parsed_once() -> Iterator[None]:
    """While it lasts, a GGUF file and its table of tensor names are parsed once.

    transformers asks for the file three times and for the table once a layer and module, at seconds in all.
    """
    import gguf  # noqa: PLC0415 - only a GGUF file needs it.

    with (
        _replaced(gguf, "GGUFReader", functools.cache(gguf.GGUFReader)),
        _replaced(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
    ):
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


class _ReportedLoop:
    """Stands in for a tqdm progress bar."""

    def __init__(self, items: Any, stage: str, report: Report) -> None:
        self._items = items
        self._stage = stage
        self._report = report

    def __iter__(self) -> Iterator[Any]:
        items = list(self._items)
        for index, item in enumerate(items):
            self._report(self._stage, index / len(items))
            yield item

    def __enter__(self) -> "_ReportedLoop":
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Returns what does nothing, for whatever else a bar can do."""
        return lambda *_arguments, **_keywords: None
