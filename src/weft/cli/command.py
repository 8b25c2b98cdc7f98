"""Commands: errors in the words of their options, refusal of options that do not apply, and termination.

A command that can be used in several ways declares in a table which of its options each way does not take, and what to
do instead. An option left at its default was not given, and is never refused.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand

from weft.base.errors import InputError, WeftError

STATED = ("COMMANDLINE", "ENVIRONMENT")
"""Sources of parameters that a user gave."""

PRICED = "a profile has its costs in it; make another with weft profile"
PROFILES_ONLY = {"batch": PRICED, "seq_len": PRICED, "tables": PRICED, "cost": PRICED, "shape": PRICED}
"""Option -> what to do instead, where there are profiles and no models to price."""

_UNITS = r"(?:_s|_ms|_j|_bytes|_gb_s)?"
"""Suffix of an argument after the name of its option."""
_LABEL = r"^(?:options|--[\w-]+): (?:\w+\.)*"
"""Prefix of a message that names the source of a value; the option replaces it."""
_PART = r"[\w./\\'\"`-]"
"""Characters next to a part of a path, of a key or of a quotation, and never next to a word."""
_ALONE, _ENDS = f"(?<!{_PART})", f"(?!{_PART})"
_KEY_OF_A_FILE = r"\S+\.(?:toml|json|npz|onnx): (?:[\w.]+ ){1,2}(?=(?:=|must|is|has) )"
"""Beginning of a message about a key of a file, which no option has set."""


class InOptions:
    """Mixin of commands: errors of the library, which name arguments, name the options that were given instead."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)  # type: ignore[misc]  # the other base is a typer command
        except WeftError as error:
            error.args = (in_options(str(error), ctx), *error.args[1:])
            raise


class Command(InOptions, TyperCommand):
    """A command whose errors name its options."""


@contextmanager
def name_options_in_errors(context: typer.Context) -> Iterator[None]:
    """Have errors of the library name all options of the command, also those that would be a way out."""
    try:
        yield
    except WeftError as error:
        error.args = (naming_options(str(error), context.command.params), *error.args[1:])
        raise


told_in_options = name_options_in_errors
"""The former name."""


def in_options(text: str, context: typer.Context) -> str:
    """Return *text* in the words of the options that were given."""
    given = [param for param in context.command.params if param.name and is_given(context, param.name)]
    return _name_unknown(naming_options(text, given), context)


def naming_options(text: str, params: Iterable[Any]) -> str:
    """Return *text* with ``max_groups = 0`` as ``--max-groups 0`` and ``check = False`` as ``--no-check``."""
    in_file, has_option = re.match(_KEY_OF_A_FILE, text), text.startswith("--")
    start = in_file.end() if in_file else 0
    for_file, text = text[:start], text[start:]
    for param in params:
        option = max(param.opts, key=len)
        if not option.startswith("--"):
            continue
        off = max(param.secondary_opts, key=len, default=f"no {option}")
        typed = option[2:].replace("-", "_")
        names = "|".join(name.replace("_", "[_ ]") for name in (typed, param.name))
        value = rf"(?:{_LABEL}|{_ALONE})(?:{names}){_UNITS} = "
        # True and False before other values: a flag is typed without one
        text = re.sub(rf"{value}True\b", option, text)
        text = re.sub(rf"{value}False\b", off, text)
        text = re.sub(rf"{value}(?=\S)", f"{option} ", text)
        text = re.sub(rf"(^|: )(?:{names}){_UNITS}(?= (?:must|is|has) )", rf"\1{option}", text)
        if "_" in typed and not has_option:  # without an underscore it may be an ordinary word
            text = re.sub(f"{_ALONE}{typed}{_UNITS}{_ENDS}", option, text)
    return for_file + text


def _name_unknown(text: str, context: typer.Context) -> str:
    """Put the option before a message about an unknown name that was given to it."""
    unknown = re.match(r"unknown [^']*'([^']*)'", text)
    for name, option in given_options(context).items():
        value = context.params.get(name)
        parts = ",".join(value if isinstance(value, (list, tuple)) else [str(value)]).split(",")
        if unknown and option.startswith("--") and unknown[1] in [part.strip() for part in parts]:
            return f"{option}: {text}"
    return text


# Options that were given


def is_given(context: typer.Context, name: str) -> bool:
    """Tell whether a user gave the parameter *name*, on the command line or by a variable."""
    source = context.get_parameter_source(name)
    return source is not None and source.name in STATED


def given_options(context: typer.Context) -> dict[str, str]:
    """Return parameter -> long name of its option, of all that were given."""
    return {param.name: max(param.opts, key=len) for param in context.command.params if is_given(context, param.name)}


def refuse_unused(context: typer.Context, way: str, instead: Mapping[str, str]) -> None:
    """Raise InputError for an option that does not apply to a *way* of using the command.

    instead: parameter -> what to do instead.
    """
    for name, option in given_options(context).items():
        if name in instead:
            raise InputError(f"{option} does not apply to {way}: {instead[name]}")


def refuse_parameters_of_others(context: typer.Context, models: Sequence[str]) -> None:
    """Raise InputError for --seq-len and --tables if none of *models* has such a parameter."""
    from weft.models.zoo import ZOO

    known = {parameter for model in models if model in ZOO for parameter in ZOO[model].parameters}
    for name, option in given_options(context).items():
        if name in ("seq_len", "tables") and models and name not in known:
            takers = ", ".join(model for model, entry in ZOO.items() if name in entry.parameters)
            raise InputError(f"{option} does not apply to {', '.join(models)}: it is for {takers} of the zoo")


# Termination


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM, so that a stop by a job manager cleans up as Ctrl-C does.

    Child processes are then stopped and temporary folders removed.
    """

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread, which alone may set signal handlers
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
