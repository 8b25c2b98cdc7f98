"""The server's settings as variables of the environment: WEFT_ and the name of a setting in capitals.

They override those of a file, are overridden by the command line, and are checked like those of a file. WEFT_API_KEY
is the exception: it counts only if nothing else sets a key, because ``weft bench`` sends it, so that it may be a
client's key. ``WEFT_API_KEY_FILE`` is always the server's.
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
"""Similarity above which an unknown variable is reported as a typing error: WEFT_MAX_BODY is, variables that an
orchestrator sets for a service called weft (WEFT_PORT) are not."""

TEXTS = {str, Path, NoneType}
"""Types of settings whose text is used as it is, without parsing."""


def variable(setting: str) -> str:
    """Return the name of the environment variable of a setting."""
    return f"{PREFIX}{setting.upper()}"


VARIABLES = {variable(key): key for key in GROUP_OF}
"""Variable -> setting, for all there are."""


def settings_in(environment: Mapping[str, str]) -> dict[str, Any]:
    """Read settings from environment variables, by setting; empty variables are ignored."""
    types = setting_types()
    settings: dict[str, Any] = {}
    for name, setting in VARIABLES.items():
        if environment.get(name) and name != API_KEY_VARIABLE:
            settings[setting] = _check_variable(
                name, setting, _value(name, environment[name], types_in(types[setting]))
            )
    if file := environment.get(API_KEY_FILE_VARIABLE):
        settings["api_key"] = read_api_key(Path(file), {})
    return settings


def near_misses(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return a warning for each variable whose name resembles that of a setting."""
    known = [variable_name.removeprefix(PREFIX) for variable_name in (*VARIABLES, API_KEY_FILE_VARIABLE)]
    warnings = []
    for name in sorted(environment):
        suffix = name.removeprefix(PREFIX)
        similar = get_close_matches(suffix, known, n=1, cutoff=NEAR) if suffix != name and suffix not in known else []
        warnings += [one_line(f"the variable {name} sets nothing; did you mean {PREFIX}{match}?") for match in similar]
    return tuple(warnings)


def _check_variable(name: str, setting: str, value: Any) -> Any:
    """Check and convert the value of the variable *name*; the InputError names the variable, not the setting."""
    try:
        return check_setting(setting, value)
    except InputError as error:
        raise InputError(name + str(error).removeprefix(setting)) from error


def _value(name: str, text: str, kinds: set[Any]) -> Any:
    """Parse the *text* of the variable *name*; *kinds*: the types that its setting may have."""
    if tuple in kinds:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if Mapping in kinds:
        return _options(name, text)
    if kinds <= TEXTS:
        return text
    value = _scalar(text)
    # false switches off a setting that may be None and is no switch, such as the port of gRPC
    return None if value is False and bool not in kinds and NoneType in kinds else value


def _options(name: str, text: str) -> dict[str, Any]:
    """Parse NAME=VALUE pairs that are separated by commas, in the variable *name*."""
    options = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise InputError(one_line(f"{name}: {part!r} is not of the form NAME=VALUE; put commas between several"))
        options[key.strip()] = _scalar(value.strip())
    return options


def _scalar(text: str) -> bool | int | float | str:
    """Parse a number, true or false as TOML writes them; return any other text as it is."""
    try:
        value = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # ValueError: also a number of more than 4300 digits
        return text
    scalar = value["value"] if len(value) == 1 else text  # a text of several lines may have set other keys, too
    return scalar if isinstance(scalar, (bool, int, float)) else text
