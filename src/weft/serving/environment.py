"""The server's settings as variables of the environment: WEFT_ and the name of a setting in capitals.

They go before those of a file and after those of the command line, and are checked as the file's are. WEFT_API_KEY
alone counts only where nothing else names a key: ``weft bench`` sends it, so a client's key may stand in the same
environment. ``WEFT_API_KEY_FILE`` is the server's own.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any

from weft.base.errors import InputError
from weft.base.settings import types_in
from weft.serving.config import API_KEY_VARIABLE, GROUP_OF, check_setting, one_line, read_api_key, setting_types

PREFIX = "WEFT_"
API_KEY_FILE_VARIABLE = f"{API_KEY_VARIABLE}_FILE"
NEAR = 0.7
"""How alike names are that are told: enough for WEFT_MAX_BODY, not for what an orchestrator sets by itself."""

TEXTS = {str, Path, NoneType}
"""A setting that can be nothing else is taken letter by letter."""


def variable(setting: str) -> str:
    """The variable of a setting."""
    return f"{PREFIX}{setting.upper()}"


VARIABLES = {variable(key): key for key in GROUP_OF}
"""Variable -> setting, for all there are."""


def settings_in(environment: Mapping[str, str]) -> dict[str, Any]:
    """What the environment sets, by setting; an empty variable sets nothing."""
    types = setting_types()
    found: dict[str, Any] = {}
    for name, setting in VARIABLES.items():
        if environment.get(name) and name != API_KEY_VARIABLE:
            found[setting] = _checked(name, setting, _value(name, environment[name], types_in(types[setting])))
    if file := environment.get(API_KEY_FILE_VARIABLE):
        found["api_key"] = read_api_key(Path(file), {})
    return found


def near_misses(environment: Mapping[str, str]) -> tuple[str, ...]:
    """A sentence for each variable that looks like one of ours and is none."""
    known = [each.removeprefix(PREFIX) for each in (*VARIABLES, API_KEY_FILE_VARIABLE)]
    told = []
    for name in sorted(environment):
        rest = name.removeprefix(PREFIX)
        near = get_close_matches(rest, known, n=1, cutoff=NEAR) if rest != name and rest not in known else []
        told += [one_line(f"the variable {name} sets nothing; did you mean {PREFIX}{each}?") for each in near]
    return tuple(told)


def _checked(name: str, setting: str, value: Any) -> Any:
    """The value as the settings have it; a complaint names the variable."""
    try:
        return check_setting(setting, value)
    except InputError as error:
        raise InputError(name + str(error).removeprefix(setting)) from error


def _value(name: str, text: str, kinds: set[Any]) -> Any:
    """The text as a file would spell it, by what the setting may be."""
    if tuple in kinds:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if Mapping in kinds:
        return _options(name, text)
    if kinds <= TEXTS:
        return text
    value = _scalar(text)
    return None if value is False and bool not in kinds and NoneType in kinds else value


def _options(name: str, text: str) -> dict[str, Any]:
    """NAME=VALUE with commas between."""
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise InputError(one_line(f"{name}: {part!r} is not of the form NAME=VALUE; put commas between several"))
        found[key.strip()] = _scalar(value.strip())
    return found


def _scalar(text: str) -> bool | int | float | str:
    """A number, true or false as TOML writes them; any other text stays one, for the check to judge."""
    try:
        value = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # ValueError: also a number of more than 4300 digits
        return text
    plain = value["value"] if len(value) == 1 else text
    return plain if isinstance(plain, (bool, int, float)) else text
