"""`model_progress.py`: what transformers would draw is reported, and it is left as it was."""

import gguf
import pytest
import transformers.modeling_gguf_pytorch_utils as transformers_gguf
from transformers.utils import logging as transformers_logging

from engine_service.model_progress import gguf_parsed_once, reported_progress


def test_bars_of_transformers_report_instead_of_drawing(capfd: pytest.CaptureFixture[str]) -> None:
    """Both the one behind its logging and the one of its GGUF reader."""
    reports: list[tuple[str, float]] = []
    with reported_progress(lambda stage, share: reports.append((stage, share)), "loading"):
        assert list(transformers_logging.tqdm([1, 2], desc="x")) == [1, 2]
        assert list(transformers_gguf.tqdm(iter("abcd"), desc="y")) == ["a", "b", "c", "d"]
        with transformers_logging.tqdm(total=3) as bar:
            bar.update(1)
    assert reports == [("loading", share) for share in (0.0, 0.5, 0.0, 0.25, 0.5, 0.75)]
    assert capfd.readouterr() == ("", "")


def test_transformers_and_gguf_are_left_as_they_were() -> None:
    """Also when loading fails."""

    def look() -> tuple[object, ...]:
        hook = transformers_logging.set_tqdm_hook(None)
        transformers_logging.set_tqdm_hook(hook)
        return hook, transformers_gguf.tqdm, gguf.GGUFReader, gguf.get_tensor_name_map

    before = look()

    def fail() -> None:
        with reported_progress(lambda _stage, _share: None, "loading"), gguf_parsed_once():
            assert all(during is not original for during, original in zip(look(), before, strict=True))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert look() == before
