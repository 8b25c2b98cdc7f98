"""The steps of ``weft tune``: the search, other methods beside it, and the files."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import typer

from weft.cli.tune_show import ProgressLine, print_result, sentences
from weft.cli.tune_subject import Request, make_evaluator, prepare, setting
from weft.errors import EvaluationError, InputError, TuneError

if TYPE_CHECKING:
    from weft.reports.tuning_result import Other, TuningResult
    from weft.tuning.baselines.base import Baseline
    from weft.tuning.trials import Progress

BASELINES = ("ristretto", "relaxed-ristretto", "stripes", "int8")
EXPORTS = ("qdq", "packed", "simulated", "qonnx", "none")
FORMATS, NETWORK, PICTURE, PAGE, RESULT, MODEL, WEIGHTS, PROFILE, INT8 = (
    "formats.txt", "network.toml", "search", "report.html", "tuning.json", "model.onnx", "weights.bin", "profile.json",
    "int8.onnx",
)  # fmt: skip
"""Files in the folder of the results."""


class Steps:
    """One run of the command."""

    def __init__(self, asked: Request) -> None:
        self._asked = asked
        self._subject = prepare(asked)
        self._evaluator = make_evaluator(asked, self._subject)
        margin = setting(asked, self._subject.descriptor, "margin")
        self._margin = 0.01 if margin is None else float(margin)
        self._result: TuningResult | None = None
        self._iteration: int | None = None
        """None until the model itself was scored."""
        self._written: dict[str, Path] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._evaluator.close()

    def search(self) -> None:
        """Tune, and measure what was found."""
        from weft.reports.tuning_result import TuningResult
        from weft.tuning.command import CommandEvaluator
        from weft.tuning.objective import DEFAULT
        from weft.tuning.tuner import tune

        asked, described = self._asked, self._subject.descriptor
        objective = setting(asked, described, "objective")
        objective = DEFAULT if objective is None else objective
        extras = self._extras()
        if "latency_s" in objective and not extras:
            raise InputError("the objective says latency_s: name the device that it is the time on with --device")
        self._prepare_folder()
        begun_s = time.perf_counter()
        with ProgressLine(self._subject.network.name) as line:
            tuning = tune(
                self._subject.network,
                self._evaluator,
                platform=setting(asked, described, "platform") or "fpga",
                margin=self._margin,
                objective=objective,
                extras=extras,
                layerwise=setting(asked, described, "layerwise") or "WGT-ONLY",
                bias=asked.bias_rule,  # type: ignore[arg-type]  # checked by tune, as the next one
                faithful=asked.faithful,
                two_passes=not isinstance(self._evaluator, CommandEvaluator) or self._evaluator.knows_small,
                database=asked.scores,
                on_failure=asked.on_failure,  # type: ignore[arg-type]
                progress=partial(self._told, line),
            )
        self._result = TuningResult(
            tuning=tuning, objective=objective, bias_rule=asked.bias_rule, seconds=time.perf_counter() - begun_s
        )
        self._measure_test()
        self._measure_speed()

    def compare(self) -> None:
        """Run the other methods that were asked for."""
        assert self._result is not None
        for name in self._asked.baselines:
            with ProgressLine(name) as line:
                other = self._int8() if name == "int8" else self._baseline(name, line)
            self._result = replace(self._result, others=(*self._result.others, other))

    def write(self) -> None:
        """Everything into the folder, the result also where --json says."""
        from weft.jsonfile import write_json
        from weft.numbers.configuration import write_configuration
        from weft.tuning.descriptor import as_toml, descriptor_of

        assert self._result is not None
        folder = self._asked.folder
        write_configuration(self._named("formats", folder / FORMATS), self._result.tuning.configuration)
        described = as_toml(descriptor_of(self._subject.network, margin=self._margin))
        self._named("network", folder / NETWORK).write_text(described, "utf-8")
        self._export()
        self._write_profile()
        if self._asked.pictures:
            self._draw()
        write_json(self._named("result", folder / RESULT), self._result.as_dict())
        if self._asked.json_file is not None:
            write_json(self._named("result, again", self._asked.json_file), self._result.as_dict())
        self._named("scores", self._asked.scores)

    def show(self) -> None:
        assert self._result is not None
        print_result(self._result, self._written)

    def tell_interrupted(self) -> None:
        typer.echo(
            f"weft: stopped at iteration {self._iteration or 0}; its scores are in {self._asked.scores}, "
            "and the same command goes on from there",
            err=True,
        )

    def failed(self, error: EvaluationError) -> EvaluationError:
        """The error, and the way out where there is one."""
        if self._asked.on_failure == "stop" and self._iteration is not None:
            return EvaluationError(f"{error}; --on-failure skip goes on without such a configuration", error.output)
        return error

    def _told(self, line: ProgressLine, progress: Progress) -> None:
        self._iteration = progress.iteration
        line.show(progress)

    def _extras(self) -> dict[str, Callable[[Any], float]]:
        from weft.tuning.on_device import Latency

        subject = self._subject
        if subject.npu is None or subject.counted is None:
            return {}
        return {"latency_s": Latency(subject.counted, subject.network, subject.npu, nodes=subject.nodes)}

    def _prepare_folder(self) -> None:
        from weft.tuning.database import Database

        asked = self._asked
        try:
            asked.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{asked.folder}: cannot make the folder: {error}") from error
        if asked.fresh and asked.scores.exists():
            Database(asked.scores).close()  # refuses what is not ours
            asked.scores.unlink()

    def _measure_test(self) -> None:
        from weft.numbers.configuration import Configuration
        from weft.runtime.quantised.evaluator import OnnxEvaluator

        test = self._subject.test
        if test is None:
            return
        assert self._result is not None and isinstance(self._evaluator, OnnxEvaluator)
        score = partial(self._evaluator.measure, inputs=test.inputs, labels=test.labels)
        self._result = replace(
            self._result, test_base=score(Configuration({})), test_score=score(self._result.tuning.configuration)
        )

    def _measure_speed(self) -> None:
        """What the formats are worth on hardware, where the model can be priced."""
        from weft.numbers.configuration import Configuration
        from weft.tuning.geometry import work_of
        from weft.tuning.speed import SPEED_MODELS

        assert self._result is not None
        subject, found = self._subject, self._result.tuning.configuration
        if subject.counted is None:
            return
        try:
            work = work_of(subject.counted, subject.network, subject.nodes)
        except TuneError:
            if subject.npu is not None:
                raise
            return
        speedups = {name: model(work, found).network for name, model in SPEED_MODELS.items()}
        self._result = replace(self._result, speedups=speedups)
        if subject.npu is not None:
            latency = self._extras()["latency_s"]
            times_s = latency(Configuration({})), latency(found)
            self._result = replace(self._result, device=subject.npu.name, latency_s=times_s)

    def _baseline(self, name: str, line: ProgressLine) -> Other:
        from weft.reports.tuning_result import Other
        from weft.tuning.baselines.ristretto import relaxed_ristretto, ristretto
        from weft.tuning.baselines.stripes import stripes

        methods: dict[str, Callable[..., Baseline]] = {
            "ristretto": ristretto,
            "relaxed-ristretto": relaxed_ristretto,
            "stripes": stripes,
        }
        found = methods[name](
            self._subject.network,
            self._evaluator,
            margin=self._margin,
            database=self._asked.scores,
            progress=lambda number, configuration, score: line.count(number, score.value),
        )
        return Other.of(self._subject.network, found)

    def _int8(self) -> Other:
        from weft.cli.tune_check import calibration, exported_score
        from weft.reports.tuning_result import Other
        from weft.runtime.quantised.int8 import quantise_int8
        from weft.runtime.quantised.stages import choose_batch

        asked, subject, network = self._asked, self._subject, self._subject.network
        assert subject.path is not None and subject.opened is not None and self._result is not None
        assert subject.data is not None
        batch = choose_batch(subject.opened, subject.data.inputs)
        wanted = [subject.nodes[layer] for target in network.targets for layer in target.layers]
        path = self._named("int8 model", asked.folder / INT8)
        seen = calibration(subject.data, subject.opened.fixed_batch)
        quantise_int8(subject.path, seen, path, nodes=wanted, batch=batch)
        # Optimised, some processors' fused kernels saturate on the way.
        score = exported_score(path, subject.opened, subject.data, asked.measure, optimise=False)
        feasible = score >= self._result.tuning.thresholds["full"]
        return Other("int8", "8 bits", 8 * network.weights, 8 * network.inputs, score, feasible, 1)

    def _export(self) -> None:
        """The tuned model, and its weights alone."""
        from weft.cli.tune_check import exported_score
        from weft.tuning.export import write_export
        from weft.tuning.packed import weights_of, write_packed

        assert self._result is not None
        asked, subject, found = self._asked, self._subject, self._result.tuning.configuration
        if subject.path is None or subject.opened is None or asked.export == "none":
            return
        path = self._named("model", asked.folder / MODEL)
        write_export(path, subject.path, subject.network, found, asked.export)  # type: ignore[arg-type]
        write_packed(self._named("weights", asked.folder / WEIGHTS), weights_of(subject.path, subject.network), found)
        if subject.data is not None and asked.export != "qonnx":
            score = exported_score(path, subject.opened, subject.data, asked.measure)
            self._result = replace(self._result, exported_score=score)

    def _write_profile(self) -> None:
        from weft.costs.profiles import estimate, write_profile
        from weft.tuning.on_device import tuned_model

        assert self._result is not None
        folder, subject, found = self._asked.folder, self._subject, self._result.tuning.configuration
        if subject.npu is not None and subject.counted is not None:
            tuned = tuned_model(subject.counted, subject.network, found, subject.nodes)
            write_profile(estimate(tuned, subject.npu), self._named("profile", folder / PROFILE))

    def _draw(self) -> None:
        from weft.reports.tuning import draw_search
        from weft.reports.tuning_page import write_tuning_page

        assert self._result is not None
        folder = self._asked.folder
        png, svg = (self._named(f"search ({kind})", folder / f"{PICTURE}.{kind}") for kind in ("png", "svg"))
        draw_search(self._result.tuning, png, svg)
        write_tuning_page(self._named("report", folder / PAGE), self._result, svg, sentences(self._result))

    def _named(self, what: str, path: Path) -> Path:
        self._written[what] = path
        return path
