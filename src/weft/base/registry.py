"""The registry of tools: commands, public names, policies, backends and more, registered as plain data.

A tool is a package with a file ``tool.toml`` that names its commands, public names, policies, backends, devices, model
kinds, pages and planning options (docs/tools.md). weft itself is the first tool, and its file lists weft's own tools;
third-party packages register by an entry point of the group ``weft.tools``. Listing tools reads their files and imports
no module of theirs: a registered target is imported when it is used.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.base.errors import InputError, UnusableTool, reason_of, unknown_name

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

API = 1
"""The version of the format of ``tool.toml``; a tool for another version is left out."""

FILE = "tool.toml"
CORE = "weft"
"""The package whose file is read first and lists weft's own tools."""
ENTRY_POINTS = "weft.tools"
VARIABLE = "WEFT_TOOLS"
"""Environment variable; ``own`` leaves out third-party tools, here and in every process that inherits it."""
OWN = "own"

SECTIONS: Mapping[str, Mapping[str, type]] = {
    "commands": {"group": str, "help": str},
    "names": {},
    "modules": {},
    "policies": {},
    "share_policies": {},
    "backends": {},
    "devices": {"example": str, "names": str},
    "model_kinds": {"devices": list, "suffix": str, "metadata": str, "packages": list, "takes_over": bool},
    "pages": {},
    "plan_options": {},
}
"""Section of ``tool.toml`` -> the keys that its entries may have besides those of ``_ANY_ENTRY``, and their types."""
_ANY_ENTRY: Mapping[str, type] = {"target": str, "needs": list, "extra": str}
_SHARED_NAMESPACES = (("names", "modules"), ("policies", "share_policies"))
"""Sections that share one namespace: a name may be in one of them only."""
ANY_NAME = "[A-Za-z0-9._-]+"
"""The part of a device's name after the colon, if the kind has no pattern of its own (``names``)."""
_KEYS = {"api", "name", "summary", "extra", "needs", "tools", *SECTIONS}


class Entry(NamedTuple):
    """An entry that a tool registers."""

    tool: Tool
    name: str
    target: str
    """``module`` or ``module:attribute``."""
    details: Mapping[str, Any]
    """The other keys of the entry: ``needs``, ``extra``, and those of its section in ``SECTIONS``."""

    def load(self) -> Any:
        """Import the target; UnusableTool that names the command to install a missing package.

        All required packages are checked first, so that a command does not fail after minutes of work.
        """
        if missing := self.missing():
            raise UnusableTool(self._missing_message(*missing))
        module, _, attribute = self.target.partition(":")
        try:
            loaded = import_module(module)
        except ModuleNotFoundError as error:
            raise UnusableTool(self._missing_message(error.name or module)) from error
        except Exception as error:
            if self.tool.own:
                raise
            raise UnusableTool(f"tool {self.tool.name!r} cannot be imported: {error}; update or remove it") from error
        try:
            return getattr(loaded, attribute) if attribute else loaded
        except AttributeError as error:
            raise UnusableTool(f"tool {self.tool.name!r} registers {self.target}, which it does not have") from error

    def missing(self) -> tuple[str, ...]:
        """Return the required modules that are not installed."""
        return _missing_modules((*self.tool.needs, *self.details.get("needs", ())))

    def _missing_message(self, *modules: str) -> str:
        return self.tool.lacks(*modules, extra=self.details.get("extra", ""))


class Tool(NamedTuple):
    """A package and its entries in the registry."""

    package: str
    name: str
    summary: str
    extra: str
    """Requirement for ``pip install`` that brings the packages it needs, as ``weft[map]``; empty: none."""
    needs: tuple[str, ...]
    """Modules required by all its entries; an entry may require more."""
    own: bool
    """Whether the tool is part of weft."""
    sections: Mapping[str, Mapping[str, Mapping[str, Any]]]
    """Section -> name -> entry."""

    def missing(self) -> tuple[str, ...]:
        """Return the modules required by the tool or its entries that are not installed; nothing is imported."""
        entries = (details for section in self.sections.values() for details in section.values())
        return _missing_modules(
            dict.fromkeys((*self.needs, *(name for details in entries for name in details.get("needs", ()))))
        )

    def lacks(self, *modules: str, extra: str = "") -> str:
        """Return the error message for missing modules; *extra*: the requirement to install, if not the tool's own."""
        install = f"pip install '{extra or self.extra}'" if extra or self.extra else "install it"
        are = "is" if len(modules) == 1 else "are"
        return f"{self.name} needs {' and '.join(modules)}, which {are} not installed; {install}"

    def entries(self, section: str) -> Iterator[Entry]:
        """Yield the entries of a section; none if the tool has no such section."""
        for name in self.sections.get(section, {}):
            yield self.entry(section, name)

    def entry(self, section: str, name: str) -> Entry:
        """Return the entry *name* of a section."""
        details = self.sections[section][name]
        return Entry(self, name, details["target"], {key: value for key, value in details.items() if key != "target"})


