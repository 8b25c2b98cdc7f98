"""Loading a model for serving: optimise it as a whole, cut it, and measure its segments.

``prepare`` is the entry point. Results equal those of plain ONNX Runtime bit for bit: it optimises the whole graph, and
segments of the optimised graph run as they are. Where that does not hold, the model stays whole, with a remark.

A model with exits is always cut at them. If samples cannot leave there after all, a model whose exits a user named is
refused; if only the file names them, it is served without exits, with a remark.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.base.errors import ModelError, NotLearned, reason_of
from weft.models.onnx_graph import OnnxModel, copied, fill, load, prune, save
from weft.runtime import cutting
from weft.runtime.backend import LoadOptions, Progress
from weft.runtime.exits import ExitSpec
from weft.runtime.onnxruntime_cpu import cache as caching
from weft.runtime.onnxruntime_cpu.allowance import Allowance, BoundedSession, OutOfTime
from weft.runtime.onnxruntime_cpu.model import Blueprint, CpuModel, SegmentSpec
from weft.runtime.onnxruntime_cpu.model_timing import Crossing, Feed, crossing, measure
from weft.runtime.onnxruntime_cpu.profiler import Tracer, profile
from weft.runtime.onnxruntime_cpu.sessions import (
    WEIGHTS,
    first_line,
    open_model,
    open_session,
    release_memory,
    warm_shapes,
)
from weft.runtime.onnxruntime_cpu.whole import named_exits, open_whole, says_independent, whole_blueprint, with_tasks
from weft.runtime.own_folder import LOCK, remove
from weft.runtime.rows import INDEPENDENT, Verdict, judge_rows
from weft.runtime.samples import sample
from weft.runtime.stitched import TaskSpec, usual_shapes
from weft.runtime.tensors import Array, TensorSpec
from weft.runtime.timing import clock_for, mean_seconds


def prepare(
    path: Path,
    options: LoadOptions,
    cache: Path | None = None,
    progress: Progress | None = None,
    *,
    learn: bool = True,
    allowance: Allowance | None = None,
) -> CpuModel:
    """Load the model at *path*: from *cache* (a folder) if it is there, else learn it: prepare it and store it there.

    progress: called with messages. learn: False: open the model whole and never run it, unless the cache has it or its
    answers depend on its cuts. allowance: the time limit for runs with generated inputs, instead of ``learn_s``.
    Raises ``ModelError``, and ``NotLearned`` after the time limit.
    """
    on_progress, entry_folder = progress or (lambda _: None), None
    cache = cache if path.is_file() else None  # preparation reports what is wrong with the path
    # The path of the entry is a digest of all files, which takes long: it is not computed to look into an empty cache.
    if cache is not None and (learn or not caching.is_empty(cache)):
        entry_folder = _entry_path(path, options, cache)
        if cached := _load_cached(path, options, entry_folder, on_progress):
            return cached
    if not learn and (whole := open_whole(path, options)):  # None: its answers depend on its cuts, so it is learned
        return whole
    if cache is not None and entry_folder is None:
        entry_folder = _entry_path(path, options, cache)
    with allowance or Allowance(options.learn_s) as allowed:
        try:
            return _start_preparation(path, options, cache, on_progress, allowed).build(entry_folder)
        except OutOfTime as error:
            limit = "" if options.learn_s is None else f" within {options.learn_s:g} s"
            raise NotLearned(
                f"{path}: was not cut and measured{limit}; raise learn_s, or give smaller shapes"
            ) from error


def _load_cached(path: Path, options: LoadOptions, entry_folder: Path, on_progress: Progress) -> CpuModel | None:
    """Load the model from its cache entry; None if there is no entry, or it cannot be used and was removed."""
    blueprint = caching.find(entry_folder)
    if blueprint is None:
        return None
    on_progress("loading it from the cache")
    try:
        return _load_entry(path, options, entry_folder, blueprint)
    except Exception as error:  # a damaged entry says nothing about the model itself
        on_progress(f"its cache entry cannot be used: {first_line(error)}")
        caching.drop(entry_folder)
        return None


def _start_preparation(
    path: Path, options: LoadOptions, cache: Path | None, on_progress: Progress, allowance: Allowance
) -> _Preparation:
    """Create a preparation with its folder; in a temporary folder, with a remark, if the cache cannot be written."""
    try:
        return _Preparation(path, options, caching.new_folder(cache), on_progress, allowance)
    except OSError as error:
        remarks = [f"not cached: {reason_of(error)}"]
        return _Preparation(path, options, caching.new_folder(None), on_progress, allowance, remarks)


def _entry_path(path: Path, options: LoadOptions, cache: Path) -> Path:
    """The path of the model's entry in the cache; hashes the model's files, ``ModelError`` if that fails."""
    try:
        return caching.entry(cache, path, json.dumps(options.model_options(), sort_keys=True))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def _load_entry(path: Path, options: LoadOptions, entry_folder: Path, blueprint: Blueprint) -> CpuModel:
    """Open the sessions of a model from the cache, and run each once."""
    sessions = [
        open_session(entry_folder / segment.file, options.threads, optimise=False)
        if segment.file
        else open_model(path, options.threads)
        for segment in blueprint.segments
    ]
    model = CpuModel(blueprint, sessions)
    model.prepare(rows=1)
    return model


class _Profiled(NamedTuple):
    """Measurements of the nodes of a graph before it is cut."""

    times_s: list[float]
    crossing: list[int | None]  # for each cut, the bytes that cross it (``cutting.crossing_bytes``)
    types: dict[str, int]  # tensor -> its ONNX element type
    inner_bytes: int  # peak memory of the tensors inside the graph, in bytes


@dataclass(slots=True)
class _Preparation:
    """The preparation of one model, in a folder of its own."""

    path: Path
    options: LoadOptions
    folder: Path
    on_progress: Progress
    allowance: Allowance
    remarks: list[str] = field(default_factory=list)
    exits: tuple[str, ...] = ()
    """Exits that the options or the file name; emptied when samples cannot leave there after all."""
    independent: bool = False
    """Whether the options or the file state that rows may be computed together."""

    def build(self, entry_folder: Path | None) -> CpuModel:
        """Build the model, and move the folder to its place in the cache, if any; on errors the folder is removed."""
        try:
            model = self._prepare()
            blueprint = model.blueprint.model_copy(update={"remarks": (*self.remarks, *model.remarks)})
            self._remove_unneeded_files(blueprint)
            stored = entry_folder is not None and caching.store(self.folder, blueprint, entry_folder)
            release_memory()  # of sessions that were only opened to measure
            sessions = [session.session for session in model.sessions]
            return CpuModel(blueprint, sessions, None if stored else self.folder)
        except BaseException as error:
            remove(self.folder)
            if isinstance(error, ModelError):
                raise ModelError(f"{self.path}: {error}") from error
            raise

    def _prepare(self) -> CpuModel:
        """Optimise, check, cut and measure the model; its sessions are still bound to the time limit."""
        self.on_progress("optimising it")
        session, optimised = self._optimise()
        blueprint = whole_blueprint(session, self.path, optimised)
        self.exits = named_exits(self.options, session)
        self.independent = self.options.independent_rows or says_independent(session)
        blueprint = with_tasks(blueprint, session, self.exits)
        known_shapes = {**usual_shapes(blueprint.tasks, blueprint.inputs), **self.options.shapes}
        shapes, missing = warm_shapes(session.get_inputs(), known_shapes)
        whole = CpuModel(blueprint, [self._bound_session(session)])
        del session  # so that the session is freed with *whole*, before the segments are opened
        if missing:
            return self._leave_unmeasured(whole, f"give shapes for the free dimensions of {', '.join(missing)}")
        feed = sample(whole.inputs, shapes, 0, self.options.values)
        try:
            expected = whole.run(feed)
        except Exception as error:  # ONNX Runtime raises several unrelated kinds
            return self._leave_unmeasured(whole, f"it fails on made-up inputs: {first_line(error)}")
        check_answers(self.exits, expected)
        for task in blueprint.tasks:
            check_answers([task.outputs[name] for name in task.exits], expected)
        changes = {
            "warm_shapes": shapes,
            "values": dict(self.options.values),
            "outputs": with_ranks(whole.outputs, expected),
        }
        changes["absent_rows"] = self._absent_rows(whole, feed)
        whole = CpuModel(blueprint.model_copy(update=changes), whole.sessions)
        return self._measure(whole, optimised, feed, expected)

    def _absent_rows(self, whole: CpuModel, feed: dict[str, Array]) -> int:
        """Rows that a batch needs of every task: 0, or 1 if an operator fails without rows, such as Reshape to -1."""
        try:
            for task in whole.blueprint.tasks:
                whole.run(whole.gather([{name: feed[name] for name in task.inputs.values()}]))
        except Exception as error:  # ONNX Runtime raises several unrelated kinds
            self.remarks.append(f"computes a row for each of its models that no request asks for: {first_line(error)}")
            return 1
        return 0

    def _optimise(self) -> tuple[Any, OnnxModel | None]:
        """Open the whole file; the session, and the optimised graph, or None if ONNX Runtime cannot save that."""
        target = self.folder / "optimised.onnx"
        try:
            session = open_model(self.path, self.options.threads, target)
        except ModelError:
            session = open_model(self.path, self.options.threads)
            self.remarks.append("stays whole: its optimised graph cannot be saved")
            return session, None
        return session, normalised(load(target), session)

    def _leave_unmeasured(self, whole: CpuModel, reason: str) -> CpuModel:
        """Keep a model whole because it cannot be run now; ``ModelError`` if the user asked for more than that."""
        if whole.blueprint.tasks:
            raise ModelError(f"is stitched, but its models cannot be run together: {reason}")
        if self.options.max_batch is not None and self.options.max_batch > 1:
            raise ModelError(f"max_batch cannot be checked without a run; {reason}")
        if self.exits:
            self._give_up_exits(f"they cannot be checked without a run; {reason}")
        self.remarks.append(f"stays whole and was not measured: {reason}")
        return whole

    def _give_up_exits(self, reason: str) -> None:
        """Give up the exits: ``ModelError`` if a user named them, else a remark."""
        if self.options.exits:
            raise ModelError(f"cannot be left at its exits {', '.join(self.exits)}: {reason}")
        self.remarks.append(f"cannot be left at the exits its file names: {reason}")
        self.exits = ()

    def _measure(
        self, whole: CpuModel, optimised: OnnxModel | None, feed: dict[str, Array], expected: dict[str, Array]
    ) -> CpuModel:
        """Cut the model by its graph *optimised*, if any, and measure it; *expected*: its outputs for *feed*."""
        model, inner_bytes = None, 0
        if optimised is None and self.exits:
            self._give_up_exits("its optimised graph cannot be saved")
        if optimised is not None:
            model, inner_bytes = self._cut_into_segments(whole, optimised, feed, expected)
        model = model or self._reopen_whole(whole)
        self.on_progress("measuring it")
        shapes = model.blueprint.warm_shapes or {}
        judge = partial(self._judge_rows, optimised, model.blueprint.tasks)
        times = measure(model, shapes, self.options.max_batch, clock_for(self.options.threads), judge)
        changes = {
            "batchable": times.batchable,
            "max_batch": times.max_batch,
            "any_shapes": times.any_shapes,
            "times_s": times.times_s,
            "remarks": times.remarks,
            # The inner tensors were measured with a row of each task.
            "memory_bytes": model.blueprint.memory_bytes
            + inner_bytes * times.max_batch // max(1, len(model.blueprint.tasks)),
        }
        # With exits, ``_cut_at_exits`` has found this out; rounds of a stitched model are not joined at cuts.
        if times.max_batch > 1 and len(model.segments) > 1 and not model.exits and not model.tasks:
            changes |= _blueprint_fields(crossing(model, shapes))
        return CpuModel(model.blueprint.model_copy(update=changes), model.sessions)

    def _judge_rows(self, optimised: OnnxModel | None, tasks: Sequence[TaskSpec], feeds: Sequence[Feed]) -> Verdict:
        """Whether rows are independent, by proof or because the user or the file states it."""
        if self.independent:
            return Verdict(None)
        verdict = Verdict("its optimised graph cannot be saved, so that nothing shows that rows are kept apart")
        if optimised is not None:
            verdict = judge_rows(optimised, feeds, Tracer(self.folder, self.options.threads, self.allowance), tasks)
        hint = f'; set rows = "{INDEPENDENT}" to batch it all the same'
        return verdict._replace(mixing=verdict.mixing and verdict.mixing + hint)

    def _cut_into_segments(
        self, whole: CpuModel, optimised: OnnxModel, feed: dict[str, Array], expected: dict[str, Array]
    ) -> tuple[CpuModel | None, int]:
        """The model in segments, or None if it stays whole; and the peak bytes of its inner tensors.

        *feed*, *expected*: random inputs, and the outputs of the whole model for them.
        """
        self.on_progress("profiling it")
        try:
            clock, tasks = clock_for(self.options.threads), max(1, len(whole.blueprint.tasks))
            whole_s = min(mean_seconds(partial(whole.run, feed), clock) for _ in range(3)) / tasks  # for one row
            reason = cutting.whole_because(optimised.graph)
            is_long = cutting.worth_cutting(whole_s, self.options.grain_s)
            if reason and self.exits:
                self._give_up_exits(f"it {reason}")
            if reason and is_long:
                self.remarks.append(f"stays whole: it {reason}")
            elif is_long or self.exits:
                whole.sessions = ()  # free the session, which may be large; ``_reopen_whole`` is rarely needed
            cut_model = self._cut_at_exits(whole, optimised, whole_s, feed, expected) if self.exits else None
            return cut_model or self._cut_by_time(whole, optimised, whole_s, feed, expected)
        except ModelError:
            raise
        except Exception as error:  # the whole model works, so failing segments are no error
            if self.exits:
                self._give_up_exits(f"its segments fail: {first_line(error)}")
            self.remarks.append(f"stays whole: its segments fail: {first_line(error)}")
            return None, 0

    def _cut_by_time(
        self, whole: CpuModel, model: OnnxModel, whole_s: float, feed: dict[str, Array], expected: dict[str, Array]
    ) -> tuple[CpuModel | None, int]:
        """Cut the model into segments of about the grain; returns as ``_cut_into_segments``.

        *model*: its optimised graph. *whole_s*: measured seconds of a run of it in one piece.
        """
        nodes = self._profile(model, whole_s, feed)
        cuts: tuple[int, ...] = ()
        if cutting.whole_because(model.graph) is None:
            cuts = cutting.choose_cuts(nodes.times_s, nodes.crossing, self.options.grain_s, self.options.max_pieces)
        if not cuts:
            return None, nodes.inner_bytes
        segmented = self._open_segments(whole.blueprint, cutting.split(model, cuts, nodes.types))
        if not _identical(segmented.run(feed), expected):
            self.remarks.append("stays whole: its segments do not give the same bits")
            return None, nodes.inner_bytes
        return segmented, nodes.inner_bytes

    def _cut_at_exits(
        self, whole: CpuModel, optimised: OnnxModel, whole_s: float, feed: dict[str, Array], expected: dict[str, Array]
    ) -> tuple[CpuModel, int] | None:
        """The model cut at its exits, and elsewhere if batches can be joined at all cuts; and its inner bytes.

        Parameters are those of ``_cut_by_time``. None if samples cannot leave at the exits, which are given up then.
        """
        model, options = copied(optimised), self.options
        exit_cuts = cutting.arrange(model.graph, self.exits)
        nodes = self._profile(model, whole_s, feed)
        if any(nodes.crossing[cut] is None for cut in exit_cuts):
            self._give_up_exits("a tensor that crosses one is of a type that numpy does not have")
            return None
        cuts = cutting.choose_cuts(nodes.times_s, nodes.crossing, options.grain_s, options.max_pieces, exit_cuts)
        reason = None
        # Try all cuts first; if batches cannot be joined at the additional cuts, then only the cuts at exits.
        for chosen in dict.fromkeys((cuts, exit_cuts)):
            blueprint = self._add_exits(whole.blueprint, chosen, exit_cuts)
            segmented = self._open_segments(blueprint, cutting.split(model, chosen, nodes.types))
            if not _identical(segmented.run_to_exits(feed), {name: expected[name] for name in self.exits}):
                reason = "its segments do not give the same bits"
                break
            checked = crossing(segmented, blueprint.warm_shapes or {})
            if checked.reason is None:
                blueprint = segmented.blueprint.model_copy(update=_blueprint_fields(checked))
                return CpuModel(blueprint, segmented.sessions), nodes.inner_bytes
            reason = checked.reason
        self._give_up_exits(reason or "")
        return None

    def _add_exits(self, blueprint: Blueprint, cuts: Sequence[int], exit_cuts: Sequence[int]) -> Blueprint:
        """The blueprint with exits at the *exit_cuts*, which are among *cuts*; only the last exit remains an output."""
        exit_segments = [*(cuts.index(cut) for cut in exit_cuts), len(cuts)]
        exits = [ExitSpec(output=name, segment=end) for name, end in zip(self.exits, exit_segments, strict=True)]
        outputs = tuple(spec for spec in blueprint.outputs if spec.name == self.exits[-1])
        changes = {"outputs": outputs, "exits": tuple(exits), "confidence": self.options.confidence}
        return blueprint.model_copy(update=changes)

    def _profile(self, model: OnnxModel, whole_s: float, feed: dict[str, Array]) -> _Profiled:
        """Measure the nodes of a graph in runs on *feed*; their times are scaled to add up to *whole_s* at most."""
        nodes = profile(model, self.folder, self.options.threads, feed, self.allowance)
        scale = min(whole_s / max(sum(nodes.times_s), 1e-9), 1.0)  # the profiler takes time at every node
        return _Profiled(
            times_s=[time_s * scale for time_s in nodes.times_s],
            crossing=cutting.crossing_bytes(model.graph, nodes.tensors),
            types={name: tensor.element_type for name, tensor in nodes.tensors.items()},
            inner_bytes=cutting.scratch_bytes(model.graph, nodes.tensors),
        )

    def _reopen_whole(self, whole: CpuModel) -> CpuModel:
        """The model in one piece, opened again if its session was freed."""
        if whole.sessions:
            return whole
        return CpuModel(whole.blueprint, [self._bound_session(open_model(self.path, self.options.threads))])

    def _open_segments(self, blueprint: Blueprint, pieces: Sequence[cutting.ModelPiece]) -> CpuModel:
        """Write the pieces of the model to files in the folder, and open them."""
        self.on_progress(f"loading its {len(pieces)} segments")
        segments, sessions = [], []
        for index, piece in enumerate(pieces):
            file = f"segment{index}.onnx"
            save(piece.model, self.folder / file)
            session = open_session(self.folder / file, self.options.threads, optimise=False)
            sessions.append(self._bound_session(session))
            segment = SegmentSpec(
                name=piece.name, inputs=piece.inputs, outputs=piece.outputs, file=file, steady=piece.steady
            )
            segments.append(segment)
        return CpuModel(blueprint.model_copy(update={"segments": tuple(segments)}), sessions)

    def _bound_session(self, session: Any) -> BoundedSession:
        """A session whose runs end with the time limit."""
        return BoundedSession(session, self.allowance)

    def _remove_unneeded_files(self, blueprint: Blueprint) -> None:
        """Remove the files of the folder that the segments do not need."""
        kept = {segment.file for segment in blueprint.segments if segment.file}
        kept |= {WEIGHTS} if kept else set()
        kept.add(LOCK)
        for path in self.folder.iterdir():
            if path.name not in kept:
                path.unlink()


def normalised(model: OnnxModel, session: Any) -> OnnxModel:
    """Prepare an optimised graph for cutting, in place: no unneeded or unnamed nodes, and no weights among inputs."""
    input_names = {value.name for value in session.get_inputs()}
    fill(model.graph.input, [value for value in model.graph.input if value.name in input_names])
    if cutting.whole_because(model.graph) is None:  # pruning does not see what the branches of control flow capture
        prune(model.graph)
    model.ir_version = max(model.ir_version, 4)  # in earlier versions, weights had to be inputs
    for position, node in enumerate(model.graph.node):
        node.name = node.name or f"{node.op_type}_{position}"
    return model


def check_answers(exits: Sequence[str], answers: Mapping[str, Array]) -> None:
    """Raise ``ModelError`` unless the answers of all *exits* are class scores of one shape and type."""
    for name in reversed(exits):
        answer, end = answers[name], answers[exits[-1]]
        if answer.ndim != 2 or answer.shape[1] < 2 or answer.dtype.kind != "f":
            raise ModelError(
                f"exit {name!r} gives {answer.dtype} of shape {answer.shape}; it must give a score for each of two or "
                "more classes, samples by classes"
            )
        if (answer.shape, answer.dtype) != (end.shape, end.dtype):
            raise ModelError(
                f"exit {name!r} gives {answer.dtype} of shape {answer.shape}, the end {exits[-1]!r} {end.dtype} of "
                f"shape {end.shape}; all exits must give the same"
            )


def _blueprint_fields(crossing_: Crossing) -> dict[str, Any]:
    """The fields of a blueprint that say how batches can be joined at cuts."""
    return {"mergeable": crossing_.reason is None, "rowless": crossing_.rowless}


def with_ranks(outputs: Sequence[TensorSpec], answers: Mapping[str, Array]) -> tuple[TensorSpec, ...]:
    """Give outputs without declared dimensions as many free dimensions as their *answers* have."""
    return tuple(spec if spec.shape else spec._replace(shape=(-1,) * answers[spec.name].ndim) for spec in outputs)


def _identical(got: Mapping[str, Array], expected: Mapping[str, Array]) -> bool:
    """Whether the *expected* outputs occur in *got*, equal bit for bit (a NaN equals itself); texts: equal."""
    return all(
        values.shape == got[name].shape and values.tobytes() == got[name].tobytes()
        if values.dtype != np.object_
        else np.array_equal(values, got[name])
        for name, values in expected.items()
    )
