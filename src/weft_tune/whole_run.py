"""From a model to formats, what they are worth, other methods beside them, and files: ``tune``.

``find_formats`` is the search alone, for who has a ``Network`` and an ``Evaluator``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from weft.base.errors import EvaluationError, TuneError
from weft.base.files import make_folder, write_text
from weft.base.jsonfile import write_json
from weft.devices.costs.layer_costs import estimate, write_profile
from weft_tune.baselines import BASELINES
from weft_tune.command_evaluator import CommandEvaluator
from weft_tune.database import Database
from weft_tune.descriptor import as_toml, descriptor_of
from weft_tune.evaluation import Evaluator, Score
from weft_tune.export import write_export
from weft_tune.geometry import work_of
from weft_tune.numbers.configuration import Configuration, write_configuration
from weft_tune.objective import DEFAULT
from weft_tune.on_device import Latency, tuned_model
from weft_tune.options import INT8, TuneOptions
from weft_tune.packed import weights_of, write_packed
from weft_tune.result import OtherMethod, TuningResult
from weft_tune.speed import SPEED_MODELS
from weft_tune.subject import (
    NETWORK,
    TuningSubject,
    check_source_stays,
    make_evaluator,
    prepare,
    setting,
    tuned_file,
)
from weft_tune.trials import Progress
from weft_tune.tuner import find_formats

if TYPE_CHECKING:
    from weft_tune.runtime_target.result import RuntimeTuning

FORMATS, RESULT, WEIGHTS, PROFILE = "formats.txt", "tuning.json", "weights.bin", "profile.json"
"""Files in the folder of the results; models are called as their source is (``tuned_file``)."""


class TuneProgress(NamedTuple):
    """How far a tuning is."""

    stage: str
    """What is done: a network is searched for, another method runs, something is read, scored or written."""
    search: Progress | None = None
    """Where the search is."""
    tried: int = 0
    """Configurations, of a method that has no phases."""
    score: float | None = None
    """Of the last one."""
    detail: str = ""
    """How far it is in words, where there are no configurations to count."""


OnProgress = Callable[[TuneProgress], None]


@overload
def tune(
    model: str | Path, *, target: None = None, on_progress: OnProgress | None = None, **options: Any
) -> TuningResult: ...


@overload
def tune(model: str | Path, *, target: str, on_progress: OnProgress | None = None, **options: Any) -> RuntimeTuning: ...


def tune(
    model: str | Path, *, target: str | None = None, on_progress: OnProgress | None = None, **options: Any
) -> TuningResult | RuntimeTuning:
    """Find the smallest formats that keep *model* accurate; *options* are the fields of ``TuneOptions``.

    With a *target*, find those that this runtime computes fastest instead.
    """
    asked = TuneOptions(model=model, target=target, **options)
    return carry_out(asked, on_progress) if target is None else carry_out_fastest(asked, on_progress)


def carry_out_fastest(options: TuneOptions, on_progress: OnProgress | None = None) -> RuntimeTuning:
    """Measure which formats ``options.target`` computes fastest, and write as *options* say."""
    from weft_tune.runtime_target.fastest import find_fastest

    told = on_progress or (lambda progress: None)
    return find_fastest(options, lambda stage, detail: told(TuneProgress(stage, detail=detail)))


def int8_file(source: Path) -> str:
    """What the model is called that ONNX Runtime quantised in its own way."""
    return f"{source.stem}.int8.onnx"


def carry_out(options: TuneOptions, on_progress: OnProgress | None = None) -> TuningResult:
    """Search, compare and write as *options* say."""
    told = on_progress or (lambda progress: None)
    told(TuneProgress("reading"))
    subject = prepare(options)
    with closing(make_evaluator(options, subject)) as evaluator:
        steps = _TuningSteps(options, subject, evaluator, told)
        steps.check()
        _make_room(options)
        try:
            result = steps.search()
            threshold = result.tuning.thresholds["full"]
            others = tuple(steps.other(name, threshold) for name in dict.fromkeys(options.baselines))
        except EvaluationError as error:
            if options.on_failure == "stop" and steps.begun:
                way_out = "on_failure = skip goes on without such a configuration"
                raise EvaluationError(f"{error}; {way_out}", error.output) from error
            raise
        return steps.write(replace(result, others=others))


def _make_room(options: TuneOptions) -> None:
    """Make the folder of the results, and forget old scores if asked to."""
    if options.folder is not None:
        make_folder(options.folder)
    if options.fresh and options.scores is not None and options.scores.exists():
        Database(options.scores).close()  # refuses what is not ours
        options.scores.unlink()


@dataclass
class _TuningSteps:
    """One tuning on its way."""

    options: TuneOptions
    subject: TuningSubject
    evaluator: Evaluator
    told: OnProgress
    begun: bool = False
    """Whether the model itself was scored."""
    files: dict[str, Path] = field(default_factory=dict)

    @cached_property
    def margin(self) -> float:
        return float(self._setting("margin", 0.01))

    @cached_property
    def extras(self) -> Mapping[str, Latency]:
        """What an objective may say beside the sizes."""
        subject = self.subject
        if subject.npu is None or subject.counted is None:
            return {}
        return {"latency_s": Latency(subject.counted, subject.network, subject.npu, nodes=subject.nodes)}

    def check(self) -> None:
        """Refuse what cannot be searched for, before anything is written or forgotten."""
        if "latency_s" in self._setting("objective", DEFAULT) and not self.extras:
            raise TuneError("the objective says latency_s: name the device that it is the time on with device = NAME")
        check_source_stays(self.options.folder, self.subject.path)

    def search(self) -> TuningResult:
        """Tune, and measure what was found."""
        options = self.options
        objective = self._setting("objective", DEFAULT)
        begun_s = time.perf_counter()
        tuning = find_formats(
            self.subject.network,
            self.evaluator,
            platform=self._setting("platform", "fpga"),
            margin=self.margin,
            objective=objective,
            extras=self.extras,
            layerwise=self._setting("layerwise", "WGT-ONLY"),
            bias=options.bias_rule,  # type: ignore[arg-type]  # checked by the search
            faithful=options.faithful,
            two_passes=not isinstance(self.evaluator, CommandEvaluator) or self.evaluator.knows_small,
            database=options.scores,
            on_failure=options.on_failure,  # type: ignore[arg-type]  # checked by the options
            progress=self._searched,
        )
        result = TuningResult(
            tuning=tuning, objective=objective, bias_rule=options.bias_rule, seconds=time.perf_counter() - begun_s
        )
        return self._with_speed(self._with_test(result))

    def other(self, name: str, threshold: float) -> OtherMethod:
        """Run another method on the same samples; *threshold* is the least score allowed."""
        self.told(TuneProgress(name))
        if name == INT8:
            return self._int8(threshold)
        found = BASELINES[name](
            self.subject.network,
            self.evaluator,
            margin=self.margin,
            database=self.options.scores,
            progress=partial(self._tried, name),
        )
        return OtherMethod.of(self.subject.network, found)

    def write(self, result: TuningResult) -> TuningResult:
        """Everything into the folder of the results, if there is one."""
        folder, found = self.options.folder, result.tuning.configuration
        if folder is None:
            return result
        self.told(TuneProgress("writing"))
        write_configuration(self._named("formats", folder / FORMATS), found)
        described = as_toml(descriptor_of(self.subject.network, margin=self.margin))
        write_text(self._named("network", folder / NETWORK), described)
        result = self._exported(result, folder)
        if self.subject.npu is not None and self.subject.counted is not None:
            tuned = tuned_model(self.subject.counted, self.subject.network, found, self.subject.nodes)
            write_profile(estimate(tuned, self.subject.npu), self._named("profile", folder / PROFILE))
        write_json(self._named("result", folder / RESULT), result.as_dict())
        assert self.options.scores is not None
        self._named("scores", self.options.scores)
        return replace(result, files=self.files)

    def _setting(self, name: str, usual: Any) -> Any:
        return setting(self.options, self.subject.descriptor, name, usual)

    def _searched(self, progress: Progress) -> None:
        self.begun = True
        self.told(TuneProgress(self.subject.network.name, progress))

    def _tried(self, method: str, number: int, configuration: Configuration, score: Score) -> None:
        self.told(TuneProgress(method, tried=number, score=score.value))

    def _named(self, what: str, path: Path) -> Path:
        self.files[what] = path
        return path

    def _with_test(self, result: TuningResult) -> TuningResult:
        test = self.subject.test
        if test is None:
            return result
        from weft_tune.quantised.evaluator import OnnxEvaluator

        self.told(TuneProgress("scoring the test set"))
        assert isinstance(self.evaluator, OnnxEvaluator)
        score = partial(self.evaluator.measure, inputs=test.inputs, labels=test.labels)
        return replace(result, test_base=score(Configuration({})), test_score=score(result.tuning.configuration))

    def _with_speed(self, result: TuningResult) -> TuningResult:
        """What the formats are worth on hardware, where the model can be priced."""
        subject, found = self.subject, result.tuning.configuration
        if subject.counted is None:
            return result
        try:
            work = work_of(subject.counted, subject.network, subject.nodes)
        except TuneError:
            if subject.npu is not None:
                raise
            return result
        result = replace(result, speedups={name: model(work, found).network for name, model in SPEED_MODELS.items()})
        if subject.npu is None:
            return result
        latency = self.extras["latency_s"]
        return replace(result, device=subject.npu.name, latency_s=(latency(Configuration({})), latency(found)))

    def _int8(self, threshold: float) -> OtherMethod:
        from weft_tune.quantised.exported import calibration, exported_score
        from weft_tune.quantised.int8 import quantise_int8
        from weft_tune.quantised.stages import choose_batch

        subject, network = self.subject, self.subject.network
        assert subject.path is not None and subject.opened is not None and subject.data is not None
        batch = choose_batch(subject.opened, subject.data.inputs)
        wanted = [subject.nodes[layer] for target in network.targets for layer in target.layers]
        seen = calibration(subject.data, subject.opened.fixed_batch)
        with TemporaryDirectory() as spare:
            folder = self.options.folder
            name = int8_file(subject.path)
            path = self._named("int8 model", folder / name) if folder else Path(spare) / name
            quantise_int8(subject.path, seen, path, nodes=wanted, batch=batch)
            # Optimised, some processors' fused kernels saturate on the way.
            score = exported_score(path, subject.opened, subject.data, self.options.measure, optimise=False)
        return OtherMethod(INT8, "8 bits", 8 * network.weights, 8 * network.inputs, score, score >= threshold, 1)

    def _exported(self, result: TuningResult, folder: Path) -> TuningResult:
        """The tuned model and its weights alone, and what the model scores as anybody would run it."""
        options, subject, found = self.options, self.subject, result.tuning.configuration
        if subject.path is None or subject.opened is None or options.export == "none":
            return result
        path = self._named("model", folder / tuned_file(subject.path))
        write_export(path, subject.path, subject.network, found, options.export)  # type: ignore[arg-type]
        write_packed(self._named("weights", folder / WEIGHTS), weights_of(subject.path, subject.network), found)
        if subject.data is None or options.export == "qonnx":
            return result
        from weft_tune.quantised.exported import exported_score

        score = exported_score(path, subject.opened, subject.data, options.measure)
        return self._with_run_times(replace(result, exported_score=score), path)

    def _with_run_times(self, result: TuningResult, path: Path) -> TuningResult:
        """How fast the written model is beside its source, as ONNX Runtime runs both."""
        from weft_tune.quantised.run_times import run_times

        subject = self.subject
        assert subject.opened is not None and subject.data is not None
        self.told(TuneProgress("timing the written model"))
        return replace(result, run_s=run_times(path, subject.opened, subject.data))
