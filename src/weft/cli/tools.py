"""``weft tools``: the installed tools, the entries that they register, and why other tools were not loaded."""

from __future__ import annotations

import typer

from weft.base.registry import SECTIONS, Tool, registry
from weft.cli import common
from weft.cli.printing import add_row, console, plain_table, write_result


def command(json_file: common.JsonFile = None) -> None:
    """List the installed tools, with what each adds and which packages it needs."""
    installed = registry()
    table = plain_table("tools", ("tool", "what it does", "commands", "from", "state"), left=5)
    for tool in installed.tools:
        missing = tool.missing()
        state, package = tool.lacks(*missing) if missing else "ready", "weft" if tool.own else tool.package
        add_row(table, tool.name, tool.summary, ", ".join(_names(tool, "commands")), package, state)
    console.print(table)
    for problem in installed.problems:
        typer.echo(f"weft: {problem}", err=True)
    tools = [_as_dict(tool) for tool in installed.tools]
    write_result(json_file, {"tools": tools, "problems": list(installed.problems)})


def _names(tool: Tool, section: str) -> list[str]:
    return [entry.name for entry in tool.entries(section)]


def _as_dict(tool: Tool) -> dict[str, object]:
    sections = {section: names for section in SECTIONS if (names := _names(tool, section))}
    facts = {"name": tool.name, "summary": tool.summary, "package": tool.package, "own": tool.own}
    return {**facts, "extra": tool.extra, "missing": list(tool.missing()), "registers": sections}
