"""Commands: errors that name options, refusal of options that do not apply, and termination.

A command with several forms declares in a table the options that each form does not take, with advice on what to do
instead. An option that was not typed or set by a variable is never refused.
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

GIVEN_SOURCES = ("COMMANDLINE", "ENVIRONMENT")
"""Sources (as click names them) of parameters that the user gave."""

PRICED = "a profile has its costs in it; make another with weft profile"
PROFILES_ONLY = {"batch": PRICED, "seq_len": PRICED, "tables": PRICED, "cost": PRICED, "shape": PRICED}
"""Option that only applies to models -> advice, for commands that are given only profiles."""

_UNITS = r"(?:_s|_ms|_j|_bytes|_gb_s)?"
"""Unit at the end of an argument's name that its option does not have."""
_LABEL = r"^(?:options|--[\w-]+): (?:\w+\.)*"
"""Prefix of a message that names the source of a value; the option replaces it."""
_PART = r"[\w./\\'\"`-]"
"""Characters next to a part of a path, of a key or of a quotation, and never next to a word."""
_STANDS_ALONE, _ENDS_ALONE = f"(?<!{_PART})", f"(?!{_PART})"
"""Conditions before and behind a name: it is not a part of a path, of a key or of a quotation."""
_KEY_OF_A_FILE = r"\S+\.(?:toml|json|npz|onnx): (?:[\w.]+ ){1,2}(?=(?:=|must|is|has) )"
"""Beginning of a message about a key of a file, which no option has set."""


class InOptions:
    """Mixin of commands: in errors of the library, names of arguments are replaced by the options that were given."""

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
    """In errors raised in the block, replace names of arguments by options, also by options that were not given."""
    try:
        yield
    except WeftError as error:
        error.args = (naming_options(str(error), context.command.params), *error.args[1:])
        raise


told_in_options = name_options_in_errors
"""The former name."""


def in_options(text: str, context: typer.Context) -> str:
    """Return an error text with the names of arguments replaced by the options that were given."""
    given = [param for param in context.command.params if param.name and is_given(context, param.name)]
    return _name_unknown(naming_options(text, given), context)


def naming_options(text: str, params: Iterable[Any]) -> str:
    """Return *text* with ``max_groups = 0`` as ``--max-groups 0`` and ``check = False`` as ``--no-check``."""
    in_file, has_option = re.match(_KEY_OF_A_FILE, text), text.startswith("--")
    start = in_file.end() if in_file else 0
    prefix, text = text[:start], text[start:]
    for param in params:
        option = max(param.opts, key=len)
        if not option.startswith("--"):
            continue
        negated = max(param.secondary_opts, key=len, default=f"no {option}")
        typed = option[2:].replace("-", "_")
        names = "|".join(name.replace("_", "[_ ]") for name in (typed, param.name))
        value = rf"(?:{_LABEL}|{_STANDS_ALONE})(?:{names}){_UNITS} = "
        # True and False before other values, since a flag is typed without a value
        text = re.sub(rf"{value}True\b", option, text)
        text = re.sub(rf"{value}False\b", negated, text)
        text = re.sub(rf"{value}(?=\S)", f"{option} ", text)
        text = re.sub(rf"(^|: )(?:{names}){_UNITS}(?= (?:must|is|has) )", rf"\1{option}", text)
        if "_" in typed and not has_option:  # without an underscore it may be an ordinary word
            text = re.sub(f"{_STANDS_ALONE}{typed}{_UNITS}{_ENDS_ALONE}", option, text)
    return prefix + text


def _name_unknown(text: str, context: typer.Context) -> str:
    """Put the option before a message about an unknown name, if the name is the value of an option."""
    unknown = re.match(r"unknown [^']*'([^']*)'", text)
    for name, option in given_options(context).items():
        value = context.params.get(name)
        parts = ",".join(value if isinstance(value, (list, tuple)) else [str(value)]).split(",")
        if unknown and option.startswith("--") and unknown[1] in [part.strip() for part in parts]:
            return f"{option}: {text}"
    return text


# Options that were given


def is_given(context: typer.Context, name: str) -> bool:
    """Return whether the user gave the parameter *name*, on the command line or by an environment variable."""
    source = context.get_parameter_source(name)
    return source is not None and source.name in GIVEN_SOURCES


def given_options(context: typer.Context) -> dict[str, str]:
    """Return name of a parameter -> long name of its option, for all parameters that were given."""
    return {param.name: max(param.opts, key=len) for param in context.command.params if is_given(context, param.name)}


def refuse_unused(context: typer.Context, way: str, instead: Mapping[str, str]) -> None:
    """Raise InputError if an option was given that does not apply to this form of the command.

    way: the form, as it is named in the message. instead: parameter that does not apply -> what to do instead.
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
    """In the block, raise KeyboardInterrupt on SIGTERM, so that a job manager's stop cleans up as Ctrl-C does.

    The cleanup stops child processes and removes temporary folders.
    """

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    try:
        old_handler = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # this is not the main thread, and only the main thread may set signal handlers
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old_handler)
