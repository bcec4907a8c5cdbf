"""What keeps an engine from starting is told before a session is opened, by an error that says what to change."""

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from engine_service.assembly import assemble_engine
from engine_service.config import EngineSettings
from engine_service.errors import InvalidModelError, ModelError, NotEnoughMemoryError
from planner_service.client import PlannerUnavailableError
from tests.engine_service.tiny_models import save_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    return save_tiny_checkpoint("llama", tmp_path_factory.mktemp("model"))


def assemble(model: Path, **settings: object) -> None:
    """Puts an engine together whose planner is not there: whatever fails before fails first."""
    given = {"model": str(model), "planner": "unix:/nowhere/planner.sock", "planner_connect_timeout_seconds": 0.1}
    assemble_engine(
        EngineSettings.model_validate(given | settings),
        CollectorRegistry(),
        deliver=lambda _events: None,
        on_ready_changed=lambda _is_ready: None,
        on_ended=lambda: None,
    )


def test_pages_that_do_not_fit_are_refused_with_the_figures_and_the_flag(checkpoint: Path) -> None:
    """How many were asked for, how many fit, and which setting changes it."""
    with pytest.raises(NotEnoughMemoryError, match="change num_pages") as caught:
        assemble(checkpoint, num_pages=100_000_000)
    # 3 layers, keys and values, 16 tokens, 2 heads of 16 numbers of 4 bytes.
    assert caught.value.bytes_per_page == 3 * 2 * 16 * 2 * 16 * 4
    assert caught.value.num_pages_wanted == 100_000_000
    assert 0 < caught.value.num_pages_fit < 100_000_000
    assert str(caught.value.num_pages_fit) in str(caught.value)


def test_share_of_memory_that_holds_no_page_is_refused_with_the_flag(checkpoint: Path) -> None:
    """The message names the share, and the other way out."""
    with pytest.raises(NotEnoughMemoryError, match="change memory_share, or give num_pages"):
        assemble(checkpoint, memory_share=1e-12)


def test_missing_model_is_named() -> None:
    """The path that was given stands in the message."""
    with pytest.raises(ModelError, match=re.escape("/nowhere/model")):
        assemble(Path("/nowhere/model"))


def test_folder_without_weights_is_named(tmp_path: Path) -> None:
    """What is missing stands in the message."""
    (save_tiny_checkpoint("llama", tmp_path) / "model.safetensors").unlink()
    with pytest.raises(InvalidModelError, match=r"no .*safetensors weights"):
        assemble(tmp_path)


def test_missing_planner_is_told_once_all_else_is_well(checkpoint: Path) -> None:
    """The address stands in the message."""
    with pytest.raises(PlannerUnavailableError, match=re.escape("unix:/nowhere/planner.sock")):
        assemble(checkpoint, num_pages=10)
