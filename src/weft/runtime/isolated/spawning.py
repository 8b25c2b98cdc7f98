"""How a worker's process is started, and what is said of how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import asdict

import orjson

from weft.runtime.isolated.confinement import Confinement

KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "SYSTEMROOT", "PYTHONDONTWRITEBYTECODE")
"""What a process that works for the server has of its environment, in which there may be secrets."""


def ended_by(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"it ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"{name}, from outside or for want of memory" if -code == signal.SIGKILL else name


def bare_environment() -> dict[str, str]:
    """For a fresh interpreter that knows the modules of this one, and next to nothing of its environment."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    paths = os.pathsep.join(dict.fromkeys(os.path.abspath(each) for each in sys.path if each))
    return {**kept, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": paths}


def started(line: int, confinement: Confinement, scratch: str) -> subprocess.Popen[bytes]:
    """A worker's process, in a folder of its own."""
    command = [
        sys.executable,
        "-P",  # no modules from where it is started, nor from a home: models may write there
        "-s",
        "-m",
        "weft.runtime.isolated.worker",
        str(line),
        orjson.dumps(asdict(confinement)).decode(),
    ]
    return subprocess.Popen(
        command,
        env={**bare_environment(), "TMPDIR": scratch, "HOME": scratch},
        pass_fds=[line],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )
