"""Files are written whole or not at all: beside their place first, then moved there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.errors import InputError


@contextmanager
def replacing(path: str | os.PathLike[str], error: type[InputError] = InputError) -> Iterator[Path]:
    """A path to write to, with the suffix of *path*; what stands there takes its place when the block ends well.

    What cannot be written is the caller's mistake and raises *error*. Devices are written to as they are.
    """
    target = Path(path)
    real = target.resolve()
    beside = real if real.exists() and not real.is_file() else real.with_name(f".{os.getpid()}-{real.name}")
    try:
        yield beside
        if beside != real:
            if real.exists():
                shutil.copymode(real, beside)
            beside.replace(real)
    except OSError as problem:
        raise error(f"{target}: cannot write: {problem.strerror or problem}") from problem
    finally:
        if beside != real:
            beside.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str, error: type[InputError] = InputError) -> None:
    """Write a text file."""
    with replacing(path, error) as beside:
        beside.write_text(text, encoding="utf-8")
