"""What every command of ours does: its errors name the options that were typed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import typer
from typer.core import TyperCommand

from weft.base.errors import WeftError
from weft.cli.unused import given_options, is_given

_UNITS = r"(?:_s|_ms|_j|_bytes|_gb_s)?"
"""What an argument may have behind the name of its option."""
_LABEL = r"^(?:options|--[\w-]+): (?:\w+\.)*"
"""What a value is said to be from, where it is from an option and the message will name that."""
_BESIDE = r"[\w./\\'\"`-]"
"""What stands beside a part of a path, of a key or of something quoted, and beside no word."""
_ALONE, _ENDS = f"(?<!{_BESIDE})", f"(?!{_BESIDE})"
_KEY_OF_A_FILE = r"\S+\.(?:toml|json|npz|onnx): (?:[\w.]+ ){1,2}(?=(?:=|must|is|has) )"
"""What an error of a file begins with: it is the file that says so, whatever was typed."""


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
    """*text* in the words of the options that were given."""
    given = [each for each in context.command.params if each.name and is_given(context, each.name)]
    return _named_value(naming_options(text, given), context)


def naming_options(text: str, params: Iterable[Any]) -> str:
    """*text* with ``max_groups = 0`` written as ``--max-groups 0`` and ``check = False`` as ``--no-check``."""
    in_file, told = re.match(_KEY_OF_A_FILE, text), text.startswith("--")
    start = in_file.end() if in_file else 0
    for_file, text = text[:start], text[start:]
    for param in params:
        option = max(param.opts, key=len)
        if not option.startswith("--"):
            continue
        off = max(param.secondary_opts, key=len, default=f"no {option}")
        typed = option[2:].replace("-", "_")
        names = "|".join(each.replace("_", "[_ ]") for each in (typed, param.name))
        value = rf"(?:{_LABEL}|{_ALONE})(?:{names}){_UNITS} = "
        text = re.sub(rf"{value}True\b", option, text)
        text = re.sub(rf"{value}False\b", off, text)
        text = re.sub(rf"{value}(?=\S)", f"{option} ", text)
        text = re.sub(rf"(^|: )(?:{names}){_UNITS}(?= (?:must|is|has) )", rf"\1{option}", text)
        if "_" in typed and not told:
            text = re.sub(f"{_ALONE}{typed}{_UNITS}{_ENDS}", option, text)
    return for_file + text


def _named_value(text: str, context: typer.Context) -> str:
    """A name nobody knows, with the option that it was given to."""
    unknown = re.match(r"unknown [^']*'([^']*)'", text)
    for name, option in given_options(context).items():
        value = context.params.get(name)
        parts = ",".join(value if isinstance(value, (list, tuple)) else [str(value)]).split(",")
        if unknown and option.startswith("--") and unknown[1] in [part.strip() for part in parts]:
            return f"{option}: {text}"
    return text
