"""What every command of ours does: its errors name the options that were typed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperCommand

from weft.cli.unused import given_options
from weft.errors import WeftError

_UNITS = r"(?:_s|_ms|_j|_bytes|_gb_s)?"
"""What an argument may have behind the name of its option."""
_LABEL = r"^(?:options|--[\w-]+): (?:\w+\.)*"
"""What a value is said to be from, where it is from an option and the message will name that."""
_ALONE = r"(?<![\w.-])"


class InOptions:
    """Says an error of the library, which speaks of arguments, in the words of a command's own options."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)  # type: ignore[misc]
        except WeftError as error:
            error.args = (in_options(str(error), ctx), *error.args[1:])
            raise


class Command(InOptions, TyperCommand):
    """A command whose errors name its options."""


def in_options(text: str, context: typer.Context) -> str:
    """*text* with ``max_groups = 0`` written as ``--max-groups 0``, for every option that was given."""
    for option, argument in _arguments(context):
        spelled = rf"{_ALONE}{argument}{_UNITS}"
        text = re.sub(rf"(?:{_LABEL}|{_ALONE}){argument}{_UNITS} = (?=\S)", f"{option} ", text)
        text = re.sub(rf"(^|: ){spelled}(?= (?:must|is|has) )", rf"\1{option}", text)
        if "_" in argument and not text.startswith("--"):
            text = re.sub(rf"{spelled}(?![\w.-])", option, text)
    return _named_value(text, context)


def _arguments(context: typer.Context) -> Iterator[tuple[str, str]]:
    """Each option that was given, and how the library may call it."""
    for name, option in given_options(context).items():
        if option.startswith("--"):
            for each in dict.fromkeys((option[2:].replace("-", "_"), name)):
                yield option, each
                yield option, each.replace("_", " ")


def _named_value(text: str, context: typer.Context) -> str:
    """A name nobody knows, with the option that it was given to."""
    unknown = re.match(r"unknown [^']*'([^']*)'", text)
    for name, option in given_options(context).items():
        value = context.params.get(name)
        parts = ",".join(value if isinstance(value, (list, tuple)) else [str(value)]).split(",")
        if unknown and option.startswith("--") and unknown[1] in [part.strip() for part in parts]:
            return f"{option}: {text}"
    return text
