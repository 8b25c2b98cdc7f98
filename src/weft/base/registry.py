"""The registry of tools: what weft and the packages beside it bring, as plain data.

A tool is a package with a file ``tool.toml`` that names its commands, public names, policies, backends, devices, kinds
of models, pages and planning options (docs/tools.md). weft itself is the first of them, and its own tools are listed in
its file; other people's packages name theirs by an entry point of the group ``weft.tools``. To list tools, their files
are read and nothing is imported: what a tool registers is imported when it is used.
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
"""The version of ``tool.toml`` and of what it may register; a tool for another version is left out."""

FILE = "tool.toml"
CORE = "weft"
"""The package whose file is read first and lists weft's own tools."""
ENTRY_POINTS = "weft.tools"
VARIABLE = "WEFT_TOOLS"
"""``own``: other people's tools are left out, here and in every process that inherits the variable."""
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
"""What a tool may register -> the keys that an entry may have besides those of ``_ANY_ENTRY``, and their types."""
_ANY_ENTRY: Mapping[str, type] = {"target": str, "needs": list, "extra": str}
_TOGETHER = (("names", "modules"), ("policies", "share_policies"))
"""Sections that share one namespace: a name may be in one of them only."""
ANY_NAME = "[A-Za-z0-9._-]+"
"""What may follow the colon in a device's name where its kind does not say (``names``)."""
_KEYS = {"api", "name", "summary", "extra", "needs", "tools", *SECTIONS}


class Entry(NamedTuple):
    """Something that a tool registers."""

    tool: Tool
    name: str
    target: str
    """``module`` or ``module:attribute``."""
    about: Mapping[str, Any]
    """The other keys of the entry."""

    def load(self) -> Any:
        """Import the target; UnusableTool with the command that installs the missing package.

        All declared packages are checked first, so that a command does not fail after minutes of work.
        """
        if missing := self.missing():
            raise UnusableTool(self._lacks(*missing))
        module, _, attribute = self.target.partition(":")
        try:
            loaded = import_module(module)
        except ModuleNotFoundError as error:
            raise UnusableTool(self._lacks(error.name or module)) from error
        except Exception as error:
            if self.tool.own:
                raise
            raise UnusableTool(f"tool {self.tool.name!r} cannot be imported: {error}; update or remove it") from error
        try:
            return getattr(loaded, attribute) if attribute else loaded
        except AttributeError as error:
            raise UnusableTool(f"tool {self.tool.name!r} registers {self.target}, which it does not have") from error

    def missing(self) -> tuple[str, ...]:
        """Required modules that are not installed."""
        return _absent((*self.tool.needs, *self.about.get("needs", ())))

    def _lacks(self, *modules: str) -> str:
        return self.tool.lacks(*modules, extra=self.about.get("extra", ""))


class Tool(NamedTuple):
    """A package and what it registers."""

    package: str
    name: str
    summary: str
    extra: str
    """Requirement for ``pip install`` that brings the packages it needs, as ``weft[map]``; empty: none."""
    needs: tuple[str, ...]
    """Modules required by all its entries; an entry may require more."""
    own: bool
    """Whether it is weft's own."""
    sections: Mapping[str, Mapping[str, Mapping[str, Any]]]
    """Section -> name -> entry."""

    def missing(self) -> tuple[str, ...]:
        """Required modules of the tool and of its entries that are not installed; nothing is imported."""
        entries = (about for section in self.sections.values() for about in section.values())
        return _absent(dict.fromkeys((*self.needs, *(name for about in entries for name in about.get("needs", ())))))

    def lacks(self, *modules: str, extra: str = "") -> str:
        """The error message for missing modules; *extra*: the requirement to install, if not that of the tool."""
        install = f"pip install '{extra or self.extra}'" if extra or self.extra else "install it"
        are = "is" if len(modules) == 1 else "are"
        return f"{self.name} needs {' and '.join(modules)}, which {are} not installed; {install}"

    def entries(self, section: str) -> Iterator[Entry]:
        for name in self.sections.get(section, {}):
            yield self.entry(section, name)

    def entry(self, section: str, name: str) -> Entry:
        about = self.sections[section][name]
        return Entry(self, name, about["target"], {key: value for key, value in about.items() if key != "target"})


