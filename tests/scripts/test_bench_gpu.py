"""`scripts/bench_gpu.py`: it runs, on the CPU as it is and with what stands in for a GPU."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import bench_gpu
from tests.engine_service.copied_backend import CopiedTorchBackend, RerunCapturer
from tests.engine_service.held_copies import HeldCopyEngine, build_held_copies


def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """Runs it; returns its document and what it prints."""
    path = folder / "gpu.json"
    assert bench_gpu.main(["--device", "cpu", "--short", "--json", str(path)]) == 0
    document: dict[str, Any] = json.loads(path.read_text())
    return document, capsys.readouterr().out


def check(document: dict[str, Any], printed: str) -> None:
    """Checks that every case has its figures and its line."""
    cases = document["cases"]
    assert len(cases) == len(bench_gpu.CASES) * len(bench_gpu.SHORT.concurrencies)
    assert document["left_out"] == []
    for case in cases:
        assert case["decode_tokens_per_second"] > 0
        assert 0 < case["planning_seconds"] < case["step_seconds"]
        assert 0 < case["model_seconds"] < case["step_seconds"] - case["planning_seconds"]
    assert len(printed.strip().splitlines()) == 2 + len(cases)
    assert {(case["planner"], case["cache_mode"]) for case in cases} == {
        ("process", "on"),
        ("process", "off"),
        ("process", "verify"),
        ("thread", "on"),
        ("thread", "off"),
    }


def test_every_case_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is copied there, so nothing is pinned or captured."""
    document, printed = run(tmp_path, capsys)
    check(document, printed)
    assert {case["is_pinned"] for case in document["cases"]} == {None}
    assert not any(case["uses_graphs"] for case in document["cases"])


def test_every_case_runs_on_copies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: pinned and pageable, replayed and not, every plan copied as it was made."""
    engines: list[HeldCopyEngine] = []
    capturer = RerunCapturer()

    def build(
        _device: torch.device, *, pins: bool, on_pinned_changed: Callable[[bool], None], **_others: object
    ) -> object:
        engines.append(HeldCopyEngine(num_held_queries=2))
        # The first case is refused: its two lines are to say so.
        on_pinned_changed(pins and len(engines) > 3)
        return build_held_copies(engines[-1])

    monkeypatch.setattr(bench_gpu, "build_plan_copies", build)
    monkeypatch.setattr(bench_gpu, "CudaCapturer", lambda _device: capturer)
    monkeypatch.setattr(
        bench_gpu,
        "choose_attention_backend",
        lambda _name, loaded, *, page_size, **_others: CopiedTorchBackend(loaded.kv_shape, page_size),
    )
    document, printed = run(tmp_path, capsys)
    check(document, printed)
    pageable = [number for number, case in enumerate(document["cases"]) if not case["is_pinned"]]
    assert pageable == [0, 1, 8, 9]
    assert {case["uses_graphs"] for case in document["cases"]} == {True, False}
    assert capturer.num_replayed > 0
    assert sum(engine.num_rewritten for engine in engines) == 0
    assert sum(len(engine.events) for engine in engines) > 100


def test_what_there_is_no_time_for_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case that would begin too late is named, not silently missing."""
    monkeypatch.setattr(bench_gpu, "SHORT", bench_gpu.Extent((2,), (4, 5), 4, 1, -1.0, bench_gpu.TINY))
    document, _ = run(tmp_path, capsys)
    assert document["cases"] == []
    assert len(document["left_out"]) == len(bench_gpu.CASES)
