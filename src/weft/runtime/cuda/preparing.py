"""Loading a model for a device: convert and optimise it as a whole, cut it, and capture and measure its segments.

``prepare_on`` is all there is to call. What a file means (its exits, which rows may be computed together, its outputs)
is found on the CPU, as for any model; ONNX Runtime then optimises it for the device. What cannot run there runs on the
CPU, with a remark.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto

from weft.errors import ModelError, NotLearned
from weft.runtime import cutting
from weft.runtime.backend import LoadedModel, LoadOptions
from weft.runtime.cuda import node_costs
from weft.runtime.cuda.attention import with_attention
from weft.runtime.cuda.device import FLOATS, Device, lacks_memory
from weft.runtime.cuda.model import DeviceModel, ModelOnHost, ladder
from weft.runtime.cuda.pieces import NHWC, OpenPieces, batch_of, open_pieces
from weft.runtime.cuda.precision import FP32, converted, difference, is_half, remark
from weft.runtime.cuda.round_graphs import RoundGraphs, weights_outside
from weft.runtime.cuda.rounds import busiest, file_at, round_times, rung_sizes, segments_at
from weft.runtime.cuda.rung import Rung
from weft.runtime.cuda.segments import COPIES, copies_in, mark_copies, open_on
from weft.runtime.exits import ExitSpec
from weft.runtime.onnxruntime_cpu import cache as caching
from weft.runtime.onnxruntime_cpu.allowance import Allowance, OutOfTime
from weft.runtime.onnxruntime_cpu.measuring import LEAST_GAIN, close_enough, unbatchable
from weft.runtime.onnxruntime_cpu.model import Blueprint, SegmentSpec
from weft.runtime.onnxruntime_cpu.node_times import Tracer, seen_tensors
from weft.runtime.onnxruntime_cpu.preparing import check_answers, prepare, ranked, readied
from weft.runtime.onnxruntime_cpu.samples import sample, warm_shapes
from weft.runtime.onnxruntime_cpu.sessions import WEIGHTS, first_line, open_model
from weft.runtime.onnxruntime_cpu.whole import named_exits, says_independent, whole_blueprint, with_tasks
from weft.runtime.own_folder import LOCK, remove
from weft.runtime.rows import Verdict, judged
from weft.runtime.tensors import Array
from weft.runtime.values import Follower, inputs_of

LARGEST_UNASKED = 32
"""The largest batch that is tried where none is asked for."""
GRAINS_AT_MOST = 4
"""A segment takes at most a grain alone, and so many at the largest batch."""
HOST_GRAIN_S = 0.005
"""How long segments are of what runs on the CPU after all."""


class _Unfit(Exception):
    """A model cannot run on a device; says why."""


def prepare_on(
    device: Device, path: Path, options: LoadOptions, cache: Path | None = None, *, learn: bool = True
) -> LoadedModel:
    """Load the model at *path*; with *cache*, a folder, the work is done once.

    learn: False: only what is in the cache; ``NotLearned`` where it is not.
    """
    place = _place(device, path, options, cache) if cache is not None and path.is_file() else None
    if place is not None and (blueprint := caching.find(place)) is not None:
        return _reopened(device, path, options, cache, place, blueprint)
    if not learn:
        raise NotLearned(f"{path}: is cut and captured before it is served")
    with Allowance(options.learn_s) as allowance:
        try:
            return _learned(device, path, options, cache, place, allowance)
        except OutOfTime as error:
            raise NotLearned(f"{path}: was not cut and captured within {options.learn_s:g} s; raise learn_s") from error


def _place(device: Device, path: Path, options: LoadOptions, cache: Path) -> Path:
    made_with = dataclasses.asdict(options)
    for name in ("learn_s", "isolation", "rests"):  # where and how long do not change what it is
        del made_with[name]
    try:
        return caching.entry(cache, path, json.dumps([device.name, made_with], sort_keys=True))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error


def _reopened(
    device: Device, path: Path, options: LoadOptions, cache: Path | None, place: Path, blueprint: Blueprint
) -> LoadedModel:
    if blueprint.segments[0].file is None:
        return ModelOnHost(prepare(path, _for_host(options), cache, learn=False), blueprint.remarks[-1])
    return opened(device, blueprint, place)


def _for_host(options: LoadOptions) -> LoadOptions:
    return dataclasses.replace(options, grain_s=max(options.grain_s, HOST_GRAIN_S), precision=FP32)


def _learned(
    device: Device, path: Path, options: LoadOptions, cache: Path | None, place: Path | None, allowance: Allowance
) -> LoadedModel:
    folder = caching.new_folder(cache)
    workshop = _DeviceWorkshop(device, path, options, folder, allowance)
    try:
        with device.on():
            model = workshop.built()
        workshop.clear(model.blueprint)
        if place is not None:
            caching.store(folder, model.blueprint, place)
        return model
    except _Unfit as reason:
        return _on_host(path, options, cache, place, str(reason))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    finally:
        if place is None or folder.exists():
            remove(folder)


def _on_host(path: Path, options: LoadOptions, cache: Path | None, place: Path | None, reason: str) -> LoadedModel:
    """The model on the CPU; that it runs there is kept in its place."""
    found = ModelOnHost(prepare(path, _for_host(options), cache), reason)
    if place is not None:
        whole = SegmentSpec(name="whole", inputs=(), outputs=())
        told = Blueprint(inputs=(), outputs=(), segments=(whole,), warm_shapes=None, remarks=(reason,))
        folder = caching.new_folder(cache)
        if not caching.store(folder, told, place):
            remove(folder)
    return found


def opened(device: Device, blueprint: Blueprint, folder: Path) -> DeviceModel:
    """A model that was prepared: its sessions, its weights, and every batch size captured."""
    with device.on():
        free = device.memory()[0]
        pieces = open_pieces(device, folder, blueprint)
        rungs = [pieces.rung(rows) for rows in rung_sizes(blueprint)]
        device.finish()
        used = max(pieces.weights.bytes, free - device.memory()[0])
    return pieces.model(rungs, memory_bytes=used)


@dataclass(slots=True)
class _DeviceWorkshop:
    """One model while it is being prepared, in a folder of its own."""

    device: Device
    path: Path
    options: LoadOptions
    folder: Path
    allowance: Allowance
    remarks: list[str] = field(default_factory=list)
    exits: tuple[str, ...] = ()
    half: bool = False
    """Whether it computes with 16 bits."""
    rounds: RoundGraphs | None = None
    """Of a stitched model, its graph for any number of rows of each task."""

    @property
    def _host_folder(self) -> Path:
        """Where the graph for the CPU lies: the weights beside it have another form than those for the device."""
        folder = self.folder / "host"
        folder.mkdir(exist_ok=True)
        return folder

    def built(self) -> DeviceModel:
        free = self.device.memory()[0]
        blueprint, wanted, host = self._meaning()
        graph = self._optimised()
        forced = cutting.arrange(graph.graph, self.exits) if self.exits else ()
        if blueprint.tasks:
            graph, tensors = self._in_rounds(graph, blueprint)
        else:
            tensors = self._seen(graph, blueprint)
        verdict = self._verdict(blueprint, host)
        whole, sizes = self._climbed(blueprint, graph, tensors, verdict)
        blueprint = self._cut(whole, graph, tensors, forced, sizes)
        model = self._measured(blueprint)
        self._compare(model, wanted)
        used = max(0, free - self.device.memory()[0])
        changes = {"memory_bytes": used, "remarks": (*self.remarks, *self._uncaptured(model))}
        model.blueprint = model.blueprint.model_copy(update=changes)
        model.memory_bytes, model.remarks = used, model.blueprint.remarks
        return model

    # What the file means

    def _meaning(self) -> tuple[Blueprint, dict[str, Array], ModelProto]:
        """The model in one piece, what it gives on the CPU, and its graph as it is there."""
        target = self._host_folder / "host.onnx"
        session = open_model(self.path, max(4, self.options.threads), target, thrifty=False)
        host = readied(onnx.load(str(target), load_external_data=False), session)
        _check_fit(session, host)
        self.exits = named_exits(self.options, session)
        blueprint = with_tasks(whole_blueprint(session, self.path, host), session, self.exits)
        shapes, missing = warm_shapes(session.get_inputs(), self.options.shapes)
        if missing:
            raise _Unfit(f"give shapes for the free dimensions of {', '.join(missing)}")
        feed = sample(blueprint.inputs, shapes, 0, self.options.values)
        try:
            names = [spec.name for spec in blueprint.outputs]
            wanted = dict(zip(names, self.allowance.run(session, names, feed), strict=True))
        except OutOfTime:
            raise
        except Exception as error:  # ONNX Runtime raises several unrelated kinds
            raise _Unfit(f"it fails on made-up inputs: {first_line(error)}") from error
        check_answers(self.exits, wanted)
        if not self.options.independent_rows and says_independent(session):
            self.options = dataclasses.replace(self.options, independent_rows=True)
        changes = {
            "warm_shapes": shapes,
            "values": dict(self.options.values),
            "outputs": ranked(blueprint.outputs, wanted),
        }
        return blueprint.model_copy(update=changes), wanted, host

    def _verdict(self, blueprint: Blueprint, host: ModelProto) -> Verdict:
        """Whether rows may be computed together."""
        reason, tasks = unbatchable(blueprint, blueprint.warm_shapes or {}), blueprint.tasks
        alone = self.options.max_batch == 1 and not tasks  # a round has rows of all tasks
        if reason is not None or self.options.independent_rows or alone:
            return Verdict(reason)
        tracer = Tracer(self._host_folder, max(4, self.options.threads), self.allowance)
        found = judged(host, [batch_of(blueprint, rows) for rows in (2, 3)], tracer, tasks)
        if found.mixing is None and found.by_size:
            found = judged(host, [batch_of(blueprint, rows) for rows in (4, 5, 7)], tracer, tasks)
            found = found._replace(by_size=True)
        return found

    # On the device

    def _optimised(self) -> ModelProto:
        """The graph as ONNX Runtime optimises it for the device, without what copies between that and the host."""
        target = self.folder / "optimised.onnx"
        try:
            session = self._opened_whole(with_attention(self.path, self.folder), target)
        except Exception as error:  # the C++ side raises a dozen unrelated kinds
            if lacks_memory(error):
                raise
            raise _Unfit(f"it cannot be opened there: {first_line(error)}") from error
        graph = readied(_without_copies(onnx.load(str(target), load_external_data=False)), session)
        if self.exits and (reason := cutting.whole_because(graph.graph)):
            raise _Unfit(f"it cannot be cut at its exits, for it {reason}")
        return graph

    def _opened_whole(self, path: Path, target: Path) -> Any:
        """A session over the whole model in its precision, optimised; the graph of that goes to *target*."""
        try:
            source = converted(path, self.options.precision, self.folder)
            self.half = is_half(onnx.load(str(source), load_external_data=False))
            return open_on(self.device, source, optimise=True, channels_last=self.half, save=target)
        except Exception:
            if path == self.path:
                raise
            return self._opened_whole(self.path, target)  # without what we made of it

    def _seen(self, graph: ModelProto, blueprint: Blueprint) -> dict[str, cutting.SeenTensor]:
        last = any(node.domain == NHWC for node in graph.graph.node)

        def profiled(path: Path, trace: Path) -> Any:
            return open_on(self.device, path, optimise=False, channels_last=last, profile=trace)

        try:
            return seen_tensors(graph, self.folder, batch_of(blueprint, 1), profiled)
        except Exception as error:  # ONNX Runtime raises several unrelated kinds
            if lacks_memory(error):
                raise
            raise _Unfit(f"it fails there: {first_line(error)}") from error

    def _in_rounds(self, graph: ModelProto, blueprint: Blueprint) -> tuple[ModelProto, dict[str, cutting.SeenTensor]]:
        """A stitched graph for one row of each task, and the tensors in it."""
        weights_outside(graph, self.folder)
        self.rounds = RoundGraphs(graph, partial(self._run_rows, blueprint))
        tensors = self._seen(self.rounds.at(1), blueprint)
        tensors |= self.rounds.even(tensors)
        return self.rounds.at(1), tensors

    def _run_rows(self, blueprint: Blueprint, model: ModelProto, rows: int) -> Sequence[Array]:
        path, feed = self.folder / "rows.onnx", batch_of(blueprint, rows)
        onnx.save(model, path)
        try:
            session = open_on(self.device, path, channels_last=self.half)
            found: Sequence[Array] = session.run(None, {each.name: feed[each.name] for each in model.graph.input})
        except Exception as error:  # ONNX Runtime raises several unrelated kinds
            raise _Unfit(f"what follows from its rows cannot be worked out: {first_line(error)}") from error
        return found

    def _climbed(
        self, blueprint: Blueprint, graph: ModelProto, tensors: dict[str, cutting.SeenTensor], verdict: Verdict
    ) -> tuple[Blueprint, dict[int, float]]:
        """The model in one piece, how far it is batched, and seconds by batch size."""
        asked, tasks = self.options.max_batch, len(blueprint.tasks)
        if verdict.mixing is not None:
            if tasks:
                raise _Unfit(f"its models cannot be run together: {verdict.mixing}")
            if asked is not None and asked > 1:
                raise ModelError(f"max_batch is {asked}, but the model cannot be batched: {verdict.mixing}")
            if asked is None:
                self.remarks.append(f"not batched: {verdict.mixing}")
        batched = verdict.mixing is None
        most = (asked or max(tasks, LARGEST_UNASKED)) if batched else 1
        largest = busiest(most, tasks) if tasks else most
        changes: dict[str, Any] = {"batchable": batched, "round_rows": largest if tasks else 0}
        blueprint = self._in_pieces(blueprint.model_copy(update=changes), graph, tensors, ())
        sizes, reason = self._tried(blueprint, ladder(largest), as_it_pays=asked is None or tasks > 0)
        if tasks:
            changes = {"max_batch": asked or min(most, tasks * max(sizes)), "round_rows": max(sizes)}
        elif asked is not None and max(sizes) < asked and batched:
            raise ModelError(f"max_batch is {asked}, but the model cannot be batched so far: {reason}")
        else:
            changes = {"max_batch": max(sizes)}
        if reason is not None:
            what = "rounds of each model's rows" if tasks else "batched"
            self.remarks.append(f"{what} up to {max(sizes)}: {reason}")
        changes["any_shapes"] = batched and not verdict.by_size
        return blueprint.model_copy(update=changes), sizes

    def _tried(
        self, blueprint: Blueprint, tried: Sequence[int], *, as_it_pays: bool
    ) -> tuple[dict[int, float], str | None]:
        """Seconds of a model in one piece by batch size, as far as that goes, and why no further."""
        pieces = self._opened(blueprint)
        sizes: dict[int, float] = {}
        rows_alone: list[dict[str, Array]] = []
        for rows in tried:
            self.allowance.check()
            rung = pieces.rung(rows)
            if (reason := self._differs(blueprint, rung, rows_alone)) is not None:
                return sizes, reason
            took_s = rung.timed(0)
            if as_it_pays and sizes and took_s / rows > (1 - LEAST_GAIN) * sizes[max(sizes)] / max(sizes):
                return sizes, f"batch {rows} gains less than {LEAST_GAIN:.0%}"
            sizes[rows] = took_s
        return sizes, None

    def _differs(self, blueprint: Blueprint, rung: Rung, alone: list[dict[str, Array]]) -> str | None:
        """Why the rows of a batch are not those of its samples; None where they are. The first one asked is alone."""
        if not blueprint.batchable:
            return None
        if not alone:
            for seed in (0, 1):
                feed = sample(blueprint.inputs, blueprint.warm_shapes or {}, seed, blueprint.values)
                alone.append(self._outputs(blueprint, rung, feed))
            return None
        found = self._outputs(blueprint, rung, batch_of(blueprint, rung.rows))
        for name, got in found.items():
            kind = np.float16 if self.half and got.dtype.kind == "f" else got.dtype
            wanted = np.concatenate([alone[row % 2][name] for row in range(rung.rows)])
            if not close_enough(wanted.astype(kind), got.astype(kind)):
                return f"output {name!r} of batch {rung.rows} is not that of its samples"
        return None

    def _outputs(self, blueprint: Blueprint, rung: Rung, feed: dict[str, Array]) -> dict[str, Array]:
        """What a model in one piece gives."""
        device = self.device
        for name, array in feed.items():
            device.copy(rung.tensors[name], device.copy_in([array]))
        rung.run(0)
        found = {spec.name: device.copy_out(rung.tensors[spec.name]) for spec in blueprint.outputs}
        device.finish()
        return found

    def _cut(
        self,
        whole: Blueprint,
        graph: ModelProto,
        tensors: dict[str, cutting.SeenTensor],
        forced: Sequence[int],
        sizes: dict[int, float],
    ) -> Blueprint:
        """The model in segments, by guesses at first and then by what those segments take."""
        grain_s, body = self.options.grain_s, graph.graph
        computed = _computed_on(graph)
        fit = {name: each for name, each in tensors.items() if each.element_type in FLOATS and name in computed}
        crossing = cutting.crossing_bytes(body, fit)
        if any(crossing[cut] is None for cut in forced):
            raise _Unfit("a tensor that crosses an exit is none of floating-point numbers")
        weight_s = _weight_s(whole, sizes[1], sizes[max(sizes)])
        if cutting.whole_because(body) or not (forced or cutting.worth_cutting(weight_s, grain_s)):
            return whole
        guesses = node_costs.scaled(node_costs.guessed_s(body, tensors), (), [weight_s])
        cuts = cutting.choose_cuts(guesses, crossing, grain_s, self.options.max_pieces, forced)
        if whole.tasks and not cuts:
            self.remarks.append("stays whole: something else than floating-point numbers crosses every cut")
        blueprint = self._in_pieces(whole, graph, tensors, cuts)
        took = self._weights_s(blueprint)
        if cuts and max(took) > grain_s:
            again = node_costs.scaled(guesses, cuts, took)
            cuts = cutting.choose_cuts(again, crossing, grain_s, self.options.max_pieces, forced)
            blueprint = self._in_pieces(whole, graph, tensors, cuts)
        return self._with_exits(blueprint, cuts, forced) if self.exits else blueprint

    def _weights_s(self, blueprint: Blueprint) -> list[float]:
        """What each segment takes, in the terms of a grain."""
        pieces, most = self._opened(blueprint), rung_sizes(blueprint)[-1]
        found = {rows: pieces.rung(rows) for rows in {1, most}}
        count = range(len(blueprint.segments))
        return [_weight_s(blueprint, found[1].timed(at), found[most].timed(at)) for at in count]

    def _with_exits(self, blueprint: Blueprint, cuts: Sequence[int], forced: Sequence[int]) -> Blueprint:
        ends = [*(cuts.index(cut) for cut in forced), len(cuts)]
        exits = [ExitSpec(output=name, segment=end) for name, end in zip(self.exits, ends, strict=True)]
        outputs = tuple(spec for spec in blueprint.outputs if spec.name == self.exits[-1])
        changes = {"outputs": outputs, "exits": tuple(exits), "confidence": self.options.confidence}
        return blueprint.model_copy(update=changes)

    def _in_pieces(
        self, blueprint: Blueprint, graph: ModelProto, tensors: dict[str, cutting.SeenTensor], cuts: Sequence[int]
    ) -> Blueprint:
        """The model cut so, its pieces in files."""
        types = {name: each.element_type for name, each in tensors.items()}
        segments = self._written(graph, cuts, types)
        if self.rounds is not None:
            for rows in rung_sizes(blueprint)[1:]:
                self._written(self.rounds.at(rows), cuts, types, rows)
        return blueprint.model_copy(update={"segments": segments})

    def _written(
        self, graph: ModelProto, cuts: Sequence[int], types: dict[str, int], rows: int = 1
    ) -> tuple[SegmentSpec, ...]:
        """Files of the pieces; of a stitched model for so many rows of each task."""
        segments = []
        for at, piece in enumerate(cutting.split(graph, cuts, types)):
            file = file_at(f"segment{at}of{len(cuts) + 1}.onnx", rows)
            onnx.save(piece.model, self.folder / file)
            host = self.rounds is None  # rounds have nothing left that is worked out there
            if host and copies_in(self.device, self.folder / file, channels_last=self.half):
                mark_copies(piece.model)
                onnx.save(piece.model, self.folder / file)
            segments.append(
                SegmentSpec(name=piece.name, inputs=piece.inputs, outputs=piece.outputs, file=file, steady=piece.steady)
            )
        return tuple(segments)

    def _opened(self, blueprint: Blueprint) -> OpenPieces:
        return open_pieces(self.device, self.folder, blueprint)

    def _measured(self, blueprint: Blueprint) -> DeviceModel:
        """The model as it will be served, with the times of every batch size."""
        pieces, sizes, tasks = self._opened(blueprint), rung_sizes(blueprint), len(blueprint.tasks)
        rungs = [pieces.rung(rows) for rows in sizes]
        found = {each.rows: tuple(each.timed(at) for at in range(len(blueprint.segments))) for each in rungs}
        if tasks:  # what crosses its cuts has rows of several tasks, and it never meets other shapes
            return pieces.model(rungs, times_s=round_times(found, blueprint.max_batch, tasks), mergeable=False)
        times_s = {rows: found[next(size for size in sizes if size >= rows)] for rows in range(1, sizes[-1] + 1)}
        several = len(blueprint.segments) > 1
        mergeable = blueprint.batchable and several and all(each.same_rows() for each in rungs)
        if self.exits and not mergeable:
            raise _Unfit("what crosses its exits is not one row per sample")
        for each in pieces.sessions.values():
            each.open()  # the files are about to be moved
        return pieces.model(rungs, times_s=times_s, mergeable=mergeable)

    def _compare(self, model: DeviceModel, wanted: dict[str, Array]) -> None:
        """Say how far the results are off those of the CPU in float32."""
        feed = batch_of(model.blueprint, 1)
        found = model.run(feed)
        far = difference({name: wanted[name] for name in found}, found)
        if (said := remark(self.options.precision, far)) is not None:
            self.remarks.append(said)

    def _uncaptured(self, model: DeviceModel) -> list[str]:
        found = model.uncaptured()
        if not found:
            return []
        why = next(iter(found.values()))
        return [f"{len(found)} of its {len(model.segments)} segments cannot be captured and run by calls: {why}"]

    def clear(self, blueprint: Blueprint) -> None:
        """Keep only what the segments need."""
        sizes = rung_sizes(blueprint)
        kept = {LOCK, WEIGHTS, *(each.file for rows in sizes for each in segments_at(blueprint, rows))}
        shutil.rmtree(self._host_folder, ignore_errors=True)
        for path in self.folder.iterdir():
            if path.name not in kept:
                path.unlink()


def _check_fit(session: Any, graph: ModelProto) -> None:
    """Refuse what no device can run."""
    if any(each.type == "tensor(string)" for each in (*session.get_inputs(), *session.get_outputs())):
        raise _Unfit("it takes or gives texts")
    reason = cutting.whole_because(graph.graph)
    if reason is not None and "control flow" in reason:
        raise _Unfit(f"it {reason}")


def _weight_s(blueprint: Blueprint, least_s: float, most_s: float) -> float:
    """What counts as a grain, given the seconds at the smallest and at the largest batch size.

    The smallest round of a stitched model has a row of each task already.
    """
    return max(least_s / max(1, len(blueprint.tasks)), most_s / GRAINS_AT_MOST)


def _without_copies(model: ModelProto) -> ModelProto:
    """The graph without nodes that copy between host and device; sessions put in those that they need."""
    graph = model.graph
    copies = {node.output[0]: node.input[0] for node in graph.node if node.op_type in COPIES}
    outputs = {each.name for each in graph.output}
    kept = [node for node in graph.node if node.output[0] not in copies or node.output[0] in outputs]
    for node in kept:
        for at, name in enumerate(node.input):
            while name in copies and name not in outputs:
                name = copies[name]
            node.input[at] = name
        if node.output[0] in copies:  # an output of the model
            node.op_type = "Identity"
    del graph.node[:]
    graph.node.extend(kept)
    return model


def _computed_on(graph: ModelProto) -> frozenset[str]:
    """Tensors that depend on the values of the inputs; others follow from shapes, and are worked out on the host."""
    facts = inputs_of(graph.graph)
    Follower(graph.functions).through(graph.graph.node, facts)
    return frozenset(name for name, fact in facts.items() if fact.valued)
