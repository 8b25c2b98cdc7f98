"""Tables of settings in the documentation, made from the classes that declare them.

A page marks the place of a table and the classes in it:

    <!-- settings: weft.serving.config LoadingSettings ExecutionSettings -->
    <!-- end of settings -->

    python -m tests.settings_tables     writes the tables that differ into their pages

``settings`` has a row for each setting, ``variables`` one for each class with the variables of its settings.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tests import ROOT
from weft.base.files import write_text
from weft.base.settings import DeclaredSetting, settings_of
from weft.cli import common
from weft.cli.settings import option_names
from weft.serving.environment import variable

TABLE = re.compile(r"^<!-- (settings|variables): (\S+) ([\w ]+) -->\n(.*?)^<!-- end of settings -->$", re.M | re.S)


def with_tables(text: str) -> str:
    """The text of a page with its tables as the classes have them now."""
    return TABLE.sub(_marked, text)


def _marked(place: re.Match[str]) -> str:
    content, module, names, _ = place.groups()
    kinds = [getattr(import_module(module), name) for name in names.split()]
    rows = _settings(kinds) if content == "settings" else _variables(kinds)
    lines = "".join(f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in rows)
    return f"<!-- {content}: {module} {names} -->\n\n{lines}\n<!-- end of settings -->"


def _settings(kinds: Sequence[type[Any]]) -> list[tuple[str, ...]]:
    settings = [setting for kind in kinds for setting in settings_of(kind) if setting.description]
    rows = [("name", "option", "meaning", "default"), ("---",) * 4]
    for setting in settings:
        names = option_names(setting) if setting.option else ()
        meaning = " ".join(setting.description.replace("``", "`").split())
        rows.append((f"`{setting.name}`", ", ".join(f"`{name}`" for name in names), meaning, _default(setting)))
    if any(setting.option for setting in settings):
        return rows
    return [(name, meaning, default) for name, _, meaning, default in rows]


def _variables(kinds: Sequence[type[Any]]) -> list[tuple[str, ...]]:
    rows = [("what", "variables"), ("---",) * 2]
    for kind in kinds:
        variables = ", ".join(f"`{variable(setting.name)}`" for setting in settings_of(kind))
        rows.append(((kind.__doc__ or "").splitlines()[0], variables))
    return rows


def _default(setting: DeclaredSetting) -> str:
    if setting.required:
        return "required"
    value, shown = setting.default, setting.option.shown if setting.option else None
    if shown is not None or value is None or value == ():
        return shown or "none"
    if isinstance(value, bool):
        return str(value).lower()
    if setting.name.endswith("_bytes"):
        return f"{value} ({common.written_bytes(value)})"
    return f"`{value}`" if isinstance(value, str) else f"{value:g}"


def main() -> None:
    for page in sorted(Path(ROOT, "docs").glob("*.md")):
        text = page.read_text("utf-8")
        if (fresh := with_tables(text)) != text:
            write_text(page, fresh)
            sys.stdout.write(f"{page.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
