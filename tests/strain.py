"""``make strain``: the tests on machines that this one is not: busy, of one core, with a slow disk, slow and fast.

Each condition is a whole run of the suite; one can be named: ``python tests/strain.py busy -x tests/load``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

LOOPS = 4
CONDITIONS: dict[str, list[str]] = {
    "busy": [],
    "one-core": ["-n", "1"],
    "slow-disk": ["--disk", "0.05"],
    "slow": ["--clock", "10"],
    "fast": ["--clock", "0.1"],
}
"""Name of a condition -> options of pytest; ``busy`` has loops beside it, ``one-core`` a single core."""


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Processes that only take time; they end with this one, whatever becomes of it."""
    watch = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100_000))"
    loops = [subprocess.Popen([sys.executable, "-c", watch]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run(condition: str, arguments: list[str]) -> int:
    """The status of the suite under a condition."""
    if condition == "one-core":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    usual = ["-m", "pytest", "-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder"]
    command = [sys.executable, *usual, *CONDITIONS[condition], *arguments]
    with busy_loops(LOOPS if condition == "busy" else 0):
        return subprocess.run(command, check=False).returncode


def main() -> None:
    """One condition by name, or all of them, each in a process of its own."""
    if sys.argv[1:2] and sys.argv[1] in CONDITIONS:
        sys.exit(run(sys.argv[1], sys.argv[2:]))
    failed = [
        name
        for name in CONDITIONS
        if subprocess.run([sys.executable, __file__, name, *sys.argv[1:]], check=False).returncode
    ]
    sys.exit(f"the tests fail under: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
