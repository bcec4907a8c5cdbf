"""Flags made from a settings class, which stays the only source of names, defaults and help."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from rich.markup import escape

from ringplan_cli.errors import BadSettingsError

Settings = TypeVar("Settings", bound=BaseModel)
Given = dict[str, str | bool | list[str]]
GivenMapping = Mapping[str, str | bool | list[str]]


def build_flags(
    settings_class: type[BaseModel], *, prefix: str = "", panel: str = "Options", leave_out: Iterable[str] = ()
) -> list[inspect.Parameter]:
    """Builds a command's parameters, one for each setting.

    Args:
        settings_class: the settings.
        prefix: stands before each flag's name, such as "planner_".
        panel: the flags' heading on the help page.
        leave_out: settings that get no flag.

    Returns:
        Parameters for `with_parameters`.
    """
    skipped = set(leave_out)
    return [
        _build_flag(name, field, prefix, panel)
        for name, field in settings_class.model_fields.items()
        if name not in skipped
    ]


def with_parameters(
    parameters: Iterable[inspect.Parameter],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command made-up parameters beside its own; it finds their values in its `typer.Context`.

    Args:
        parameters: keyword-only parameters whose annotations typer understands.

    Returns:
        A decorator for the command, whose first parameter is the context.
    """
    added = list(parameters)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command)

        def run(**values: Any) -> None:
            command(**{name: values[name] for name in own.parameters})

        signature = own.replace(parameters=[*own.parameters.values(), *added])
        run.__name__ = command.__name__
        run.__doc__ = command.__doc__
        run.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        run.__signature__ = signature  # type: ignore[attr-defined]  # How `inspect` lets a function say what it takes.
        return run

    return decorate


def read_given(context: typer.Context, settings_class: type[BaseModel], *, prefix: str = "") -> Given:
    """Returns the settings that were given as flags, by their own names.

    Args:
        context: the running command's.
        settings_class: the settings.
        prefix: as given to `build_flags`.
    """
    given = {}
    for name in settings_class.model_fields:
        source = context.get_parameter_source(prefix + name)
        if source is not None and source.name == "COMMANDLINE":
            given[name] = context.params[prefix + name]
    return given


def build_settings(settings_class: type[Settings], given: GivenMapping, *, prefix: str = "") -> Settings:
    """Builds settings from flags, and from the environment where no flag was given.

    Args:
        settings_class: the settings.
        given: what the flags say, by setting.
        prefix: as given to `build_flags`; it appears in error messages only.

    Raises:
        BadSettingsError: a setting is unknown, malformed or out of range; the message names all of them.
    """
    values: dict[str, Any] = dict(given)
    try:
        return settings_class(**values)
    except ValidationError as error:
        environment_prefix = str(settings_class.model_config.get("env_prefix", ""))
        raise BadSettingsError(
            "; ".join(_describe(problem, given, prefix, environment_prefix) for problem in error.errors())
        ) from None


def build_arguments(given: GivenMapping) -> list[str]:
    """Turns settings back into the flags that give them, for a process that is started with them.

    Args:
        given: values by setting.
    """
    arguments = []
    for name, value in given.items():
        flag = _name_flag(name)
        if isinstance(value, bool):
            arguments.append(flag if value else _name_flag(f"no_{name}"))
        else:
            arguments += [f"{flag}={item}" for item in ([value] if isinstance(value, str) else value)]
    return arguments


def write_value(value: Any) -> str:
    """Returns a value as a person would type it.

    Args:
        value: of a setting.
    """
    return _write_member(value) if isinstance(value, Enum) else str(value)


def name_type(annotation: Any) -> str:
    """Returns what stands for a setting's value on a help page.

    Args:
        annotation: the setting's type.
    """
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "|".join(_write_member(member) for member in annotation)
    if arguments := [argument for argument in get_args(annotation) if argument is not type(None)]:
        return name_type(arguments[0])
    return f"<{annotation.__name__.lower()}>"


def _build_flag(name: str, field: FieldInfo, prefix: str, panel: str) -> inspect.Parameter:
    default = field.get_default(call_default_factory=True, validated_data={})
    flag = _name_flag(prefix + name)
    kind: Any
    if field.annotation is bool:
        kind = bool
        if default:
            flag += "/" + _name_flag(f"no_{prefix}{name}")
    elif get_origin(field.annotation) in {list, tuple}:
        kind, default = list[str], [str(value) for value in default]
    else:
        kind, default = str | None, None if default is None else write_value(default)
    option = typer.Option(
        flag,
        help=escape(field.description or ""),
        metavar=None if kind is bool else name_type(field.annotation),
        rich_help_panel=panel,
        show_default=bool(default),
    )
    return inspect.Parameter(
        prefix + name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _name_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _write_member(member: Enum) -> str:
    return member.value if isinstance(member.value, str) else member.name.lower()


def _describe(problem: Mapping[str, Any], given: GivenMapping, prefix: str, environment_prefix: str) -> str:
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not problem["loc"]:
        return message
    name = str(problem["loc"][0])
    source = _name_flag(prefix + name) if name in given else environment_prefix + name.upper()
    message = message[0].lower() + message[1:]
    return f"{source}: {message} (got {problem['input']!r})"
