"""Models through ``weft stitch``: ``outcome`` is what came of it, with answers that are the models' own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import typer

from weft.base.errors import WeftError
from weft.runtime.stitched import tasks_in
from weft_stitch.cli.stitch import command

STITCHED = "stitched"
NOT_RUNNABLE = "not runnable"
"""ONNX Runtime does not take the models themselves."""
CLOSE = 1e-5
"""Of an output's largest number, as the command allows."""
FLOATS = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}
BROKEN = ("differs by", "cannot be run", "cannot be loaded")
"""What the command says when it finds its own result wrong: as bad as a wrong result."""


def session(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def stitch_command() -> Any:
    app = typer.Typer()
    app.command("stitch")(command)
    return typer.main.get_command(app)


COMMAND = stitch_command()


def option(name: str, value: Any) -> list[str]:
    """An option as it is typed; a flag that is off by default has no ``--no-`` form and is left out."""
    written = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{written}"] if value else [f"--no-{written}"] if name in ("measure", "slabs") else []
    return [f"--{written}", str(value)]


def save(models: Sequence[onnx.ModelProto], folder: Path) -> list[Path]:
    files = [folder / f"m{number}.onnx" for number in range(len(models))]
    for path, model in zip(files, models, strict=True):
        path.write_bytes(model.SerializeToString())
    return files


def runnable(files: Sequence[Path]) -> bool:
    """Whether ONNX Runtime takes the models as they are."""
    try:
        for path in files:
            run(session(path), drawn(session(path), rows=1))
    except Exception:  # the C++ side raises a dozen unrelated kinds
        return False
    return True


def drawn(alone: Any, rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs; *rows* where the model leaves them open."""
    rng = np.random.default_rng([17, seed])
    shapes = {
        each.name: (rows if isinstance(each.shape[0], str) else each.shape[0], *each.shape[1:])
        for each in alone.get_inputs()
    }
    kinds = {each.name: each.type for each in alone.get_inputs()}
    return {
        name: rng.standard_normal(shape).astype(FLOATS[kinds[name]])
        if kinds[name] in FLOATS
        else rng.integers(0, 5, shape)
        for name, shape in shapes.items()
    }


def run(alone: Any, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = [each.name for each in alone.get_outputs()]
    return dict(zip(names, alone.run(names, dict(feed)), strict=True))


def joined(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([each[name] for each in parts]) for name in parts[0]}


def assert_alike(found: np.ndarray, wanted: np.ndarray, *, jumpy: bool) -> None:
    assert found.shape == wanted.shape
    exact = wanted.dtype != np.float16
    largest = float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0)) or 1.0
    close = CLOSE if exact else 2e-2
    agree = np.isclose(found, wanted, rtol=0, atol=close * largest, equal_nan=True)
    assert agree.all() or (jumpy and np.mean(agree) >= 0.5), np.abs(found - wanted).max() / largest


def assert_equals_the_models(files: Sequence[Path], written: Path, dynamic: bool, *, jumpy: bool) -> list[str]:
    """The file answers as its models do, to inputs that the command has not seen; their names are returned."""
    stitched, tasks = session(written), list(tasks_in(written))
    feed: dict[str, np.ndarray] = {}
    wanted: dict[str, np.ndarray] = {}
    for number, task in enumerate(tasks):
        alone = session(next(path for path in files if path.stem == task.name))
        batches = [drawn(alone, rows=task.batch, seed=seed) for seed in range(1 + number if dynamic else 1)]
        feed |= {task.inputs[name]: array.astype(np.float32) for name, array in joined(batches).items()}
        given = joined([run(alone, each) for each in batches])
        wanted |= {task.outputs[name]: array for name, array in given.items()}
    answers = run(stitched, feed)
    assert answers.keys() == wanted.keys()
    for name, array in wanted.items():
        assert_alike(answers[name], array, jumpy=jumpy)
    return [task.name for task in tasks]


def outcome(models: Sequence[onnx.ModelProto], folder: Path, *, jumpy: bool = False, **settings: Any) -> str:
    """Stitch *models*: ``STITCHED``, ``NOT_RUNNABLE``, or what the command says against it; nothing else is allowed.

    *jumpy*: a last bit may change much of the answers, which the command may then find and refuse.
    """
    files = save(models, folder)
    if not runnable(files):
        return NOT_RUNNABLE
    options = [word for name, value in ({"measure": False} | settings).items() for word in option(name, value)]
    try:
        COMMAND.main([*map(str, files), "-o", str(folder / "out.onnx"), *options], standalone_mode=False)
    except WeftError as error:
        text = str(error)
        assert error.exit_code == 2
        assert "\n" not in text
        assert jumpy or not any(words in text for words in BROKEN), text
        return text
    written = sorted(folder.glob("out*.onnx"))
    found = [assert_equals_the_models(files, path, settings.get("dynamic", False), jumpy=jumpy) for path in written]
    assert sorted(name for names in found for name in names) == [path.stem for path in files]
    return STITCHED
