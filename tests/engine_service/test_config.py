"""The engine's settings: defaults, sources, and what is refused."""

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from engine_service.config import (
    EngineSettings,
    GuidancePlan,
    PlanCacheMode,
    VllmApi,
    build_default_planner_socket,
    set_thread_defaults,
)
from planner_service.config import PlannerSettings


def test_the_defaults_are_what_the_documentation_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any setting: the packaged model, this machine only, the planner's ring and cache."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/someone/.cache")
    assert EngineSettings().model_dump() == {
        "model": "smollm2",
        "dtype": "auto",
        "device": "auto",
        "attention_backend": "auto",
        "flashinfer_workspace_bytes": 134_217_728,
        "cuda_graphs": True,
        "pin_regions": True,
        "num_threads": 0,
        "pack_weights": True,
        "model_cache": True,
        "model_cache_dir": Path("/home/someone/.cache/ringplan/models"),
        "listen": "127.0.0.1:50051",
        "vllm_api": VllmApi.AUTO,
        "metrics_host": "127.0.0.1",
        "metrics_port": 9465,
        "planner": f"unix:/tmp/ringplan-{os.geteuid()}/planner.sock",
        "planner_connect_timeout_seconds": 10.0,
        "plan_timeout_seconds": 30.0,
        "ring_depth": 0,
        "cache_mode": PlanCacheMode.PLANNER_DEFAULT,
        "plan_ahead": 8,
        "guidance_plan": GuidancePlan.SEPARATE,
        "engine_name": "engine",
        "page_size": 16,
        "num_pages": 0,
        "memory_share": 0.25,
        "max_running_requests": 32,
        "max_queued_requests": 256,
        "max_step_tokens": 512,
        "pad_decode_batches": True,
        "default_max_tokens": 256,
        "shutdown_grace_seconds": 30.0,
        "log_level": "info",
        "log_json": False,
    }


@pytest.mark.parametrize("runtime_dir", [None, "/run/user/7"])
def test_engine_looks_where_a_default_planner_listens(monkeypatch: pytest.MonkeyPatch, runtime_dir: str | None) -> None:
    """Both services agree on the socket without being told."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    if runtime_dir is not None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime_dir)
    assert build_default_planner_socket() == PlannerSettings().socket
    assert EngineSettings().planner == f"unix:{PlannerSettings().socket}"


@pytest.mark.parametrize("cache_home", [None, "", "relative/path"])
def test_converted_models_are_kept_in_the_users_cache_folder(
    monkeypatch: pytest.MonkeyPatch, cache_home: str | None
) -> None:
    """`~/.cache` where nothing else is said, or what is said is no absolute path."""
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if cache_home is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", cache_home)
    assert EngineSettings().model_cache_dir == Path("/home/someone/.cache/ringplan/models")


def test_waiting_threads_do_not_spin_unless_the_user_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user has set stays."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    set_thread_defaults()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    set_thread_defaults()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def test_variables_set_fields_and_arguments_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field comes from its argument, or else from its variable."""
    monkeypatch.setenv("RINGPLAN_ENGINE_PAGE_SIZE", "4")
    monkeypatch.setenv("RINGPLAN_ENGINE_NUM_PAGES", "100")
    settings = EngineSettings(num_pages=50)
    assert (settings.page_size, settings.num_pages) == (4, 50)


@pytest.mark.parametrize("name", ["RINGPLAN_ENGINE_PAGESIZE", "ringplan_engine_pages", "RINGPLAN_ENGINE_"])
def test_unknown_variable_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A misspelt variable is never silently ignored."""
    monkeypatch.setenv(name, "4")
    with pytest.raises(ValidationError, match=name):
        EngineSettings()


def test_unknown_argument_is_an_error_that_names_it() -> None:
    """A misspelt setting is never silently ignored."""
    with pytest.raises(ValidationError, match="pagesize"):
        EngineSettings.model_validate({"pagesize": 4})


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        ("planner", PlanCacheMode.PLANNER_DEFAULT),
        ("off", PlanCacheMode.OFF),
        ("0", PlanCacheMode.OFF),
        (1, PlanCacheMode.ON),
        ("verify", PlanCacheMode.VERIFY),
        ("2", PlanCacheMode.VERIFY),
    ],
)
def test_cache_mode_is_a_name_or_a_number(value: object, mode: PlanCacheMode) -> None:
    """0, 1 and 2 stand for off, on and verify."""
    assert EngineSettings.model_validate({"cache_mode": value}).cache_mode is mode


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:50051", "localhost:80", "unix:/tmp/engine.sock"])
def test_address_is_host_and_port_or_a_unix_socket(listen: str) -> None:
    """Both forms are taken as they are."""
    assert EngineSettings(listen=listen).listen == listen


@pytest.mark.parametrize(
    "listen",
    ["50051", ":50051", "host:", "host:66000", "host:-1", "unix:", "unix:/" + "x" * 107, "\udcff:50051"],
)
def test_malformed_address_is_refused(listen: str) -> None:
    """What cannot be an address is an error at start that names the setting."""
    with pytest.raises(ValidationError, match="listen"):
        EngineSettings(listen=listen)


@pytest.mark.parametrize("planner", ["127.0.0.1:50052", "planner.sock", "", "unix:"])
def test_planner_must_be_a_unix_socket(planner: str) -> None:
    """Engine and planner share memory, so an address on a network makes no sense."""
    with pytest.raises(ValidationError, match="planner"):
        EngineSettings(planner=planner)


def test_step_must_have_a_token_for_each_running_request() -> None:
    """Two settings that contradict each other are refused, with both figures."""
    with pytest.raises(ValidationError, match=r"max_step_tokens \(8\).*max_running_requests \(16\)"):
        EngineSettings(max_step_tokens=8, max_running_requests=16)


@pytest.mark.parametrize(
    "given",
    [
        {"num_pages": 1},
        {"ring_depth": 1},
        {"page_size": 0},
        {"memory_share": 0.0},
        {"memory_share": 1.5},
        {"dtype": "int8"},
    ],
)
def test_value_out_of_range_is_refused(given: dict[str, object]) -> None:
    """Every figure has its range."""
    with pytest.raises(ValidationError, match=next(iter(given))):
        EngineSettings.model_validate(given)


def test_settings_cannot_be_changed() -> None:
    """What a process was started with is what it runs with."""
    with pytest.raises(ValidationError, match="frozen"):
        EngineSettings().page_size = 8  # type: ignore[misc]  # That it fails is the rule.


def test_only_this_module_reads_the_environment() -> None:
    """No other module of the engine looks into os.environ."""
    folder = Path(__file__).parents[2] / "engine_service"
    readers = [
        path.name for path in folder.rglob("*.py") if "environ" in path.read_text() or "getenv" in path.read_text()
    ]
    assert readers == ["config.py"]