def _absent(modules: Iterable[str]) -> tuple[str, ...]:
    # the package that a module is in: to look for the module itself would import that
    return tuple(name for name in modules if find_spec(name.partition(".")[0]) is None)


class Registry(NamedTuple):
    """All tools, and why others were left out."""

    tools: tuple[Tool, ...]
    problems: tuple[str, ...]
    """A line each."""


@cache
def registry() -> Registry:
    """The tools of this installation: weft, weft's own, then other people's by name."""
    core, own_packages = _core()
    tools, problems = [core], list[str]()
    for package in own_packages:
        if _beside(package).is_file():  # a distribution may leave out some of weft's own tools
            _admit(tools, problems, package, partial(_read, _beside(package), package, own=True))
    if uses_others():
        from importlib.metadata import entry_points  # takes longer than all the files

        for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
            _admit(tools, problems, point.name, partial(_of_entry_point, point))
    return Registry(tuple(tools), tuple(problems))


def uses_others() -> bool:
    """Whether other people's packages may add anything, which ``use_own_tools`` ends."""
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", OWN):
        raise InputError(f"the variable {VARIABLE} = {asked!r} must be {OWN!r}, or not be set")
    return asked != OWN


def use_own_tools() -> None:
    """Leave out other people's tools from now on, in this process and in those it starts."""
    os.environ[VARIABLE] = OWN
    registry.cache_clear()


def registered(section: str) -> dict[str, Entry]:
    """Name -> entry of one section, those of weft first."""
    return {entry.name: entry for tool in registry().tools for entry in tool.entries(section)}


def entry_of(section: str, name: str) -> Entry | None:
    """The entry of a name, None if there is none; for what is asked for often, as a table of all takes 0.1 ms."""
    tools = (tool for tool in registry().tools if name in tool.sections.get(section, {}))
    return next((tool.entry(section, name) for tool in tools), None)


def find(section: str, name: str, what: str) -> Entry:
    """The entry of a name; InputError that lists what there is. *what*: what the entries are called."""
    entries = registered(section)
    if name not in entries:
        raise InputError(unknown_name(what, name, list(entries)))
    return entries[name]


def others() -> tuple[Tool, ...]:
    """Other people's tools."""
    return tuple(tool for tool in registry().tools if not tool.own)


def _core() -> tuple[Tool, Sequence[str]]:
    path = Path(__file__).parents[1] / FILE
    return _read(path, CORE, own=True), tomllib.loads(path.read_text("utf-8"))["tools"]


def _beside(package: str) -> Path:
    """The file of a package that is installed, or lies, where weft does."""
    return Path(__file__).parents[2] / package / FILE


def _of_entry_point(point: EntryPoint) -> Tool:
    spec = find_spec(point.module.partition(".")[0])  # of a package itself, which imports nothing
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"its package {point.module} is not there")
    tool = _read(Path(next(iter(spec.submodule_search_locations))) / FILE, point.module, own=False)
    if tool.name != point.name:
        raise ValueError(f"its {FILE} calls it {tool.name!r}")
    return tool


def _admit(tools: list[Tool], problems: list[str], name: str, read: Callable[[], Tool]) -> None:
    """Add a tool, or a line on why it is left out: a broken tool must not keep the others from working."""
    try:
        tool = read()
        _check_names(tool, tools)
    except FileNotFoundError as error:
        problems.append(f"tool {name!r} is left out: there is no {error.filename}")
    except Exception as error:  # metadata of packages can be broken in ways that nobody foresees
        problems.append(f"tool {name!r} is left out: {reason_of(error)}")
    else:
        tools.append(tool)


