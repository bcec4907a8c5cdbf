"""The planner's settings: defaults, sources, and what is refused."""

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from planner_service.config import PlannerSettings
from planner_service.messages import CacheMode


def test_the_defaults_are_what_the_documentation_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any setting: ring depth 2, no cache, 30 s, metrics on this machine only, no drills."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    settings = PlannerSettings()
    user = os.geteuid()
    assert settings.model_dump() == {
        "socket": Path(f"/tmp/ringplan-{user}/planner.sock"),
        "ring_dir": Path(f"/dev/shm/ringplan-{user}"),
        "ring_depth": 2,
        "cache_mode": CacheMode.OFF,
        "cache_entries": 8,
        "capture_dir": Path(f"/tmp/ringplan-{user}/captures"),
        "max_captures": 32,
        "allow_drills": False,
        "ring_timeout_seconds": 30.0,
        "metrics_host": "127.0.0.1",
        "metrics_port": 9464,
        "max_sessions": 64,
        "shutdown_grace_seconds": 10.0,
        "log_level": "info",
        "log_json": False,
    }


def test_the_default_socket_is_in_the_users_runtime_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system gives a user a private folder, the socket is there."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert PlannerSettings().socket == Path("/run/user/7/ringplan/planner.sock")


def test_variables_set_fields_and_arguments_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field comes from its argument, or else from its variable."""
    monkeypatch.setenv("RINGPLAN_PLANNER_RING_DEPTH", "5")
    monkeypatch.setenv("RINGPLAN_PLANNER_MAX_SESSIONS", "6")
    settings = PlannerSettings(ring_depth=8)
    assert (settings.ring_depth, settings.max_sessions) == (8, 6)


@pytest.mark.parametrize("name", ["RINGPLAN_PLANNER_RING_DEPHT", "ringplan_planner_depth", "RINGPLAN_PLANNER_"])
def test_an_unknown_variable_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A misspelt variable is never silently ignored."""
    monkeypatch.setenv(name, "4")
    with pytest.raises(ValidationError, match=name):
        PlannerSettings()


def test_an_unknown_argument_is_an_error_that_names_it() -> None:
    """A misspelt argument is never silently ignored."""
    with pytest.raises(ValidationError, match="ring_dephth"):
        PlannerSettings.model_validate({"ring_dephth": 4})


@pytest.mark.parametrize(
    ("word", "mode"),
    [
        ("off", CacheMode.OFF),
        ("on", CacheMode.ON),
        ("verify", CacheMode.VERIFY),
        ("VERIFY", CacheMode.VERIFY),
        ("0", CacheMode.OFF),
        ("1", CacheMode.ON),
        ("2", CacheMode.VERIFY),
    ],
)
def test_a_cache_mode_has_a_name_and_a_number(monkeypatch: pytest.MonkeyPatch, word: str, mode: CacheMode) -> None:
    """Off is 0, on is 1, verify is 2, in a variable as in an argument."""
    monkeypatch.setenv("RINGPLAN_PLANNER_CACHE_MODE", word)
    assert PlannerSettings().cache_mode is mode
    assert PlannerSettings.model_validate({"cache_mode": word}).cache_mode is mode


def test_a_cache_mode_may_be_given_as_a_number_or_a_value() -> None:
    """Plain integers and the enum itself are taken too."""
    assert PlannerSettings.model_validate({"cache_mode": 2}).cache_mode is CacheMode.VERIFY
    assert PlannerSettings(cache_mode=CacheMode.ON).cache_mode is CacheMode.ON


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ring_depth", "1"),
        ("ring_depth", "1025"),
        ("ring_depth", "two"),
        ("cache_mode", "3"),
        ("cache_mode", "maybe"),
        ("ring_timeout_seconds", "0"),
        ("ring_timeout_seconds", "0.000001"),
        ("ring_timeout_seconds", "nan"),
        ("ring_timeout_seconds", "inf"),
        ("metrics_host", ""),
        ("metrics_port", "65536"),
        ("metrics_port", "-1"),
        ("max_sessions", "0"),
        ("shutdown_grace_seconds", "-1"),
        ("log_level", "loud"),
        ("log_json", "perhaps"),
        ("socket", ""),
        ("socket", "unix:"),
        ("ring_dir", ""),
        ("capture_dir", ""),
        ("ring_dir", "/not utf-8: \udcff"),
        ("capture_dir", "/not utf-8: \udcff"),
    ],
)
def test_a_bad_value_is_an_error_that_names_its_field(monkeypatch: pytest.MonkeyPatch, field: str, value: str) -> None:
    """Malformed and out-of-range values are refused at once, from the environment too."""
    monkeypatch.setenv(f"RINGPLAN_PLANNER_{field.upper()}", value)
    with pytest.raises(ValidationError, match=field):
        PlannerSettings()


def test_a_socket_may_be_written_as_a_target() -> None:
    """The "unix:" of a gRPC target is not part of the path."""
    assert PlannerSettings.model_validate({"socket": "unix:/run/p.sock"}).socket == Path("/run/p.sock")


def test_settings_do_not_change() -> None:
    """A running planner's settings are what they were at its start."""
    settings = PlannerSettings()
    with pytest.raises(ValidationError, match="frozen"):
        settings.ring_depth = 3


def test_every_setting_explains_itself() -> None:
    """Help texts come from here, so none is missing."""
    assert [name for name, field in PlannerSettings.model_fields.items() if not field.description] == []
