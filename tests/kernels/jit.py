"""Loops as plain Python: a test file is run as a script in another process, with the JIT off."""

from __future__ import annotations

import os
import subprocess
import sys

from tests import ROOT


def said_with_the_jit_off(module: str) -> tuple[int, str, str]:
    """Status, output and errors of a module that is run so; a warning is an error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", module],
        cwd=ROOT,
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr
