"""A model as ONNX Runtime opens it: in one piece, never run, and so ready as soon as it can be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from onnx import ModelProto, ValueInfoProto

from weft.base.errors import ModelError, unknown_name
from weft.runtime import cutting, stitched
from weft.runtime.backend import LoadOptions, check_once
from weft.runtime.exits import METADATA_KEY
from weft.runtime.external import external_files
from weft.runtime.metadata import STITCHED_KEY
from weft.runtime.onnxruntime_cpu.model import Blueprint, CpuModel, SegmentSpec
from weft.runtime.onnxruntime_cpu.samples import check_ranks, check_values, specs, warm_shapes
from weft.runtime.onnxruntime_cpu.sessions import open_model
from weft.runtime.rows import INDEPENDENT
from weft.runtime.rows import METADATA_KEY as ROWS_KEY
from weft.runtime.values import unsteady
from weft.runtime.wire_format import Glance, fields

REMARK = "neither cut nor measured"
_GRAPH, _INPUT = 7, 11
"""Fields of a model and of a graph."""


def open_whole(path: Path, options: LoadOptions) -> CpuModel | None:
    """The model in one piece, checked as far as that takes no run; None where its answers depend on where it is cut."""
    try:
        session = open_model(path, options.threads)
        if session.get_modelmeta().custom_metadata_map.get(STITCHED_KEY) or named_exits(options, session):
            return None
        says_independent(session)
        taken = {each.name for each in session.get_inputs()}
        check_ranks(each for each in _stated_inputs(path) if each.name in taken)
        warm_shapes(session.get_inputs(), options.shapes)
        blueprint = whole_blueprint(session, path, None).model_copy(update={"remarks": (REMARK,)})
        check_values(blueprint.inputs, options.values)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    return CpuModel(blueprint, [session], learned=False)


def whole_blueprint(session: Any, path: Path, optimised: ModelProto | None) -> Blueprint:
    """The blueprint of the model in one segment, before anything is measured."""
    inputs, outputs = specs(session.get_inputs()), specs(session.get_outputs())
    if optimised is not None:
        check_ranks(optimised.graph.input)
    names = (tuple(spec.name for spec in inputs), tuple(spec.name for spec in outputs))
    steady = optimised is not None and not any(unsteady(optimised))
    files = (path, *external_files(path))
    return Blueprint(
        inputs=inputs,
        outputs=outputs,
        segments=(SegmentSpec(name="whole", inputs=names[0], outputs=names[1], steady=steady),),
        warm_shapes=None,
        memory_bytes=cutting.weight_bytes(optimised.graph) if optimised else sum(each.stat().st_size for each in files),
    )


def with_tasks(blueprint: Blueprint, session: Any, exits: Sequence[str]) -> Blueprint:
    """A stitched file has several models; see that they fit the graph."""
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
    """Those that the options name, else those of the file; none where there is only the end."""
    text = session.get_modelmeta().custom_metadata_map.get(METADATA_KEY, "")
    exits = options.exits or tuple(filter(None, map(str.strip, text.split(","))))
    outputs = [each.name for each in session.get_outputs()]
    for name in exits:
        if name not in outputs:
            raise ModelError(f"exits: {unknown_name('output', name, outputs)}")
    check_once(exits)
    return exits if len(exits) > 1 else ()


def says_independent(session: Any) -> bool:
    """Whether the file says that its rows may be computed together."""
    said = session.get_modelmeta().custom_metadata_map.get(ROWS_KEY)
    if said not in (None, INDEPENDENT):
        raise ModelError(f"its metadata has {ROWS_KEY} = {said!r}; it is {INDEPENDENT!r}, or left out")
    return said is not None


def _stated_inputs(path: Path) -> Iterator[ValueInfoProto]:
    """The inputs as the file states them; the rest of it is stepped over."""
    with open(path, "rb") as file, suppress(IndexError):  # ONNX Runtime has formats of its own
        data = Glance(file)
        for number, start, end in fields(data, 0, len(data)):
            for inner, first, last in fields(data, start, end) if number == _GRAPH else ():
                if inner == _INPUT:
                    yield ValueInfoProto.FromString(data[first:last])
