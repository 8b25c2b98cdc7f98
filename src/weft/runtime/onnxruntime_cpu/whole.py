"""Models in one piece: opened by ONNX Runtime and never run, so that they are ready as fast as possible."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.base.errors import ModelError, unknown_name
from weft.models.onnx_graph import OnnxModel
from weft.runtime import cutting, stitched
from weft.runtime.backend import LoadOptions, check_once
from weft.runtime.external import external_files, glanced_inputs
from weft.runtime.metadata import EXITS_KEY, STITCHED_KEY
from weft.runtime.onnxruntime_cpu.model import Blueprint, CpuModel, SegmentSpec
from weft.runtime.onnxruntime_cpu.sessions import check_ranks, open_model, specs, warm_shapes
from weft.runtime.rows import INDEPENDENT
from weft.runtime.rows import METADATA_KEY as ROWS_KEY
from weft.runtime.samples import check_values
from weft.runtime.values import unsteady

REMARK = "neither cut nor measured"


def open_whole(path: Path, options: LoadOptions) -> CpuModel | None:
    """Open the model in one piece, with all checks that need no run; None if its answers depend on its cuts."""
    try:
        session = open_model(path, options.threads)
        if session.get_modelmeta().custom_metadata_map.get(STITCHED_KEY) or named_exits(options, session):
            return None
        says_independent(session)  # only to refuse invalid metadata
        names = {value.name for value in session.get_inputs()}
        # Of the file, not of the session, which reports inputs without dimensions as scalars.
        with suppress(IndexError):  # ONNX Runtime also opens files in formats of its own
            check_ranks(value for value in glanced_inputs(path) if value.name in names)
        warm_shapes(session.get_inputs(), options.shapes)  # only to refuse shapes that do not fit
        blueprint = whole_blueprint(session, path, None).model_copy(update={"remarks": (REMARK,)})
        check_values(blueprint.inputs, options.values)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    return CpuModel(blueprint, [session], learned=False)


def whole_blueprint(session: Any, path: Path, optimised: OnnxModel | None) -> Blueprint:
    """The blueprint of the model in one segment, before anything is measured; *session*: of the whole model.

    *optimised*: its graph as ONNX Runtime optimised it; None if that is not known.
    """
    inputs, outputs = specs(session.get_inputs()), specs(session.get_outputs())
    if optimised is not None:
        check_ranks(optimised.graph.input)
    input_names, output_names = (tuple(spec.name for spec in tensors) for tensors in (inputs, outputs))
    steady = optimised is not None and not any(unsteady(optimised))
    files = (path, *external_files(path))
    return Blueprint(
        inputs=inputs,
        outputs=outputs,
        segments=(SegmentSpec(name="whole", inputs=input_names, outputs=output_names, steady=steady),),
        warm_shapes=None,
        memory_bytes=cutting.weight_bytes(optimised.graph) if optimised else sum(file.stat().st_size for file in files),
    )


def with_tasks(blueprint: Blueprint, session: Any, exits: Sequence[str]) -> Blueprint:
    """Add the tasks of a stitched file; ``ModelError`` if they do not fit the graph, or *exits* are named as well."""
    tasks = stitched.read_tasks(session.get_modelmeta().custom_metadata_map.get(STITCHED_KEY, ""))
    if tasks:
        stitched.check(tasks, blueprint.inputs, blueprint.outputs)
        if exits:
            raise ModelError(
                "is stitched, and stitched models cannot be left at exits named for all of them; name those of each "
                "model in its own file (weft.exits in its metadata), and stitch it again"
            )
    return blueprint.model_copy(update={"tasks": tasks})


def named_exits(options: LoadOptions, session: Any) -> tuple[str, ...]:
    """The exits that the options name, else those that the file's metadata names; empty if there is only the end."""
    text = session.get_modelmeta().custom_metadata_map.get(EXITS_KEY, "")
    exits = options.exits or tuple(filter(None, map(str.strip, text.split(","))))
    outputs = [value.name for value in session.get_outputs()]
    for name in exits:
        if name not in outputs:
            raise ModelError(f"exits: {unknown_name('output', name, outputs)}")
    check_once(exits)
    return exits if len(exits) > 1 else ()  # a single exit is the end


def says_independent(session: Any) -> bool:
    """Whether the file's metadata states that rows are independent; ``ModelError`` if the entry is invalid."""
    stated = session.get_modelmeta().custom_metadata_map.get(ROWS_KEY)
    if stated not in (None, INDEPENDENT):
        raise ModelError(f"its metadata has {ROWS_KEY} = {stated!r}; it is {INDEPENDENT!r}, or left out")
    return stated is not None
