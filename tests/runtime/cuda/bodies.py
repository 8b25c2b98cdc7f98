"""Encoders with one body on the device's twin: files, opened models and the check of their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.runtime.cuda.stitched import Steady
from tests.stitching.encoders import Feed, answers
from weft.runtime.backend import BatchPart, LoadOptions, Step
from weft.runtime.cuda.preparing import prepare_on
from weft_stitch.bodies.body_stitching import stitch_body
from weft_stitch.on_device.body_file import EncoderModel

FOUR = LoadOptions(max_batch=4)


class Counting(Steady):
    """A twin that counts what is captured, and what of it is run."""

    def __init__(self) -> None:
        super().__init__()
        self.captured = self.ran = 0

    def timed(self, run: Callable[[], None]) -> float:
        """Every size takes as long, and is not run for it: that is most of the time of these tests."""
        return 1e-3

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1

        def counted() -> None:
            self.ran += 1
            run()

        return counted


def stitched(files: Sequence[Path], path: Path, tolerance: float = 1e-6) -> Path:
    stitch_body(files, tolerance=tolerance, measure=False, check=False).to_onnx(path)
    return path


def opened(path: Path, options: LoadOptions = FOUR, device: Any = None, cache: Path | None = None, **how: Any) -> Any:
    found = prepare_on(device or Counting(), path, options, cache, **how)
    assert isinstance(found, EncoderModel), found.remarks
    return found


def check(model: Any, asked: Sequence[tuple[Path, Feed]], near: float = 1e-5) -> None:
    """Requests in one go are answered as by the models' files."""
    parts = [BatchPart({f"{path.stem}.{port}": each for port, each in feed.items()}) for path, feed in asked]
    launched = model.launch(Step(0, parts, 0))
    launched.answered.wait()
    (made,) = launched.outputs
    wanted: dict[str, list[Any]] = {}
    for path, feed in asked:
        for port, each in answers(path, feed).items():
            wanted.setdefault(f"{path.stem}.{port}", []).append(each)
    assert made.answers.keys() == {spec.name for spec in model.outputs}
    for name, found in made.answers.items():
        right = np.concatenate(wanted.get(name, [found[:0]]))
        assert (found.shape, found.dtype) == (right.shape, right.dtype)
        assert np.abs(found - right).max(initial=0) <= near * np.abs(right).max(initial=1)
