"""``weft tune --target onnxruntime``: from options to the fastest variant of a model, measurements and files."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from weft.base.errors import TuneError
from weft.base.files import make_folder
from weft.base.jsonfile import write_json
from weft.base.version import __version__
from weft.models.onnx_graph import OnnxModel, load, write_model
from weft.runtime.tensors import Array
from weft.runtime.timing import Turns
from weft_tune.options import TuneOptions
from weft_tune.quantised.data import LabelledData, read_data, read_samples
from weft_tune.quantised.opened import OpenedModel, open_for_tuning, select
from weft_tune.quantised.scoring import make_scorer, needs_no_labels
from weft_tune.runtime_target.bench import BuiltVariant, RuntimeBench
from weft_tune.runtime_target.choice import FLOAT32, FastestVariant, OnStage, TriedVariant, choose
from weft_tune.subject import check_source_stays, labelled_samples, model_file, tuned_file

FORMAT = 1
"""Version of the JSON file."""
RESULT = "tuning.json"
"""The file of the result in its folder."""
SMALLEST_OPTIONS = (
    "shapes", "network", "groups", "platform", "objective", "layerwise", "device", "small", "bias_rule", "faithful",
    "workers", "baselines", "command", "small_command", "score", "timeout_s", "on_failure", "export", "database",
    "fresh",
)  # fmt: skip
"""Options of the search for the smallest formats; they are refused with a target."""

Samples = LabelledData | Mapping[str, Array]
EIGHT_BIT_FLAGS = {
    "amx_int8": "AMX", "avx512_vnni": "AVX-512 VNNI", "avx_vnni": "AVX-VNNI", "i8mm": "i8mm", "asimddp": "dot products",
}  # fmt: skip
"""Processor flag of Linux -> instructions that multiply and add 8-bit integers in one step."""
WIDE_FLAGS = {"avx512bw": "AVX-512", "avx2": "AVX2"}
"""Flag -> instructions that multiply 8-bit integers in several steps, and add pairs of products in 16 bits."""


class LayerSpeed(NamedTuple):
    """A layer that might have changed, and its times in a run; None if ONNX Runtime fused it into other layers."""

    name: str
    format: str
    """``int8``, ``float16`` or ``float32``."""
    before_s: float | None
    int8_s: float | None
    """The time if all layers are in 8 bits."""
    after_s: float | None
    why: str = ""
    """Why it stayed in its original format."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RuntimeTuning:
    """The fastest variant of a model that keeps its score, measured in a runtime on this machine."""

    network: str
    target: str
    processor: str
    rows: int
    """Samples in a run that was measured."""
    metric: str
    margin: float
    base: float
    """The score of the original model."""
    threshold: float
    score: float
    test_base: float | None = None
    """Score of the original model on samples that the choice did not use."""
    test_score: float | None = None
    """Score of the result on the same samples."""
    kind: str
    """``int8``, ``float16``, or ``float32``: nothing was faster, and the result is the original model."""
    way: str
    """The options of the conversion to 8-bit integers, in words."""
    before: Turns
    after: Turns
    layers: tuple[LayerSpeed, ...]
    tried: tuple[TriedVariant, ...]
    bytes_before: int
    bytes_after: int
    seconds: float
    """Duration of the search."""
    files: Mapping[str, Path] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"RuntimeTuning({self.network}: {self.kind}, {self.speedup:.2f} times as fast, score {self.score:.4f})"

    @property
    def changed(self) -> bool:
        """Whether anything was faster than the original model."""
        return self.kind != FLOAT32

    @property
    def speedup(self) -> float:
        return self.before.median_s / self.after.median_s

    def as_dict(self) -> dict[str, Any]:
        """The content of the JSON file."""
        return {
            "format": FORMAT,
            "weft": __version__,
            "network": self.network,
            "target": self.target,
            "processor": self.processor,
            "metric": self.metric,
            "margin": self.margin,
            "score": {
                "base": self.base,
                "threshold": self.threshold,
                "tuned": self.score,
                "test_base": self.test_base,
                "test": self.test_score,
            },
            "kind": self.kind,
            "way": self.way,
            "rows": self.rows,
            "latency_s": {"before": self.before.median_s, "after": self.after.median_s},
            "turns_s": {"before": list(self.before.seconds), "after": list(self.after.seconds)},
            "speedup": self.speedup,
            "bytes": {"before": self.bytes_before, "after": self.bytes_after},
            "layers": [layer._asdict() for layer in self.layers],
            "tried": [variant._asdict() | {"left_out": list(variant.left_out)} for variant in self.tried],
            "seconds": self.seconds,
        }


def find_fastest(options: TuneOptions, on_stage: OnStage) -> RuntimeTuning:
    """Search for the fastest variant, and write it and the result into ``options.folder``, if given."""
    _refuse_smallest_options(options)
    on_stage("reading", "")
    with TemporaryDirectory() as scratch:
        return _find_fastest(options, Path(scratch), on_stage)


