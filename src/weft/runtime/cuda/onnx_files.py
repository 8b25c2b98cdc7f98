"""ONNX files for a device: their meaning, the graph as ONNX Runtime optimises it there, and its pieces as files.

The meaning of a file (its exits, which rows may be computed together, its outputs) is determined on the CPU, as for any
model. The *form fused* of a stitched file, one kernel for each layer of all its models, belongs to the tool stitch.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from weft.base.errors import ModelError
from weft.models.onnx_graph import OnnxModel, empty_model, fill, load, save
from weft.runtime import cutting
from weft.runtime.backend import LoadOptions
from weft.runtime.cuda import node_costs
from weft.runtime.cuda.attention import with_attention
from weft.runtime.cuda.device import FLOATS, Device, lacks_memory
from weft.runtime.cuda.model import DeviceModel
from weft.runtime.cuda.pieces import OpenPieces, random_batch, unseen
from weft.runtime.cuda.precision import BF16, converted, is_half
from weft.runtime.cuda.preparation import ModelPreparation, Unfit
from weft.runtime.cuda.round_graphs import RoundGraphs, weights_outside
from weft.runtime.cuda.rounds import SHAPES, file_at, rung_sizes, segments_at
from weft.runtime.cuda.segments import COPIES, copies_in, mark_copies, open_on, open_segments
from weft.runtime.onnxruntime_cpu.allowance import Allowance, OutOfTime
from weft.runtime.onnxruntime_cpu.model import Blueprint, SegmentSpec
from weft.runtime.onnxruntime_cpu.model_timing import unbatchable
from weft.runtime.onnxruntime_cpu.preparing import check_answers, normalised, with_ranks
from weft.runtime.onnxruntime_cpu.profiler import Tracer, seen_tensors
from weft.runtime.onnxruntime_cpu.sessions import WEIGHTS, first_line, open_model, warm_shapes
from weft.runtime.onnxruntime_cpu.whole import named_exits, says_independent, whole_blueprint, with_tasks
from weft.runtime.own_folder import LOCK
from weft.runtime.rows import Verdict, judge_rows
from weft.runtime.tensors import Array
from weft.runtime.values import Follower, inputs_of

NO_TOOL = "only weft's tool stitch has the kernels for it; pip install 'weft[stitch]'"
NO_SESSIONS = "onnxruntime here has no CUDA; docs/gpu.md says how to install onnxruntime-gpu"
NHWC = "com.ms.internal.nhwc"
"""The domain of operators over tensors whose channels come last."""


@dataclass(slots=True)
class OnnxFile:
    """A model of an ONNX file while it is prepared, in a folder of its own."""

    device: Device
    path: Path
    options: LoadOptions
    folder: Path
    allowance: Allowance  # the time limit for trial runs
    exits: tuple[str, ...] = ()
    half: bool = False  # whether it computes with floats of 16 bits
    graph: OnnxModel = field(default_factory=empty_model)
    """The graph that is cut: optimised for the device."""
    tensors: dict[str, cutting.SeenTensor] = field(default_factory=dict)
    """The tensors of that graph, by name."""
    rounds: RoundGraphs | None = None
    """For a stitched model: its graph for any number of rows of each task."""

    @property
    def _host_folder(self) -> Path:
        """Folder of the graph for the CPU, whose weights file has another layout than the device's."""
        folder = self.folder / "host"
        folder.mkdir(exist_ok=True)
        return folder

    def built(self) -> DeviceModel:
        """Read, cut, capture and measure the model as the device will serve it."""
        free_bytes = self.device.memory()[0]
        blueprint, expected, host_graph = self._read_meaning()
        preparation = self.choose_preparation(blueprint)
        is_tools_own = preparation.model is not self  # the kernels of a tool compute every row by itself
        verdict = Verdict(None) if is_tools_own else self._judge_rows(blueprint, host_graph)
        return preparation.built(blueprint, verdict, expected, free_bytes)

    def reopened(self, blueprint: Blueprint) -> DeviceModel:
        """The model of a blueprint from the cache."""
        if blueprint.segments[0].file is None:  # a tool prepared it, and is not installed any more
            raise ModelError(f"{self.path}: it was prepared in the form fused: {NO_TOOL}")
        free_bytes = self.device.memory()[0]
        return open_pieces(self.device, blueprint, self.folder).assembled(free_bytes)

    def choose_preparation(self, blueprint: Blueprint) -> ModelPreparation:
        """The preparation of the model for what runs it best; tools for a kind of ONNX file override this."""
        preparation = self.onnx_preparation(blueprint)
        if blueprint.tasks:
            preparation.remarks.append(f"not in the form fused: {NO_TOOL}")
        return preparation

    def onnx_preparation(self, blueprint: Blueprint) -> ModelPreparation:
        """The preparation of the model to run in ONNX Runtime: optimises its graph and observes its tensors."""
        self.graph = self._optimise()
        exit_cuts = cutting.arrange(self.graph.graph, self.exits) if self.exits else ()
        if blueprint.tasks:
            self._use_rounds(blueprint)
        else:
            self.tensors = self._observe_tensors(blueprint)
        return ModelPreparation(self.device, self, self.options, self.allowance, self.exits, exit_cuts)

    def forget_graph(self) -> None:
        """Free the graph and its tensors, which only ONNX Runtime needs, if a tool's kernels run the model."""
        self.graph, self.tensors, self.rounds = empty_model(), {}, None

    # What the file means

    def _read_meaning(self) -> tuple[Blueprint, dict[str, Array], OnnxModel]:
        """The model in one piece as the CPU sees it: its blueprint, its outputs for ``unseen`` inputs, and its graph.

        ``Unfit`` if no device can run it, or it cannot be run with generated inputs.
        """
        target = self._host_folder / "host.onnx"
        # As for all runs of preparation, on at least four threads; without the slow plan of memory (``open_session``).
        session = open_model(self.path, max(4, self.options.threads), target, thrifty=False)
        host_graph = normalised(load(target), session)
        _check_fit(session, host_graph)
        self.exits = named_exits(self.options, session)
        blueprint = with_tasks(whole_blueprint(session, self.path, host_graph), session, self.exits)
        if any(task.length for task in blueprint.tasks):
            raise Unfit(f"its models take rows of any length together: {NO_TOOL}")
        shapes, missing = warm_shapes(session.get_inputs(), self.options.shapes)
        if missing:
            raise Unfit(f"give shapes for the free dimensions of {', '.join(missing)}")
        blueprint = blueprint.model_copy(update={"warm_shapes": shapes, "values": dict(self.options.values)})
        try:
            names = [spec.name for spec in blueprint.outputs]
            expected = dict(zip(names, self.allowance.run(session, names, unseen(blueprint)), strict=True))
        except OutOfTime:
            raise
        except Exception as error:  # ONNX Runtime raises several unrelated kinds
            raise Unfit(f"it fails on made-up inputs: {first_line(error)}") from error
        check_answers(self.exits, expected)
        if not self.options.independent_rows and says_independent(session):
            self.options = dataclasses.replace(self.options, independent_rows=True)
        return blueprint.model_copy(update={"outputs": with_ranks(blueprint.outputs, expected)}), expected, host_graph

    def _judge_rows(self, blueprint: Blueprint, host_graph: OnnxModel) -> Verdict:
        """Whether rows may be computed together: by proof (``weft.runtime.rows``), or as the user states."""
        reason, tasks = unbatchable(blueprint, blueprint.warm_shapes or {}), blueprint.tasks
        never_batched = self.options.max_batch == 1 and not tasks  # a round has rows of all tasks
        if reason is not None or self.options.independent_rows or never_batched:
            return Verdict(reason)
        tracer = Tracer(self._host_folder, max(4, self.options.threads), self.allowance)
        # Sizes without a common factor: where one divides another, a graph that mixes rows may look right.
        verdict = judge_rows(host_graph, [random_batch(blueprint, rows) for rows in (2, 3)], tracer, tasks)
        if verdict.mixing is None and verdict.by_size:
            verdict = judge_rows(host_graph, [random_batch(blueprint, rows) for rows in (4, 5, 7)], tracer, tasks)
            verdict = verdict._replace(by_size=True)
        return verdict

    # On the device

    def _optimise(self) -> OnnxModel:
        """The graph as ONNX Runtime optimises it for the device, without nodes that copy to or from the host."""
        target = self.folder / "optimised.onnx"
        try:
            session = self._open_whole(with_attention(self.path, self.folder), target)
        except Exception as error:  # the C++ side raises a dozen unrelated kinds
            if lacks_memory(error):
                raise
            if self.options.precision == BF16:  # few operators support it
                raise ModelError(f"it cannot be opened in bf16, use fp16: {first_line(error)}") from error
            raise Unfit(f"it cannot be opened on the device: {first_line(error)}") from error
        graph = normalised(_without_copies(load(target)), session)
        if self.exits and (reason := cutting.whole_because(graph.graph)):
            raise Unfit(f"it cannot be cut at its exits, for it {reason}")
        return graph

    def _open_whole(self, path: Path, target: Path) -> Any:
        """A session over the whole model in its precision, optimised; the optimised graph is saved to *target*.

        *path*: the model's file, or a copy with fused attention, which is given up if ONNX Runtime refuses it.
        """
        try:
            source = converted(path, self.options.precision, self.folder)
            self.half = is_half(load(source))
            return open_on(self.device, source, optimise=True, channels_last=self.half, save=target)
        except Exception:
            if path == self.path:
                raise
            return self._open_whole(self.path, target)

    def _observe_tensors(self, blueprint: Blueprint) -> dict[str, cutting.SeenTensor]:
        """Run the graph once on the device; returns its tensors by name."""
        channels_last = any(node.domain == NHWC for node in self.graph.graph.node)

        def open_profiled(path: Path, trace: Path) -> Any:
            return open_on(self.device, path, optimise=False, channels_last=channels_last, profile=trace)

        try:
            return seen_tensors(self.graph, self.folder, random_batch(blueprint, 1), open_profiled)
        except Exception as error:  # ONNX Runtime raises several unrelated kinds
            if lacks_memory(error):
                raise
            raise Unfit(f"it fails on the device: {first_line(error)}") from error

    def _use_rounds(self, blueprint: Blueprint) -> None:
        """Replace the graph and the tensors of a stitched model by those for one row of each task."""
        weights_outside(self.graph, self.folder)
        self.rounds = RoundGraphs(self.graph, partial(self._run_rows, blueprint))
        self.graph = self.rounds.graph_for(1)
        self.tensors = self._observe_tensors(blueprint)
        self.tensors |= self.rounds.plan_concat_padding(self.tensors)
        self.graph = self.rounds.graph_for(1)  # now without Concats of different sizes

    def _run_rows(self, blueprint: Blueprint, model: OnnxModel, rows: int) -> Sequence[Array]:
        """Run *model*, a part of the graph, on random samples with *rows* rows of each task; returns its outputs."""
        path, feed = self.folder / "rows.onnx", random_batch(blueprint, rows)
        save(model, path)
        try:
            session = open_on(self.device, path, channels_last=self.half)
            outputs: Sequence[Array] = session.run(None, {value.name: feed[value.name] for value in model.graph.input})
        except Exception as error:  # ONNX Runtime raises several unrelated kinds
            raise Unfit(f"what depends on its numbers of rows cannot be computed: {first_line(error)}") from error
        return outputs

    # The members of ``Divisible``

    def guessed_s(self) -> list[float]:
        return node_costs.guessed_s(self.graph.graph, self.tensors)

    def crossing(self) -> list[int | None]:
        """For each cut, the bytes that cross it, or None; only floats that depend on the inputs' values may cross."""
        computed = _tensors_of_values(self.graph)
        crossable = {
            name: tensor for name, tensor in self.tensors.items() if tensor.element_type in FLOATS and name in computed
        }
        return cutting.crossing_bytes(self.graph.graph, crossable)

    def whole_because(self) -> str | None:
        return cutting.whole_because(self.graph.graph)

    def in_pieces(self, blueprint: Blueprint, cuts: Sequence[int]) -> Blueprint:
        """The blueprint with the segments between *cuts*, whose files are written."""
        segments = self._write_pieces(self.graph, cuts)
        if self.rounds is not None:
            for rows in rung_sizes(blueprint)[1:]:
                self._write_pieces(self.rounds.graph_for(rows), cuts, rows)
        return blueprint.model_copy(update={"segments": segments})

    def _write_pieces(self, graph: OnnxModel, cuts: Sequence[int], rows: int = 1) -> tuple[SegmentSpec, ...]:
        """Write the file of each piece of *graph*; *rows*: the rows of each task that a stitched graph is for."""
        segments, types = [], {name: tensor.element_type for name, tensor in self.tensors.items()}
        for index, piece in enumerate(cutting.split(graph, cuts, types)):
            file = file_at(f"segment{index}of{len(cuts) + 1}.onnx", rows)
            save(piece.model, self.folder / file)
            may_copy = self.rounds is None  # graphs of rounds compute nothing on the host
            if may_copy and copies_in(self.device, self.folder / file, channels_last=self.half):
                mark_copies(piece.model)
                save(piece.model, self.folder / file)
            segments.append(
                SegmentSpec(name=piece.name, inputs=piece.inputs, outputs=piece.outputs, file=file, steady=piece.steady)
            )
        return tuple(segments)

    def opened(self, blueprint: Blueprint) -> OpenPieces:
        return open_pieces(self.device, blueprint, self.folder)

    def clear(self, blueprint: Blueprint) -> None:
        """Remove everything from the folder but the files of segments."""
        files = {spec.file for rows in rung_sizes(blueprint) for spec in segments_at(blueprint, rows)}
        kept = {LOCK, SHAPES} if files == {None} else {LOCK, WEIGHTS, *files}  # no files: torch runs the form fused
        shutil.rmtree(self._host_folder, ignore_errors=True)
        for path in self.folder.iterdir():
            if path.name not in kept:
                path.unlink()


