"""``tune``: from a model to formats, measurements of them, a comparison with other methods, and files.

``find_formats`` is the search alone, over a ``Network`` and an ``Evaluator``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from weft.base.errors import EvaluationError, TuneError
from weft.base.files import make_folder, write_text
from weft.base.jsonfile import write_json
from weft.devices.costs.layer_costs import estimate, write_profile
from weft_tune.baselines import BASELINES, Baseline
from weft_tune.command_evaluator import CommandEvaluator
from weft_tune.evaluation import Database, Evaluator
from weft_tune.export import Style, write_export
from weft_tune.hardware import SPEED_MODELS, Latency, tuned_model, work_of
from weft_tune.network import Network
from weft_tune.numbers.configuration import Configuration, write_configuration
from weft_tune.objective import DEFAULT, total_bits
from weft_tune.options import INT8, TuneOptions
from weft_tune.packed import weights_of, write_packed
from weft_tune.result import OtherMethod, Progress, TuningResult
from weft_tune.subject import (
    NETWORK,
    TuningSubject,
    as_toml,
    check_source_stays,
    descriptor_of,
    make_evaluator,
    prepare,
    setting,
    tuned_file,
)
from weft_tune.tuner import find_formats

if TYPE_CHECKING:
    from weft_tune.runtime_target.fastest import RuntimeTuning

FORMATS, RESULT, WEIGHTS, PROFILE = "formats.txt", "tuning.json", "weights.bin", "profile.json"
"""Files in the folder of the results; models are called as their source is (``tuned_file``)."""


class TuneProgress(NamedTuple):
    """The state of a running tuning."""

    stage: str
    """The name of the network that is searched for or of another method, or a step such as reading or writing."""
    search: Progress | None = None
    """The state of the search."""
    tried: int = 0
    """Number of configurations that another method has scored so far."""
    score: float | None = None
    """The last score of that method."""
    detail: str = ""
    """The state in words, for a stage without configurations to count."""


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
    settings = TuneOptions(model=model, target=target, **options)
    return carry_out(settings, on_progress) if target is None else carry_out_fastest(settings, on_progress)


def carry_out_fastest(options: TuneOptions, on_progress: OnProgress | None = None) -> RuntimeTuning:
    """Search for the formats that ``options.target`` computes fastest, and write the files that *options* ask for."""
    from weft_tune.runtime_target.fastest import find_fastest

    notify = on_progress or (lambda progress: None)
    return find_fastest(options, lambda stage, detail: notify(TuneProgress(stage, detail=detail)))


def carry_out(options: TuneOptions, on_progress: OnProgress | None = None) -> TuningResult:
    """Search for the smallest formats, run the other methods, and write the files that *options* ask for."""
    notify = on_progress or (lambda progress: None)
    notify(TuneProgress("reading"))
    with ExitStack() as stack:
        subject = prepare(options, Path(stack.enter_context(TemporaryDirectory())))
        evaluator = stack.enter_context(closing(make_evaluator(options, subject)))
        steps = _TuningSteps(options, subject, evaluator, notify)
        steps.check()
        if options.folder is not None:
            make_folder(options.folder)
        if options.fresh and options.scores is not None and options.scores.exists():
            Database(options.scores).close()  # refuses to remove the file of another program
            options.scores.unlink()
        try:
            result = steps.search()
            threshold = result.tuning.thresholds["full"]
            others = tuple(steps.run_other_method(name, threshold) for name in dict.fromkeys(options.baselines))
        except EvaluationError as error:
            if options.on_failure == "stop" and steps.begun:
                way_out = "on_failure = skip goes on without such a configuration"
                raise EvaluationError(f"{error}; {way_out}", error.output) from error
            raise
        return steps.write(replace(result, others=others))


def summarise(network: Network, result: Baseline) -> OtherMethod:
    """The result of a baseline with its sizes in bits."""
    weight_bits, activation_bits = total_bits(network, result.configuration)
    return OtherMethod(
        result.method, result.configuration.text, weight_bits, activation_bits, result.score, result.feasible,
        result.evaluations,
    )  # fmt: skip


@dataclass
class _TuningSteps:
    """The steps of one tuning, and the files that it has written."""

    options: TuneOptions
    subject: TuningSubject
    evaluator: Evaluator
    notify: OnProgress
    begun: bool = False
    """Whether the first score, that of the model itself, is known."""
    files: dict[str, Path] = field(default_factory=dict)

    @cached_property
    def margin(self) -> float:
        return float(self._setting("margin", 0.01))

    @cached_property
    def extras(self) -> Mapping[str, Latency]:
        """Names that an objective may use in addition to the sizes."""
        subject = self.subject
        if subject.npu is None or subject.cost_model is None:
            return {}
        return {"latency_s": Latency(subject.cost_model, subject.network, subject.npu, nodes=subject.nodes)}

    def check(self) -> None:
        """Refuse options that cannot work, before anything is written or removed."""
        if "latency_s" in self._setting("objective", DEFAULT) and not self.extras:
            raise TuneError("the objective says latency_s: name the device that it is the time on with device = NAME")
        check_source_stays(self.options.folder, self.subject.path)

    def search(self) -> TuningResult:
        """Run the search, and add the scores on the test set and the estimated speed to its result."""
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
            progress=self._report_search,
        )
        result = TuningResult(
            tuning=tuning, objective=objective, bias_rule=options.bias_rule, seconds=time.perf_counter() - begun_s
        )
        return self._with_speed(self._with_test(result))

    def run_other_method(self, name: str, threshold: float) -> OtherMethod:
        """Run another method on the same samples; *threshold* is the least score allowed."""
        self.notify(TuneProgress(name))
        if name == INT8:
            return self._run_int8(threshold)
        result = BASELINES[name](
            self.subject.network,
            self.evaluator,
            margin=self.margin,
            database=self.options.scores,
            progress=lambda number, _, score: self.notify(TuneProgress(name, tried=number, score=score.value)),
        )
        return summarise(self.subject.network, result)

    def write(self, result: TuningResult) -> TuningResult:
        """Write all files into the folder of the results, if there is one."""
        folder, formats, subject = self.options.folder, result.tuning.configuration, self.subject
        if folder is None:
            return result
        self.notify(TuneProgress("writing"))
        write_configuration(self._add_file("formats", folder / FORMATS), formats)
        description = as_toml(descriptor_of(subject.network, margin=self.margin))
        write_text(self._add_file("network", folder / NETWORK), description)
        result = self._export(result, folder)
        if subject.npu is not None and subject.cost_model is not None:
            tuned = tuned_model(subject.cost_model, subject.network, formats, subject.nodes)
            write_profile(estimate(tuned, subject.npu), self._add_file("profile", folder / PROFILE))
        write_json(self._add_file("result", folder / RESULT), result.as_dict())
        assert self.options.scores is not None
        self._add_file("scores", self.options.scores)
        return replace(result, files=self.files)

    def _setting(self, name: str, default: Any) -> Any:
        return setting(self.options, self.subject.descriptor, name, default)

    def _report_search(self, progress: Progress) -> None:
        self.begun = True
        self.notify(TuneProgress(self.subject.network.name, progress))

    def _add_file(self, kind: str, path: Path) -> Path:
        self.files[kind] = path
        return path

    def _with_test(self, result: TuningResult) -> TuningResult:
        """Add the scores on the test set, if there is one."""
        test = self.subject.test
        if test is None:
            return result
        from weft_tune.quantised.evaluator import OnnxEvaluator

        self.notify(TuneProgress("scoring the test set"))
        assert isinstance(self.evaluator, OnnxEvaluator)
        score = partial(self.evaluator.measure, inputs=test.inputs, labels=test.labels)
        return replace(result, test_base=score(Configuration({})), test_score=score(result.tuning.configuration))

    def _with_speed(self, result: TuningResult) -> TuningResult:
        """Add estimates of the speed on hardware, where the model's cost can be estimated."""
        subject, formats = self.subject, result.tuning.configuration
        if subject.cost_model is None:
            return result
        try:
            work = work_of(subject.cost_model, subject.network, subject.nodes)
        except TuneError:
            if subject.npu is not None:
                raise
            return result
        result = replace(result, speedups={name: model(work, formats).network for name, model in SPEED_MODELS.items()})
        if subject.npu is None:
            return result
        latency = self.extras["latency_s"]
        return replace(result, device=subject.npu.name, latency_s=(latency(Configuration({})), latency(formats)))

    def _run_int8(self, threshold: float) -> OtherMethod:
        """Quantise the model with ONNX Runtime's int8 quantizer, and score the result."""
        from weft_tune.quantised.opened import choose_batch
        from weft_tune.quantised.scoring import calibration, exported_score, quantise_int8

        subject, network = self.subject, self.subject.network
        assert subject.path is not None and subject.opened is not None and subject.data is not None
        batch = choose_batch(subject.opened, subject.data.inputs)
        nodes = [subject.nodes[layer] for layer in network.layers]
        samples = calibration(subject.data, subject.opened.fixed_batch)
        with TemporaryDirectory() as scratch:
            folder, name = self.options.folder, f"{subject.path.stem}.int8.onnx"
            path = self._add_file("int8 model", folder / name) if folder else Path(scratch) / name
            quantise_int8(subject.path, samples, path, nodes=nodes, batch=batch)
            # With optimisation, ONNX Runtime's fused int8 kernels overflow in intermediate sums on some processors,
            # which would lower the score.
            score = exported_score(path, subject.opened, subject.data, self.options.metric_or_default, optimise=False)
        return OtherMethod(
            method=INT8,
            formats="8 bits",
            weight_bits=8 * network.weights,
            activation_bits=8 * network.inputs,
            score=score,
            feasible=score >= threshold,
            evaluations=1,
        )

    def _export(self, result: TuningResult, folder: Path) -> TuningResult:
        """Write the tuned model and its weights alone; score and time the model in ONNX Runtime with its optimiser."""
        options, subject, formats = self.options, self.subject, result.tuning.configuration
        if subject.path is None or subject.opened is None or options.export == "none":
            return result
        path = self._add_file("model", folder / tuned_file(subject.path))
        style: Style = options.export  # type: ignore[assignment]  # checked by the options
        write_export(path, subject.path, subject.network, formats, style)
        write_packed(self._add_file("weights", folder / WEIGHTS), weights_of(subject.path, subject.network), formats)
        if subject.data is None or options.export == "qonnx":
            return result
        from weft_tune.quantised.scoring import exported_score, run_times

        score = exported_score(path, subject.opened, subject.data, options.metric_or_default)
        self.notify(TuneProgress("timing the written model"))
        return replace(result, exported_score=score, run_s=run_times(path, subject.opened, subject.data))
