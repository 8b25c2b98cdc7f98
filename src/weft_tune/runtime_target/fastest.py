"""From options to the fastest variant of a model and its files: ``weft tune --target onnxruntime``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path

import onnx

from weft.base.errors import TuneError
from weft.base.files import make_folder, replacing
from weft.base.jsonfile import write_json
from weft.runtime.tensors import Array
from weft_tune.export import MOST_BYTES_IN_FILE
from weft_tune.options import TuneOptions
from weft_tune.quantised.data import LabelledData, read_data, read_samples
from weft_tune.quantised.opened import Opened, open_for_tuning
from weft_tune.quantised.targets import select
from weft_tune.runtime_target.bench import BuiltVariant, RuntimeBench
from weft_tune.runtime_target.choice import FLOAT32, FastestVariant, Told, choose
from weft_tune.runtime_target.processor import described
from weft_tune.runtime_target.result import LayerSpeed, RuntimeTuning
from weft_tune.runtime_target.scoring import make_scorer, needs_no_labels
from weft_tune.subject import check_source_stays, labelled_samples, model_file, tuned_file

RESULT = "tuning.json"
"""What is found, in the folder of the results."""
OF_SMALLEST = (
    "network", "groups", "platform", "objective", "layerwise", "device", "small", "bias_rule", "faithful", "workers",
    "baselines", "command", "small_command", "score", "timeout_s", "on_failure", "export", "database", "fresh",
)  # fmt: skip
"""Options of the search for the smallest formats."""

Samples = LabelledData | Mapping[str, Array]


def find_fastest(options: TuneOptions, told: Told) -> RuntimeTuning:
    """Search, measure and write as *options* say."""
    _check(options)
    told("reading", "")
    began_s = time.perf_counter()
    path = model_file(str(options.model))
    if path is None:
        raise TuneError(f"{options.model} only describes a network; target = {options.target} needs an .onnx model")
    check_source_stays(options.folder, path)
    opened = _opened(path, options.scored_output)
    wanted = [layer.name for layer in select(opened.layers, options.layers)]
    samples = _samples(options, opened)
    told("calibrating", "")
    bench = RuntimeBench(opened, wanted, samples, options.measure)
    base, margin = _base(bench), 0.01 if options.margin is None else options.margin
    found = choose(bench, base * (1 - margin), told)
    was = onnx.load(str(path))
    model = was if found.variant.written is None else found.variant.written.model
    result = RuntimeTuning(
        network=path.stem, target=str(options.target), processor=described(), rows=bench.rows, metric=options.measure,
        margin=margin, base=base, threshold=base * (1 - margin), score=found.score, kind=found.kind,
        way=str(found.way or ""), before=found.before, after=found.after, layers=_layers(bench, found),
        tried=found.tried, bytes_before=was.ByteSize(), bytes_after=model.ByteSize(),
        seconds=time.perf_counter() - began_s,
    )  # fmt: skip
    return _written(options, path, model, _tested(options, bench, found.variant, result), told)


def _check(options: TuneOptions) -> None:
    """Refuse what belongs to the search for the smallest formats."""
    for each in fields(options):
        usual = each.default_factory() if each.default_factory is not MISSING else each.default
        value = getattr(options, each.name)
        if each.name in OF_SMALLEST and value != usual:
            raise TuneError(
                f"{each.name} = {value}: is of the search for the smallest formats, and target = {options.target} "
                "measures which are fastest; leave one of them out"
            )


def _opened(path: Path, output: str | None) -> Opened:
    opened = open_for_tuning(path, output)
    known = {spec.name for spec in opened.inputs}
    stored = onnx.load(str(path), load_external_data=False).graph
    constant = {each.name for each in stored.initializer}
    for each in stored.input:
        if each.name not in known | constant:
            raise TuneError(
                f"{path}: input {each.name!r} is not needed for the scored output {opened.output!r}, so nothing says "
                "what to measure with; take it out of the model"
            )
    return opened


def _samples(options: TuneOptions, opened: Opened) -> Samples:
    if not needs_no_labels(options.measure):
        return labelled_samples(options, opened)
    if options.data is not None:
        return read_samples(options.data, opened.inputs, options.scale)
    return labelled_samples(options, opened).inputs


def _base(bench: RuntimeBench) -> float:
    base = bench.score(bench.original)
    if base == 0:
        raise TuneError("the model scores 0 as it is; check the labels, the scale of the inputs and what is scored")
    return base


def _layers(bench: RuntimeBench, found: FastestVariant) -> tuple[LayerSpeed, ...]:
    """All layers that might have changed, in the order of the graph; those that could not at the end."""
    told = [
        LayerSpeed(
            name,
            FLOAT32 if name in found.left_out else found.kind,
            found.times_before.get(name),
            found.times_int8.get(name),
            found.times_after.get(name),
            found.left_out.get(name, ""),
        )
        for name in bench.layers
    ]
    others = [LayerSpeed(name, FLOAT32, None, None, None, why) for name, why in bench.prepared.others.items()]
    return (*told, *others)


def _tested(options: TuneOptions, bench: RuntimeBench, variant: BuiltVariant, result: RuntimeTuning) -> RuntimeTuning:
    """The score on samples that chose nothing, if there are some."""
    if options.test is None:
        return result
    opened = bench.scorer.opened
    read = read_samples if needs_no_labels(options.measure) else read_data
    data: Samples = read(options.test, opened.inputs, options.scale)
    scorer = make_scorer(opened, data, options.measure, bench.original.session, bench.scorer.batch)
    return replace(result, test_base=scorer.score(bench.original.session), test_score=scorer.score(variant.session))


def _written(
    options: TuneOptions, path: Path, model: onnx.ModelProto, result: RuntimeTuning, told: Told
) -> RuntimeTuning:
    """The model and the result in the folder, if there is one."""
    if options.folder is None:
        return result
    told("writing", "")
    make_folder(options.folder)
    files = {"model": options.folder / tuned_file(path), "result": options.folder / RESULT}
    _write_model(files["model"], model)
    result = replace(result, files=files)
    write_json(files["result"], result.as_dict())
    return result


def _write_model(path: Path, model: onnx.ModelProto) -> None:
    outside = model.ByteSize() > MOST_BYTES_IN_FILE
    with replacing(path, TuneError) as beside:
        onnx.save_model(model, str(beside), save_as_external_data=outside, location=f"{path.name}.data")
