"""Rules of the engine's process that need no process of planner and model; the others are integration tests."""

import logging
import subprocess
import sys

import pytest

from engine_service.server import _LoggedProgress


def test_process_listens_before_it_imports_torch() -> None:
    """A busy address is told, and a signal heard, without waiting seconds for torch and transformers."""
    code = "import sys, engine_service.server; sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_loading_logs_each_stage_once(caplog: pytest.LogCaptureFixture) -> None:
    """However often progress is reported, a stage is one line."""
    progress = _LoggedProgress()
    with caplog.at_level(logging.INFO, "engine_service.server"):
        for stage, share in (("weights", 0.0), ("weights", 0.5), ("ready", 1.0)):
            progress(stage, share)
    assert [record.getMessage() for record in caplog.records] == ["model: weights", "model: ready"]
