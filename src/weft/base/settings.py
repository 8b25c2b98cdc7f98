"""Settings that are declared once: a class field is a key of a file, a command-line option and a row in the docs.

A settings class is a dataclass or a pydantic model. The string below a field describes it; the first paragraph is the
help text of its option, and the documentation shows all of it. A ``CommandOption`` in the field's type gives it an
option:

    threads: Annotated[int, machine()] = 1
    \"\"\"Threads that compute one segment.\"\"\"

``weft.cli.settings`` makes the options of a command from it. This module does not import typer.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True)
class CommandOption:
    """The command-line option of a setting; members left out follow from the field's name, type and default."""

    names: tuple[str, ...]
    """Long names replace the one derived from the field, as ``--pin/--no-pin``; short ones are added to it."""
    panel: str
    """The panel of the help that lists it."""
    shown: str | None = None
    """The default in words, where the value does not explain itself."""
    metavar: str | None = None
    """The placeholder of the value in the help."""
    completion: str | None = None
    """The shell completion of the value (a key of ``weft.cli.settings.COMPLETIONS``)."""
    text: bool = False
    """Whether the user types the value as one text, which the command converts to the type of the field."""


class OptionPanel:
    """A panel of a command's help. Calling it declares an option of the panel, as in ``how("-p", shown="cores")``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(
        self,
        *names: str,
        shown: str | None = None,
        metavar: str | None = None,
        completion: str | None = None,
        text: bool = False,
    ) -> CommandOption:
        return CommandOption(names, self._name, shown, metavar, completion, text)


what, how, out = map(OptionPanel, ("What", "How", "Output"))
"""Panels for the subject of a command, for the way it works, and for the files it writes."""


@dataclass(frozen=True, slots=True)
class DeclaredSetting:
    """A field of a settings class."""

    name: str
    hint: Any
    """The type of the field, with its limits."""
    default: Any
    """The default; None if there is none or if it is computed."""
    required: bool
    description: str
    """The string below the field."""
    option: CommandOption | None

    @property
    def summary(self) -> str:
        """Return the first paragraph of the description on one line, without backticks."""
        return " ".join(self.description.partition("\n\n")[0].replace("``", "").split())


def settings_of(kind: type[Any]) -> tuple[DeclaredSetting, ...]:
    """Return the settings that a class declares, in the order of its fields."""
    described, hints = dict(_descriptions(kind)), get_type_hints(kind, include_extras=True)
    return tuple(
        DeclaredSetting(name, hints[name], default, required, described.get(name, ""), _option_in(hints[name]))
        for name, default, required in _defaults(kind)
    )


def types_in(hint: Any) -> set[Any]:
    """Return the types that a value may have, without limits and unions; a ``Literal`` counts as ``str``."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return types_in(arguments[0])
    if origin in (Union, UnionType):
        return set().union(*map(types_in, arguments))
    return {str} if origin is Literal else {origin or hint}


def _option_in(hint: Any) -> CommandOption | None:
    """Return the command-line option in a field's type; None if it has none."""
    metadata = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((item for item in metadata if isinstance(item, CommandOption)), None)


def _defaults(kind: type[Any]) -> Iterator[tuple[str, Any, bool]]:
    """Yield the name of every field, its default (None if absent or computed), and whether it is required."""
    if not is_dataclass(kind):
        for name, field in kind.model_fields.items():
            required = field.is_required()
            yield name, None if required else field.default, required
        return
    for field in fields(kind):
        computed = field.default_factory is not MISSING
        yield field.name, None if field.default is MISSING else field.default, field.default is MISSING and not computed


def _descriptions(kind: type[Any]) -> Iterator[tuple[str, str]]:
    """Yield every field with the string below it, read from the source, as Python does not keep such strings."""
    body = _classes(kind.__module__)[kind.__name__]
    for field, below in pairwise(body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, inspect.cleandoc(text)


@cache
def _classes(module: str) -> dict[str, list[ast.stmt]]:
    """Return class name -> statements, for the classes of a module."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}
