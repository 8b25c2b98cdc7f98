"""The description of a body in its ONNX file: ``body_metadata`` writes it, ``read_body`` rebuilds the models from it.

It lists the steps, the constants that each *crew* (models with equal constants) reads there, and their names in the
file; no weight is stored twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from weft.base.errors import StitchError
from weft.runtime.metadata import BODY_KEY
from weft_stitch.bodies.body import INPUT_STEP, Body, BodyStep, BodyValue, LowRank, OwnLines, crews
from weft_stitch.bodies.joining import JoinedBody
from weft_stitch.file_description import NotePart, VersionedNote, parse_note, read_note
from weft_stitch.net import Array
from weft_stitch.reading.onnx_program import Constants, ProgramNode

VERSION = 1
"""Version of the description; files with another one are refused."""
UNKNOWN = "?"
"""Stands for the name of a constant that the file does not store unchanged."""
_FEW = 8
"""Integer constants of up to this many numbers are written out: they may be sizes that the graph does not store."""
_NOT_STORED = np.zeros(0, np.float32)
"""In place of a difference that the file does not describe: only its kind is known."""

ConstantNote = str | tuple[int, ...]
"""A constant: its name in the graph (empty: the input is no constant), or its numbers."""


class CrewNote(NotePart):
    """Models with equal constants in a step."""

    tasks: tuple[int, ...] = ()
    """The models' numbers; empty for all models."""
    held: tuple[ConstantNote, ...]
    """For each input, the constant that these models hold there."""


class PartNote(NotePart):
    """The difference of a model's weight to the shared weight; fields after *kind* are for a low-rank part."""

    kind: str
    down: str = ""
    """The constant [parts, in, rank] with the first factors of several models."""
    up: str = ""
    """The constant [parts, rank, out] with the second factors."""
    at: int = 0
    """Index of the part in both constants."""
    rank: int = 0


class StepNote(NotePart):
    """One operator, in all models that have it."""

    op: str
    name: str
    inputs: tuple[tuple[int, int] | None, ...]
    """Step and output of each value (``BodyValue``); None for a constant."""
    settings: dict[str, float] = {}  # noqa: RUF012 (pydantic copies defaults)
    """The operator's attributes that are numbers."""
    crews: tuple[CrewNote, ...]
    parts: dict[int, PartNote] = {}  # noqa: RUF012 (pydantic copies defaults)
    """Model -> its difference to the shared weight."""
    lines: bool = False
    """Whether some model has lines of its own in a table."""


class BodyNote(VersionedNote):
    """The description of a body."""

    names: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[dict[str, tuple[int, int]], ...]
    """For each model, name of an output -> step and output that write it."""
    steps: tuple[StepNote, ...]


def body_metadata(body: Body, joined: JoinedBody) -> dict[str, str]:
    """The metadata for the file of the graph *joined*, to which *body* was joined."""
    outputs = tuple({port: (value.step, value.output) for port, value in ports.items()} for ports in body.outputs)
    steps = tuple(_describe_step(body, number, joined) for number in range(len(body.steps)))
    note = BodyNote(version=VERSION, names=body.names, inputs=body.inputs, outputs=outputs, steps=steps)
    return {BODY_KEY: note.model_dump_json(exclude_defaults=True)}


def _describe_step(body: Body, number: int, joined: JoinedBody) -> StepNote:
    """Describe step *number*: the constants of each crew, and the differences of models to the shared weight."""
    step = body.steps[number]
    constants = {
        task: _describe_contents(body.constants, step.contents[task], joined.constants[number, task])
        for task in step.contents
    }
    equal_crews = crews(constants)
    settings = {name: value for name, value in step.node.attributes.items() if isinstance(value, (int, float))}
    return StepNote(
        op=step.node.op,
        name=step.names[min(step.names)],
        inputs=tuple(None if value is None else (value.step, value.output) for value in step.inputs),
        settings=settings,
        crews=tuple(
            CrewNote(tasks=() if len(crew) == body.tasks else crew, held=constants[crew[0]]) for crew in equal_crews
        ),
        parts={
            task: _describe_part(part, joined, number, task)
            for task, part in step.parts.items()
            if _is_stored_apart(part, joined, number, task)
        },
        lines=bool(step.lines),
    )


def _is_stored_apart(part: LowRank, joined: JoinedBody, number: int, task: int) -> bool:
    """Whether a model's difference is stored in the graph by itself, and not merged into the model's weight."""
    return (number, task) in joined.low_rank_parts or part.before is not None or part.after is not None


def _describe_part(part: LowRank, joined: JoinedBody, number: int, task: int) -> PartNote:
    """Describe the difference of model *task* in step *number*."""
    if part.before is not None or part.after is not None:
        return PartNote(kind=part.kind)
    stored = joined.low_rank_parts[number, task]
    return PartNote(kind=part.kind, rank=part.rank, down=stored.down, up=stored.up, at=stored.number)


def _describe_contents(constants: Constants, keys: Sequence[str], names: Sequence[str]) -> tuple[ConstantNote, ...]:
    """The constants of a model in a step: names in the graph, or small numbers."""
    return tuple(
        key and (name or _small_numbers(constants.arrays.get(key))) for key, name in zip(keys, names, strict=True)
    )