def open_pieces(device: Device, blueprint: Blueprint, folder: Path) -> OpenPieces:
    """The segments of a model, for all batch sizes, whose files are in *folder*; sessions are opened on first use."""
    specs = list(dict.fromkeys(spec for rows in rung_sizes(blueprint) for spec in segments_at(blueprint, rows)))
    files = [load(folder / spec.file) for spec in blueprint.segments if spec.file]
    channels_last = any(node.domain == NHWC for piece in files for node in piece.graph.node)
    segments, weights = open_segments(device, folder, specs, channels_last=channels_last)
    return OpenPieces(device, blueprint, dict(zip(specs, segments, strict=True)), weights)


def _check_fit(session: Any, graph: OnnxModel) -> None:
    """Raise ``Unfit`` for a model that no device can run: with texts, or with control flow."""
    if any(value.type == "tensor(string)" for value in (*session.get_inputs(), *session.get_outputs())):
        raise Unfit("it has inputs or outputs of text")
    reason = cutting.whole_because(graph.graph)
    if reason is not None and "control flow" in reason:
        raise Unfit(f"it {reason}")


def _without_copies(model: OnnxModel) -> OnnxModel:
    """Remove the nodes that copy between host and device, in place; sessions insert the copies that they need."""
    graph = model.graph
    copies = {node.output[0]: node.input[0] for node in graph.node if node.op_type in COPIES}
    outputs = {output.name for output in graph.output}
    kept = [node for node in graph.node if node.output[0] not in copies or node.output[0] in outputs]
    for node in kept:
        for index, name in enumerate(node.input):
            while name in copies and name not in outputs:  # a copy may be of a copy
                name = copies[name]
            node.input[index] = name
        if node.output[0] in copies:  # an output of the model
            node.op_type = "Identity"
    fill(graph.node, kept)
    return model


def _tensors_of_values(graph: OnnxModel) -> frozenset[str]:
    """Names of the tensors that depend on the inputs' values; others depend on shapes alone, and are on the host."""
    facts = inputs_of(graph.graph)
    Follower(graph.functions).through(graph.graph.node, facts)
    return frozenset(name for name, fact in facts.items() if fact.valued)
