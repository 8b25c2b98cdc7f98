"""A server in threads (T) or with isolation (P): the settings of each mode, and the wait until models are learned."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

from weft.serving.environment import VARIABLES

MODES = {"T": "threads", "P": "process"}
"""Mode -> the setting ``isolation``."""
LEARNED_S = 120.0


def settings_known() -> frozenset[str]:
    """What this version of the server can be told."""
    return frozenset(VARIABLES.values())


def settings_for(mode: str, known: frozenset[str], **more: Any) -> dict[str, Any] | None:
    """The server's settings, those of *more* that it knows; None where this version has no such mode."""
    if "isolation" in known:
        more["isolation"] = MODES[mode]
    elif mode != "T":
        return None
    return {key: value for key, value in more.items() if key in known}


def as_served(known: frozenset[str]) -> tuple[str, ...]:
    """What a server is to be told beside, so that models are ready at once, as by default, and learned later."""
    return ("--learn-later",) if "learn_first" in known else ()


def wait_until_learned(url: str, *models: str) -> None:
    """Return when models have been measured, and cut where they are long enough, or after a while."""
    until_s = time.monotonic() + LEARNED_S
    while time.monotonic() < until_s:
        with urllib.request.urlopen(f"{url}/weft/profile", timeout=LEARNED_S) as answer:
            known = json.loads(answer.read())["models"]
        if all(known.get(model, {}).get("times_s") for model in models):
            return
        time.sleep(0.2)


def write_settings(path: Path, models: tuple[str, ...], settings: dict[str, Any]) -> Path:
    """The server's file."""
    lines = [f"models = [{', '.join(map(_toml, models))}]"]
    lines += [f"{key} = {_toml(value)}" for key, value in settings.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


def _toml(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