def _missing_modules(modules: Iterable[str]) -> tuple[str, ...]:
    # only top-level packages are looked up: finding a submodule would import its parents
    return tuple(name for name in modules if find_spec(name.partition(".")[0]) is None)


class Registry(NamedTuple):
    """All usable tools, and the reasons for which others were left out."""

    tools: tuple[Tool, ...]
    problems: tuple[str, ...]
    """One line for every tool that was left out."""


@cache
def registry() -> Registry:
    """Return the tools of this installation: weft, weft's own tools, then third-party tools by name."""
    package_folder = Path(__file__).parents[1]
    core = _read(package_folder / FILE, CORE, own=True)
    tools, problems = [core], list[str]()
    for package in tomllib.loads((package_folder / FILE).read_text("utf-8"))["tools"]:
        path = package_folder.parent / package / FILE
        if path.is_file():  # a distribution may leave out some of weft's own tools
            _admit(tools, problems, package, partial(_read, path, package, own=True))
    if uses_others():
        from importlib.metadata import entry_points  # takes longer than all the files

        for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
            _admit(tools, problems, point.name, partial(_read_entry_point, point))
    return Registry(tuple(tools), tuple(problems))


def uses_others() -> bool:
    """Return whether third-party tools are loaded; ``use_own_tools`` turns that off."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", OWN):
        raise InputError(f"the variable {VARIABLE} = {value!r} must be {OWN!r}, or not be set")
    return value != OWN


def use_own_tools() -> None:
    """Leave out third-party tools from now on, in this process and in its child processes."""
    os.environ[VARIABLE] = OWN
    registry.cache_clear()


def registered(section: str) -> dict[str, Entry]:
    """Return name -> entry of a section, weft's own entries first."""
    return {entry.name: entry for tool in registry().tools for entry in tool.entries(section)}


def entry_of(section: str, name: str) -> Entry | None:
    """Return the entry of a name, or None. For frequent lookups: ``registered`` builds its table in 0.1 ms."""
    tools = (tool for tool in registry().tools if name in tool.sections.get(section, {}))
    return next((tool.entry(section, name) for tool in tools), None)


def find(section: str, name: str, what: str) -> Entry:
    """Return the entry of a name; InputError that lists the known names. *what*: the noun for an entry."""
    entries = registered(section)
    if name not in entries:
        raise InputError(unknown_name(what, name, list(entries)))
    return entries[name]


def others() -> tuple[Tool, ...]:
    """Return the third-party tools."""
    return tuple(tool for tool in registry().tools if not tool.own)


def _read_entry_point(point: EntryPoint) -> Tool:
    """Read the file of a third-party tool, without importing its package; ValueError that names the problem."""
    spec = find_spec(point.module.partition(".")[0])  # finding a top-level package imports nothing
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"its package {point.module} is not there")
    tool = _read(Path(next(iter(spec.submodule_search_locations))) / FILE, point.module, own=False)
    if tool.name != point.name:
        raise ValueError(f"its {FILE} calls it {tool.name!r}")
    return tool


def _admit(tools: list[Tool], problems: list[str], name: str, read: Callable[[], Tool]) -> None:
    """Read a tool and add it to *tools*, or add the reason for leaving it out to *problems*.

    A broken tool must not break the others.
    """
    try:
        tool = read()
        _check_names(tool, tools)
    except FileNotFoundError as error:
        problems.append(f"tool {name!r} is left out: there is no {error.filename}")
    except Exception as error:  # metadata of packages can be broken in any way
        problems.append(f"tool {name!r} is left out: {reason_of(error)}")
    else:
        tools.append(tool)