def _check_names(tool: Tool, earlier: Sequence[Tool]) -> None:
    """ValueError where a name is taken; the first tool that registers it has it."""
    for other in earlier:
        if other.name == tool.name:
            raise ValueError(f"{other.package} has that name already")
        for section in SECTIONS:
            if taken := sorted(_names(tool, section) & _names(other, *_beside_section(section))):
                raise ValueError(f"{other.name} has {taken[0]!r} among its {section} already")
        if taken := sorted(_suffixes(tool) & _suffixes(other)):
            raise ValueError(f"{other.name} has a kind of models whose files end in {taken[0]!r} already")
    if not tool.own and (taken := sorted(_names(tool, "names", "modules") & _core_packages())):
        raise ValueError(f"weft has a package {taken[0]!r} already")


def _beside_section(section: str) -> tuple[str, ...]:
    return next((together for together in _TOGETHER if section in together), (section,))


def _names(tool: Tool, *sections: str) -> set[str]:
    return {name for section in sections for name in tool.sections.get(section, {})}


def _suffixes(tool: Tool) -> set[str]:
    return {kind["suffix"] for kind in tool.sections.get("model_kinds", {}).values() if "suffix" in kind}


def _core_packages() -> set[str]:
    return {path.stem for path in Path(__file__).parents[1].iterdir()}


def _read(path: Path, package: str, *, own: bool) -> Tool:
    """A tool from its file; ValueError that says what is wrong."""
    told = tomllib.loads(path.read_text("utf-8"))
    if told.get("api") != API:
        raise ValueError(f"it is made for version {told.get('api')} of the registry, and this weft has {API}")
    if strange := sorted(set(told) - _KEYS):
        raise ValueError(f"{strange[0]!r} is not known in {FILE}; there are {', '.join(sorted(_KEYS))}")
    name, needs = told.get("name"), _needs(told)
    if not isinstance(name, str) or not name:
        raise ValueError("it has no name")
    sections = {section: _entries(section, told[section]) for section in SECTIONS if section in told}
    return Tool(package, name, str(told.get("summary", "")), str(told.get("extra", "")), tuple(needs), own, sections)


def _needs(told: Mapping[str, Any]) -> list[str]:
    needs = told.get("needs", [])
    if not isinstance(needs, list) or not all(isinstance(module, str) and module for module in needs):
        raise ValueError("needs must be a list of modules")
    return needs


def _entries(section: str, told: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(told, dict):
        raise ValueError(f"{section} must be a table")
    entries = {name: {"target": about} if isinstance(about, str) else about for name, about in told.items()}
    for name, about in entries.items():
        if not isinstance(about, dict) or not isinstance(about.get("target"), str):
            raise ValueError(f"{section}.{name} must name its target, as module or module:attribute")
        _check_keys(f"{section}.{name}", about, {**_ANY_ENTRY, **SECTIONS[section]})
        if section == "devices":
            _check_device(name, about)
    return entries


def _check_keys(where: str, about: Mapping[str, Any], known: Mapping[str, type]) -> None:
    """ValueError for a key that is not known, or has a value of another type; lists hold text."""
    _needs(about)
    for key, value in about.items():
        if key not in known:
            raise ValueError(f"{where} has {key!r}, which is not known there")
        texts = value if isinstance(value, list) else [""]
        if not isinstance(value, known[key]) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{where}: {key} = {value!r} must be of the kind {known[key].__name__}")


def _check_device(name: str, about: Mapping[str, Any]) -> None:
    """ValueError where a kind of device is ambiguous or has no valid example; device names are ``KIND:WHICH``."""
    if not re.fullmatch("[a-z][a-z0-9_-]*", name) or name in ("host", "cpu"):
        raise ValueError(
            f"devices.{name} cannot be the beginning of a device's name; use small letters, not host or cpu"
        )
    kind, _, which = about.get("example", "").partition(":")
    try:
        matches = kind == name and re.fullmatch(about.get("names", ANY_NAME), which)
    except re.error as error:
        raise ValueError(f"devices.{name}: names must be a regular expression: {error}") from error
    if not matches:
        raise ValueError(f"devices.{name} needs an example of a device's name, as {name}:0, that its names match")
