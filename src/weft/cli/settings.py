"""Options of a command that settings classes declare (``weft.base.settings``).

    @with_settings
    def command(context: typer.Context, typed: Annotated[Typed, From(TuneOptions)], fresh: bool = False) -> None:

The parameter ``typed`` stands for the options of all fields that have an option. The command gets the typed values by
field; other fields keep the defaults of the class, or the values of a file or of the environment.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Annotated, Any, get_args

import typer

from weft.base.settings import DeclaredSetting, settings_of, types_in
from weft.cli import common
from weft.cli.command import given_options

Typed = Mapping[str, Any]
"""Field -> value, of the typed options."""

COMPLETIONS = {
    "devices": common.complete_devices,
    "models": common.complete_models,
    "policies": common.complete_policies,
    "socs": common.complete_socs,
}
"""``CommandOption.completion`` -> the function that completes a value in a shell."""


class From:
    """Marks the parameter of a command that stands for the options of settings classes.

    converters: field -> function that converts the typed value of its option to the type of the field.
    """

    def __init__(self, *settings_classes: type[Any], **converters: Callable[[Any], Any]) -> None:
        settings = (setting for settings_class in settings_classes for setting in settings_of(settings_class))
        self.settings = {setting.name: setting for setting in settings if setting.option}
        self._converters = converters

    def parameters(self) -> list[inspect.Parameter]:
        """Return a parameter of a function for each option, from which typer makes the option."""
        return [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_default(setting),
                annotation=Annotated[_type(setting) | None, _option(setting)],
            )
            for name, setting in self.settings.items()
        ]

    def typed(self, context: typer.Context) -> Typed:
        """Return field -> typed value, converted to the type of the field."""
        options = given_options(context)
        return {
            name: self._value(name, options[name], context.params[name]) for name in self.settings if name in options
        }

    def _value(self, name: str, option: str, typed: Any) -> Any:
        """Return the value of the field *name*. option: its option's name, for messages. typed: the typed value."""
        if name in self._converters:
            return self._converters[name](typed)
        if _is_size(self.settings[name]):
            return common.parse_bytes(option, typed)
        return tuple(typed) if isinstance(typed, list) else typed


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give *command*, which takes the ``context``, the options of its parameters that are marked with ``From``."""
    parameters: list[inspect.Parameter] = []
    marks: dict[str, From] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        mark = next((item for item in get_args(parameter.annotation) if isinstance(item, From)), None)
        if mark is None:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        else:
            marks[parameter.name] = mark
            parameters += mark.parameters()
    declared = {name for mark in marks.values() for name in mark.settings}

    @wraps(command)
    def run(**arguments: Any) -> None:
        others = {name: value for name, value in arguments.items() if name not in declared}
        command(**others, **{name: mark.typed(arguments["context"]) for name, mark in marks.items()})

    # typer reads the annotations, and inspect the signature: both must have the options in place of the marks
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def declared(kind: type[Any], name: str) -> Any:
    """Return the option of the field *name* of a settings class, for a command with a parameter for it."""
    return next(_option(setting) for setting in settings_of(kind) if setting.name == name)


def _option(setting: DeclaredSetting) -> Any:
    """Return the option of a setting, for typer."""
    option = setting.option
    assert option is not None
    return typer.Option(
        *option_names(setting),
        help=setting.summary,
        rich_help_panel=option.panel,
        show_default=option.shown or True,
        metavar=option.metavar,
        autocompletion=COMPLETIONS[option.completion] if option.completion else None,
    )


def _type(setting: DeclaredSetting) -> Any:
    """Return the type of the option: text, unless the field takes a flag, a number or several texts."""
    assert setting.option is not None
    kinds = types_in(setting.hint) - {type(None)}
    if setting.option.text or _is_size(setting):
        return str
    if kinds & {tuple, Sequence, Mapping}:
        return list[str]
    return next((kind for kind in (bool, int, float) if kinds == {kind}), str)


def option_names(setting: DeclaredSetting) -> tuple[str, ...]:
    """Return the names of an option: ``--max-body`` for ``max_body_bytes``, also ``--no-...`` for flags that are on."""
    assert setting.option is not None
    names = setting.option.names
    if any(name.startswith("--") for name in names):
        return names
    name = setting.name.removesuffix("_bytes").replace("_", "-")
    return (
        f"--{name}/--no-{name}" if _type(setting) is bool and setting.default is not False else f"--{name}",
        *names,
    )


def _default(setting: DeclaredSetting) -> Any:
    """Return the default as a user would type it."""
    value = setting.default
    if _is_size(setting):
        return common.written_bytes(value)
    if isinstance(value, tuple):
        return list(value) or None
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_size(setting: DeclaredSetting) -> bool:
    """Return whether a setting is a number of bytes, which is typed as 512m."""
    return setting.name.endswith("_bytes")
