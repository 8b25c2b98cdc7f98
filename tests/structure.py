"""The structure of the source: rooms, floors, circles and hidden imports, measured from the code.

- A *room* is a folder of the core package ``weft``, a tool (``weft_map`` ...), or ``weft/__init__.py`` with the public
  names.
- A room's *floor* is 1 where it imports no other room, otherwise one above the highest that it imports.
- A *circle* is a set of modules that import each other, directly or through others.
- A *hidden import* is a module of ours that code names in a string instead of an ``import`` statement. No hidden
  imports are: what ``tool.toml`` registers, documentation, names of loggers, the packages that a file is in (they name
  data files), and the table of old names in ``weft/base/moved.py``.

Every import counts, inside functions and under ``TYPE_CHECKING`` too.

    python -m tests.structure
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Set
from functools import cache, lru_cache
from pathlib import Path

from tests import ROOT
from weft.base.moved import new_name

SOURCES = ROOT / "src"
CORE = "weft"
TOOLS = ("weft_cluster", "weft_map", "weft_papers", "weft_stitch", "weft_tune")
MODULES = sorted(path for package in (CORE, *TOOLS) for path in (SOURCES / package).rglob("*.py"))

OLD_NAMES = "weft/base/moved.py"

Graph = Mapping[str, Set[str]]
"""Name -> the names that it imports."""


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@lru_cache(maxsize=2)
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All nodes of a file, which several searches walk over one after another."""
    return tuple(ast.walk(tree))


def name_of(path: Path) -> str:
    """The path below ``src``."""
    return path.relative_to(SOURCES).as_posix()


def dotted(path: Path) -> str:
    """The name by which a module is imported."""
    return ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")


DOTTED = frozenset(map(dotted, MODULES))
INNER = DOTTED - {CORE, *TOOLS}


def room_of(module: str) -> str:
    """``weft.engine.policies.edf`` -> ``engine``; ``weft_map.search`` -> ``weft_map``; ``weft`` itself -> ``weft``."""
    package, _, inside = module.partition(".")
    return inside.partition(".")[0] if package == CORE and inside else package


def imported_test_files(tree: ast.Module) -> set[str]:
    """Test files that a file of ``tests`` imports, wherever in it; names of test functions are none."""
    names: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    files = {name: ROOT / f"{name.replace('.', '/')}.py" for name in names}
    return {name for name, file in files.items() if file.name.startswith("test_") and file.is_file()}


@cache
def imported(path: Path) -> frozenset[str]:
    """Every module that a file imports; ``from a import b`` counts as ``a.b`` where that is a module."""
    return frozenset(modules_imported(parsed(path)))


def modules_imported(tree: ast.Module) -> set[str]:
    modules: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            modules.update(_present(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"line {node.lineno} imports relatively"
            module = _present(node.module)
            names = {f"{module}.{alias.name}" for alias in node.names}
            modules.update(names if names <= DOTTED else {module, *names & DOTTED})
    return modules


@cache
def hidden(path: Path) -> frozenset[str]:
    """The modules of ours that a file names in strings."""
    if name_of(path) == OLD_NAMES:
        return frozenset()
    return frozenset(module for module in modules_named(parsed(path)) if not dotted(path).startswith(f"{module}."))


def modules_named(tree: ast.Module) -> set[str]:
    """Modules in strings that are code; of a string that is put together the beginning, as ``weft.cli.{name}``."""
    words = {id(text) for text in (*documentation(tree), *_loggers(tree))}
    named: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in words:
            module = _present(node.value.partition(":")[0])
            if module in INNER:
                named.add(module)
            elif (part := re.match(rf"({CORE}(_\w+)?(\.\w+)*)\.$", node.value)) and part[1] in DOTTED:
                named.add(part[1])
        elif isinstance(node, ast.Call) and _called(node) == "import_module":
            named.update(argument.value for argument in node.args[:1] if _is_tool(argument))
    return named


def _present(module: str) -> str:
    """A module by the name that it has now: aliases are for users."""
    moved = new_name(module)
    return moved[0] if moved else module


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _is_tool(argument: ast.expr) -> bool:
    return isinstance(argument, ast.Constant) and argument.value in TOOLS


def documentation(tree: ast.Module) -> Iterator[ast.Constant]:
    """Strings that stand alone: docstrings of modules, classes, functions and attributes."""
    for node in nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def _loggers(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in nodes(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "getLogger":
            yield from (argument for argument in node.args if isinstance(argument, ast.Constant))


def module_graph() -> dict[str, set[str]]:
    return {dotted(path): (set(imported(path) | hidden(path)) & DOTTED) - {dotted(path)} for path in MODULES}


def room_graph(modules: Graph) -> dict[str, set[str]]:
    rooms: dict[str, set[str]] = {}
    for module, targets in modules.items():
        rooms.setdefault(room_of(module), set()).update(map(room_of, targets))
    return {room: targets - {room} for room, targets in rooms.items()}


def circles(graph: Graph) -> list[list[str]]:
    """Sets of names that import each other (strongly connected components, by Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(graph[name]):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            component = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(component) > 1:
                components.append(sorted(component))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return components


def floors(rooms: Graph) -> dict[str, int]:
    """Room -> floor, where rooms are in no circle."""

    @cache
    def floor(room: str) -> int:
        return 1 + max(map(floor, rooms[room]), default=0)

    return {room: floor(room) for room in rooms}


def main() -> None:
    modules = module_graph()
    rooms = room_graph(modules)
    found = circles(modules) + circles(rooms)
    named = {name_of(path): sorted(names) for path in MODULES if (names := hidden(path))}
    if not circles(rooms):
        heights = floors(rooms)
        for room in sorted(rooms, key=lambda room: (heights[room], room)):
            print(f"{heights[room]:3} {room:14} imports {', '.join(sorted(rooms[room])) or 'nothing'}")
        print(f"floors: {max(heights.values())}")
    print(f"rooms: {len(rooms)}")
    print(f"arrows between rooms: {sum(map(len, rooms.values()))}")
    print(f"circles: {len(found)}", *found, sep="\n  ")
    print(f"hidden imports: {sum(map(len, named.values()))}", *named.items(), sep="\n  ")
    lines = sum(path.read_text("utf-8").count("\n") for path in MODULES)
    print(f"modules: {len(MODULES)}, lines: {lines}")


if __name__ == "__main__":
    main()