def _small_numbers(array: Array | None) -> ConstantNote:
    """The numbers of a small integer constant; ``UNKNOWN`` for any other."""
    if array is None or array.dtype.kind != "i" or array.size > _FEW:
        return UNKNOWN
    return tuple(int(number) for number in array.reshape(-1))


def read_body(path: Path) -> Body:
    """Read the models in a file of one body; ``StitchError`` if the file does not describe them."""
    return rebuild_body(*read_note(path, BODY_KEY))


def rebuild_body(text: str, weights: Callable[[str], Array]) -> Body:
    """Rebuild the body that *text* describes. *weights*: returns a constant by its name.

    Ports, exits, the operator set and attributes that are no numbers are not described: they stay empty, or 0.
    """
    note = parse_note(text, BodyNote, BODY_KEY, VERSION)
    _check_note(note)
    constants = Constants()
    steps = tuple(
        _rebuild_step(number, step, len(note.names), constants, weights) for number, step in enumerate(note.steps)
    )
    outputs = tuple({port: BodyValue(*value) for port, value in ports.items()} for ports in note.outputs)
    return Body(
        note.names, opset=0, steps=steps, inputs=note.inputs, ports=({},) * len(note.names), outputs=outputs,
        constants=constants, exits=((),) * len(note.names),
    )  # fmt: skip


def _check_note(note: BodyNote) -> None:
    """Refuse steps that read values before they are written, and numbers of models that do not exist."""
    if not note.names or len(note.outputs) != len(note.names):
        raise _unfit_error(f"has outputs of {len(note.outputs)} models, and names of {len(note.names)}")
    for number, step in enumerate(note.steps):
        where = _step_text(number, step)
        _check_read(note, where, number, step.inputs)
        if not step.crews or any(len(crew.held) != len(step.inputs) for crew in step.crews):
            raise _unfit_error(f"does not say for each of its inputs what models hold there at {where}")
        for task in (*step.parts, *(task for crew in step.crews for task in crew.tasks)):
            if task not in range(len(note.names)):
                raise _unfit_error(f"has {len(note.names)} models, and none of number {task} at {where}")
    for name, outputs in zip(note.names, note.outputs, strict=True):
        _check_read(note, f"the outputs of {name}", len(note.steps), outputs.values())


def _check_read(note: BodyNote, where: str, before: int, values: Iterable[tuple[int, int] | None]) -> None:
    """Require each value to be an input of the models, or written by a step before number *before*."""
    for step, output in filter(None, values):
        known = output in range(len(note.inputs)) if step == INPUT_STEP else 0 <= step < before and output >= 0
        if not known:
            raise _unfit_error(f"reads output {output} of step {step} at {where}, which is not made before")


def _step_text(number: int, note: StepNote) -> str:
    return f"step {number} ({note.name})"


def _unfit_error(why: str) -> StitchError:
    """The error for a description that does not fit: *why*, and what to do."""
    return StitchError(f"its {BODY_KEY} {why}; stitch it again")


def _rebuild_step(
    number: int, note: StepNote, tasks: int, constants: Constants, weights: Callable[[str], Array]
) -> BodyStep:
    """Rebuild step *number*; ``StitchError`` names it if its description is wrong."""
    try:
        return _build_step(note, tasks, constants, weights)
    except KeyError as error:
        raise _unfit_error(f"names the constant {error}, which is not there, at {_step_text(number, note)}") from error
    except (IndexError, OverflowError, ValueError) as error:
        raise _unfit_error(f"does not fit the constants at {_step_text(number, note)}: {error}") from error


def _build_step(note: StepNote, tasks: int, constants: Constants, weights: Callable[[str], Array]) -> BodyStep:
    """Rebuild a step; ``KeyError`` or ``ValueError`` if its constants are not there or do not fit."""
    # names and signature, which only matter while models are aligned, are not described
    node = ProgramNode(note.name, note.op, inputs=(), outputs=("made",), attributes=note.settings, signature="")
    step = BodyStep(node, tuple(None if value is None else BodyValue(*value) for value in note.inputs))
    for crew in note.crews:
        keys = tuple(_store_constant(constant, constants, weights) for constant in crew.held)
        step.contents.update(dict.fromkeys(crew.tasks or range(tasks), keys))
    step.names.update(dict.fromkeys(sorted(step.contents), note.name))
    for task, part in note.parts.items():
        step.parts[task] = LowRank(_NOT_STORED, _NOT_STORED, before=_NOT_STORED, kind=part.kind)
        if part.down:
            down, up = weights(part.down)[part.at, :, : part.rank], weights(part.up)[part.at, : part.rank]
            step.parts[task] = LowRank(down, up, kind=part.kind)
    if note.lines:  # only that some model has lines of its own is known
        step.lines[0] = OwnLines(0, _NOT_STORED, _NOT_STORED)
    return step


def _store_constant(note: ConstantNote, constants: Constants, weights: Callable[[str], Array]) -> str:
    """Store a constant under its name or its numbers, and return this key."""
    if isinstance(note, str):
        if note not in ("", UNKNOWN):
            constants.arrays.setdefault(note, weights(note))
        return note
    constants.arrays[str(note)] = np.array(note, np.int64)
    return str(note)