def _check_names(tool: Tool, earlier: Sequence[Tool]) -> None:
    """Raise ValueError if an *earlier* tool, or the core, has a name of this tool: the first to register keeps it."""
    for other in earlier:
        if other.name == tool.name:
            raise ValueError(f"{other.package} has that name already")
        for section in SECTIONS:
            namespace = next((sections for sections in _SHARED_NAMESPACES if section in sections), (section,))
            if taken := sorted(_names(tool, section) & _names(other, *namespace)):
                raise ValueError(f"{other.name} has {taken[0]!r} among its {section} already")
        if taken := sorted(_suffixes(tool) & _suffixes(other)):
            raise ValueError(f"{other.name} has a kind of models whose files end in {taken[0]!r} already")
    core_packages = {path.stem for path in Path(__file__).parents[1].iterdir()}
    if not tool.own and (taken := sorted(_names(tool, "names", "modules") & core_packages)):
        raise ValueError(f"weft has a package {taken[0]!r} already")


def _names(tool: Tool, *sections: str) -> set[str]:
    return {name for section in sections for name in tool.sections.get(section, {})}


def _suffixes(tool: Tool) -> set[str]:
    return {kind["suffix"] for kind in tool.sections.get("model_kinds", {}).values() if "suffix" in kind}


def _read(path: Path, package: str, *, own: bool) -> Tool:
    """Read the file of a tool; ValueError that names the problem."""
    content = tomllib.loads(path.read_text("utf-8"))
    if content.get("api") != API:
        raise ValueError(f"it is made for version {content.get('api')} of the registry, and this weft has {API}")
    if unknown := sorted(set(content) - _KEYS):
        raise ValueError(f"{unknown[0]!r} is not known in {FILE}; there are {', '.join(sorted(_KEYS))}")
    name, needs = content.get("name"), _needs(content)
    if not isinstance(name, str) or not name:
        raise ValueError("it has no name")
    summary, extra = (str(content.get(key, "")) for key in ("summary", "extra"))
    sections = {section: _entries(section, content[section]) for section in SECTIONS if section in content}
    return Tool(package, name, summary, extra, tuple(needs), own, sections)


def _needs(table: Mapping[str, Any]) -> list[str]:
    """Return the modules that a tool or an entry requires; ValueError if they are no list of names."""
    needs = table.get("needs", [])
    if not isinstance(needs, list) or not all(isinstance(module, str) and module for module in needs):
        raise ValueError("needs must be a list of modules")
    return needs


def _entries(section: str, table: Any) -> dict[str, dict[str, Any]]:
    """Return name -> entry of a section of ``tool.toml``; a bare target becomes an entry. ValueError if invalid."""
    if not isinstance(table, dict):
        raise ValueError(f"{section} must be a table")
    entries = {name: {"target": details} if isinstance(details, str) else details for name, details in table.items()}
    for name, details in entries.items():
        if not isinstance(details, dict) or not isinstance(details.get("target"), str):
            raise ValueError(f"{section}.{name} must name its target, as module or module:attribute")
        _check_keys(f"{section}.{name}", details, {**_ANY_ENTRY, **SECTIONS[section]})
        if section == "devices":
            _check_device(name, details)
    return entries


def _check_keys(where: str, details: Mapping[str, Any], known: Mapping[str, type]) -> None:
    """Raise ValueError for an unknown key, or for a value of another type; lists hold text."""
    _needs(details)
    for key, value in details.items():
        if key not in known:
            raise ValueError(f"{where} has {key!r}, which is not known there")
        texts = value if isinstance(value, list) else [""]
        if not isinstance(value, known[key]) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{where}: {key} = {value!r} must be of the kind {known[key].__name__}")


def _check_device(name: str, details: Mapping[str, Any]) -> None:
    """Raise ValueError if a kind of device is ambiguous or has no valid example; device names are ``KIND:WHICH``."""
    if not re.fullmatch("[a-z][a-z0-9_-]*", name) or name in ("host", "cpu"):
        raise ValueError(
            f"devices.{name} cannot be the beginning of a device's name; use small letters, not host or cpu"
        )
    kind, _, which = details.get("example", "").partition(":")
    try:
        matches = kind == name and re.fullmatch(details.get("names", ANY_NAME), which)
    except re.error as error:
        raise ValueError(f"devices.{name}: names must be a regular expression: {error}") from error
    if not matches:
        raise ValueError(f"devices.{name} needs an example of a device's name, as {name}:0, that its names match")