def _find_fastest(options: TuneOptions, scratch: Path, on_stage: OnStage) -> RuntimeTuning:
    """As ``find_fastest``; *scratch*: a folder for a model that is no file yet."""
    began_s = time.perf_counter()
    path = model_file(str(options.model), scratch)
    if path is None:
        raise TuneError(f"{options.model} only describes a network; target = {options.target} needs an .onnx model")
    check_source_stays(options.folder, path)
    opened = _open(path, options.scored_output)
    wanted = [layer.name for layer in select(opened.layers, options.layers)]
    samples = _samples(options, opened)
    on_stage("calibrating", "")
    bench = RuntimeBench(opened, wanted, samples, options.metric_or_default)
    base, margin = bench.score(bench.original), 0.01 if options.margin is None else options.margin
    if base == 0:
        raise TuneError("the model scores 0 as it is; check the labels, the scale of the inputs and what is scored")
    fastest = choose(bench, base * (1 - margin), on_stage)
    source = load(path, weights=True)
    model = source if fastest.variant.written is None else fastest.variant.written.model
    result = RuntimeTuning(
        network=path.stem, target=str(options.target), processor=describe_processor(), rows=bench.rows,
        metric=options.metric_or_default, margin=margin, base=base, threshold=base * (1 - margin), score=fastest.score,
        kind=fastest.kind, way=str(fastest.options or ""), before=fastest.before, after=fastest.after,
        layers=_layer_speeds(bench, fastest), tried=fastest.tried, bytes_before=source.ByteSize(),
        bytes_after=model.ByteSize(), seconds=time.perf_counter() - began_s,
    )  # fmt: skip
    return _write(options, path, model, _with_test(options, bench, fastest.variant, result), on_stage)


def _refuse_smallest_options(options: TuneOptions) -> None:
    """Refuse options of the search for the smallest formats."""
    for option in fields(options):
        default = option.default_factory() if option.default_factory is not MISSING else option.default
        value = getattr(options, option.name)
        if option.name in SMALLEST_OPTIONS and value != default:
            raise TuneError(
                f"{option.name} = {value}: is of the search for the smallest formats, and target = {options.target} "
                "measures which are fastest; leave one of them out"
            )


def _open(path: Path, output: str | None) -> OpenedModel:
    """Open a model, and refuse one with inputs that the scored output does not need: sessions would require them."""
    opened = open_for_tuning(path, output)
    graph = load(path).graph
    known = {spec.name for spec in opened.inputs} | {tensor.name for tensor in graph.initializer}
    for value in graph.input:
        if value.name not in known:
            raise TuneError(
                f"{path}: input {value.name!r} is not needed for the scored output {opened.output!r}, so nothing says "
                "what to measure with; take it out of the model"
            )
    return opened


def _samples(options: TuneOptions, opened: OpenedModel) -> Samples:
    """The samples to score on; without labels if the metric needs none."""
    if not needs_no_labels(options.metric_or_default):
        return labelled_samples(options, opened)
    if options.data is not None:
        return read_samples(options.data, opened.inputs, options.scale)
    return labelled_samples(options, opened).inputs


def _layer_speeds(bench: RuntimeBench, fastest: FastestVariant) -> tuple[LayerSpeed, ...]:
    """All layers that might have changed, in the order of the graph; those without 8-bit kernels at the end."""
    speeds = [
        LayerSpeed(
            name,
            format=FLOAT32 if name in fastest.left_out else fastest.kind,
            before_s=fastest.times_before.get(name),
            int8_s=fastest.times_int8.get(name),
            after_s=fastest.times_after.get(name),
            why=fastest.left_out.get(name, ""),
        )
        for name in bench.layers
    ]
    others = [
        LayerSpeed(name, FLOAT32, before_s=None, int8_s=None, after_s=None, why=why)
        for name, why in bench.prepared.others.items()
    ]
    return (*speeds, *others)


def _with_test(
    options: TuneOptions, bench: RuntimeBench, variant: BuiltVariant, result: RuntimeTuning
) -> RuntimeTuning:
    """Add the scores on samples that the choice did not use, if there are some."""
    if options.test is None:
        return result
    opened = bench.scorer.opened
    read = read_samples if needs_no_labels(options.metric_or_default) else read_data
    data: Samples = read(options.test, opened.inputs, options.scale)
    scorer = make_scorer(opened, data, options.metric_or_default, bench.original.session, bench.scorer.batch)
    return replace(result, test_base=scorer.score(bench.original.session), test_score=scorer.score(variant.session))


def _write(
    options: TuneOptions, path: Path, model: OnnxModel, result: RuntimeTuning, on_stage: OnStage
) -> RuntimeTuning:
    """Write the model and the result into the folder, if there is one."""
    if options.folder is None:
        return result
    on_stage("writing", "")
    make_folder(options.folder)
    files = {"model": options.folder / tuned_file(path), "result": options.folder / RESULT}
    write_model(files["model"], model, TuneError)
    result = replace(result, files=files)
    write_json(files["result"], result.as_dict())
    return result


def describe_processor(info: Path = Path("/proc/cpuinfo")) -> str:
    """The name of the processor and its instructions for 8-bit integers, from Linux's *info*; else the name alone."""
    try:
        lines = [line.partition(":") for line in info.read_text().splitlines()]
    except OSError:
        return platform.processor() or platform.machine()
    # Reversed, so that the lines of the first processor take precedence.
    entries = {key.strip().lower(): value.strip() for key, _, value in reversed(lines)}
    flags = set((entries.get("flags") or entries.get("features") or "").split())
    name = entries.get("model name") or platform.machine()
    for flag_names, description in (
        (EIGHT_BIT_FLAGS, "has instructions for 8-bit products"),
        (WIDE_FLAGS, "has none made for 8-bit products"),
    ):
        if present := [instructions for flag, instructions in flag_names.items() if flag in flags]:
            return f"{name}, which {description} ({', '.join(present)})"
    return name
