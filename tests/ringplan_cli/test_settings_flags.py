"""Flags that are made from a settings class."""

from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from pydantic import BaseModel, Field
from pydantic_settings import BaseSettings, SettingsConfigDict
from typer.testing import CliRunner

from ringplan_cli.errors import BadSettingsError
from ringplan_cli.settings_flags import (
    build_arguments,
    build_flags,
    build_settings,
    name_type,
    read_given,
    with_parameters,
    write_value,
)


class Colour(Enum):
    """An enum whose values are no text."""

    RED = 1
    BLUE = 2


class BoatSettings(BaseSettings):
    """One setting of each kind."""

    model_config = SettingsConfigDict(env_prefix="BOAT_", extra="forbid", frozen=True)

    num_oars: int = Field(2, ge=0, description="Oars [port and starboard].")
    speed: float = Field(1.5, gt=0, description="Knots.")
    name: str = Field("Ada", description="Painted on the bow.")
    log: Path = Field(Path("/tmp/log"), description="Where the log is.")
    sail: Literal["up", "down"] = Field("down", description="The sail.")
    is_fast: bool = Field(False, description="Fast.")
    is_afloat: bool = Field(True, description="Afloat.")
    owner: str | None = Field(None, description="Who owns it.")
    crew: list[str] = Field([], description="Who sails it.")


def run(*arguments: str, prefix: str = "") -> tuple[BoatSettings, str]:
    """Runs a command made of `BoatSettings` and returns what it was told, and its output."""
    app, seen = typer.Typer(add_completion=False), []

    @app.command()
    @with_parameters(build_flags(BoatSettings, prefix=prefix))
    def sail(context: typer.Context, *, own: Annotated[int, typer.Option()] = 7) -> None:
        assert own == 7
        seen.append(build_settings(BoatSettings, read_given(context, BoatSettings, prefix=prefix), prefix=prefix))

    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert "--help" in arguments or seen, result.output
    return (seen or [BoatSettings()])[0], result.output


def test_without_flags_the_defaults_hold() -> None:
    """A command that is told nothing has the settings' own defaults."""
    assert run()[0] == BoatSettings()


def test_every_kind_of_setting_can_be_given() -> None:
    """Numbers, text, paths, choices, switches and lists all arrive as the settings want them."""
    arguments = ["--num-oars", "4", "--speed", "2", "--name", "Eve", "--log", "/var/log", "--sail", "up", "--is-fast"]
    arguments += ["--no-is-afloat", "--owner", "Jo"]
    settings, _ = run(*arguments, "--crew", "Al", "--crew", "Bo")
    assert settings == BoatSettings(
        num_oars=4,
        speed=2.0,
        name="Eve",
        log=Path("/var/log"),
        sail="up",
        is_fast=True,
        is_afloat=False,
        owner="Jo",
        crew=["Al", "Bo"],
    )


def test_flag_comes_before_variable_and_variable_before_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag beats the environment, which beats the default, even if the flag says what the default is."""
    monkeypatch.setenv("BOAT_NUM_OARS", "8")
    assert run()[0].num_oars == 8
    assert run("--num-oars", "2")[0].num_oars == 2


def test_help_page_shows_description_values_and_default() -> None:
    """The help page tells of a setting what its field tells, brackets included."""
    _, output = run("--help")
    for text in ("--num-oars", "Oars [port and starboard].", "[default: 2]", "up|down", "[default: down]", "<path>"):
        assert text in output


def test_prefix_stands_before_every_flag() -> None:
    """With a prefix, the same settings stand beside others without a clash."""
    assert run("--boat-num-oars", "6", prefix="boat_")[0].num_oars == 6


def test_error_names_the_flag_that_is_wrong() -> None:
    """A bad flag is named as it was typed, with its prefix, with the rule and the value."""
    with pytest.raises(BadSettingsError, match=r"^--boat-speed: input should be greater than 0 \(got '-1'\)$"):
        run("--boat-speed", "-1", prefix="boat_")


def test_error_names_the_variable_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad environment variable is named as such."""
    monkeypatch.setenv("BOAT_SPEED", "quick")
    with pytest.raises(BadSettingsError, match=r"^BOAT_SPEED: .*got 'quick'"):
        run()


def test_bad_settings_end_with_exit_status_2() -> None:
    """Bad settings are usage errors."""
    with pytest.raises(BadSettingsError) as caught:
        run("--num-oars", "many")
    assert caught.value.exit_code == 2


def test_arguments_give_back_the_settings_they_were_made_of() -> None:
    """A process that is started with `build_arguments` gets what was given."""
    given = {
        "num_oars": "4",
        "name": "-x y=z",
        "is_fast": True,
        "is_afloat": False,
        "crew": ["Al", "--name=Bo"],
        "log": "/a b",
    }
    settings, _ = run(*build_arguments(given))
    assert settings == build_settings(BoatSettings, given)


def test_left_out_settings_have_no_flag() -> None:
    """A setting that a command decides by itself is no flag of it."""
    names = [parameter.name for parameter in build_flags(BoatSettings, leave_out=["speed"])]
    assert names == [name for name in BoatSettings.model_fields if name != "speed"]


def test_enums_are_written_by_name_if_their_values_are_no_text() -> None:
    """A person types words, whatever the members' values are."""
    assert write_value(Colour.RED) == "red"
    assert name_type(Colour) == "red|blue"


def test_plain_models_work_without_an_environment() -> None:
    """Options that are no settings of a service can be flags too."""

    class Options(BaseModel):
        depth: int = 3

    assert build_settings(Options, {"depth": "4"}).depth == 4
    with pytest.raises(BadSettingsError, match=r"^--depth: "):
        build_settings(Options, {"depth": "x"})
