"""Accuracy and speed of a model and its variants in ONNX Runtime, with its optimiser; and its own int8 quantizer.

``quantise_int8`` is the baseline that every user has at hand: static quantisation in the QDQ form, 8-bit weights, 8-bit
activations with ranges from calibration inputs. Its result is scored with graph optimisation off, so that every pair of
nodes rounds as written; on some processors the optimiser's fused kernels overflow in intermediate sums.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from weft.base.errors import ModelError
from weft.base.files import replacing
from weft.models.element_types import ElementType
from weft.models.onnx_graph import load, to_array
from weft.runtime.onnxruntime_cpu.sessions import first_line, open_model, open_session
from weft.runtime.samples import batches, count_rows, feed
from weft.runtime.tensors import Array
from weft.runtime.timing import least_seconds
from weft_tune.quantised.data import LabelledData, Labels
from weft_tune.quantised.metrics import LIKENESS, Metric, likeness, make_metric
from weft_tune.quantised.opened import OpenedModel, choose_batch, run_on

CALIBRATION = 512
"""Limit of the samples that int8 gets its ranges from."""
ROUNDS, LONGEST_S = 25, 3.0
"""Rounds of runs that are timed; after *LONGEST_S* no further round begins."""
_EIGHT_BIT_TYPES = (ElementType.INT8, ElementType.UINT8)


def outputs_by_batch(opened: OpenedModel, session: Any, inputs: Mapping[str, Array], batch: int) -> Iterator[Array]:
    """The scored output for all samples, *batch* at a time; *session* runs *opened*'s file or a variant of it."""
    samples_left = count_rows(inputs)
    for batch_inputs in batches(inputs, batch, opened.fixed_batch):
        (outputs,) = run_on(opened, session, [opened.output], batch_inputs)
        yield outputs[: min(batch, samples_left)]  # the last batch of a model that takes a fixed number is filled up
        samples_left -= batch


def answers(opened: OpenedModel, file: Path, inputs: Mapping[str, Array]) -> Array:
    """The scored output for each sample, in runs of one sample; *file* is *opened*'s own or has the same outputs."""
    return np.concatenate([*outputs_by_batch(opened, open_model(file, threads=1), inputs, opened.fixed_batch or 1)])


@dataclass(frozen=True, slots=True, eq=False)
class SampleScorer:
    """Scores sessions over variants of one model on the same samples."""

    opened: OpenedModel
    inputs: Mapping[str, Array]
    labels: Labels
    metric: Metric
    batch: int

    def score(self, session: Any) -> float:
        """The mean of the metric over all samples."""
        total, done = 0.0, 0
        for outputs in outputs_by_batch(self.opened, session, self.inputs, self.batch):
            labels = self.labels[done : done + self.batch]
            total += float(self.metric.scores(outputs, labels).sum())
            done += len(labels)
        return total / done


def make_scorer(
    opened: OpenedModel, data: LabelledData | Mapping[str, Array], metric: str, session: Any, batch: int
) -> SampleScorer:
    """Make a scorer on *data*; *session* runs the model before any change, and without labels its outputs are them."""
    if isinstance(data, LabelledData):
        measure = make_metric(metric, gives_probability=opened.gives_probability)
        labels = measure.check_labels(data.labels, count_rows(data.inputs))
        measure.check_classes(next(outputs_by_batch(opened, session, data.inputs, batch)), labels)
        return SampleScorer(opened, data.inputs, labels, measure, batch)
    before = np.concatenate([*outputs_by_batch(opened, session, data, batch)])
    return SampleScorer(opened, data, before, likeness(metric), batch)


def needs_no_labels(metric: str) -> bool:
    """Whether a metric compares a model with itself before the change, so that samples need no labels."""
    return metric in LIKENESS


def exported_score(path: Path, opened: OpenedModel, data: LabelledData, metric: str, *, optimise: bool = True) -> float:
    """Score an exported model on samples; *opened* is its source."""
    measure = make_metric(metric, gives_probability=opened.gives_probability)
    scorer = SampleScorer(opened, data.inputs, data.labels, measure, choose_batch(opened, data.inputs))
    return scorer.score(open_session(path, threads=1, optimise=optimise))


def calibration(data: LabelledData, fixed: int | None) -> dict[str, Array]:
    """The samples to measure ranges on; the last one is repeated to fill batches if each must have *fixed* samples."""
    rows = np.arange(min(CALIBRATION, count_rows(data.inputs)))
    return feed(data.inputs, rows, fixed and -(-len(rows) // fixed) * fixed)  # up to whole batches


def run_times(tuned: Path, opened: OpenedModel, data: LabelledData) -> tuple[float, float]:
    """Measure the seconds of a run, in one thread, of *opened* (the source of *tuned*) and of *tuned*.

    A run has one sample, or as many as the file requires. Few bits make a file small but not fast: formats for which
    the runtime has no kernels are rounded by additional operators.
    """
    one_batch = next(batches(data.inputs, opened.fixed_batch or 1, opened.fixed_batch))
    files = {"before": opened.path, "after": tuned}
    sessions = {name: open_session(path, threads=1, optimise=True) for name, path in files.items()}
    runs = {name: [partial(run_on, opened, session, [opened.output], one_batch)] for name, session in sessions.items()}
    seconds = least_seconds(runs, clock=time.perf_counter, rounds=ROUNDS, longest_s=LONGEST_S)
    return seconds["before"], seconds["after"]


class Int8Model(NamedTuple):
    """A quantised file and the sizes of its parts."""

    path: Path
    weights: int
    """The number of weights that are stored in 8 bits, which is their size in bytes."""
    scale_bytes: int
    """The size of scales and zero points, those of activations among them."""

    @property
    def file_bytes(self) -> int:
        return self.path.stat().st_size


def quantise_int8(
    model: Path,
    calibration: Mapping[str, Array],
    out: Path,
    *,
    per_channel: bool = False,
    nodes: Collection[str] | None = None,
    batch: int = 64,
) -> Int8Model:
    """Write *model* in int8 to *out*.

    calibration: inputs of many samples, by name. nodes: names of the nodes to quantise; by default all that can be.
    """
    try:
        with _silence_quantizer(), TemporaryDirectory() as folder:
            from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
            from onnxruntime.quantization.shape_inference import quant_pre_process

            prepared, quantised = Path(folder) / "prepared.onnx", Path(folder) / "int8.onnx"
            # Shapes and folded constants, without which the quantizer misses layers; its symbolic part needs more
            # packages.
            quant_pre_process(str(model), str(prepared), skip_symbolic_shape=True)
            quantize_static(
                str(prepared), str(quantised), _CalibrationReader(calibration, batch), quant_format=QuantFormat.QDQ,
                per_channel=per_channel, weight_type=QuantType.QInt8, activation_type=QuantType.QUInt8,
                nodes_to_quantize=None if nodes is None else sorted(nodes),
            )  # fmt: skip
            with replacing(out, ModelError) as temporary:
                shutil.copyfile(quantised, temporary)
    except ModelError:
        raise
    except Exception as error:  # the quantizer raises whatever numpy, onnx and ONNX Runtime do
        raise ModelError(f"{model}: cannot be quantised to int8: {first_line(error)}") from error
    return _measure_int8(out)


def classes(model: Path, inputs: Mapping[str, Array], *, batch: int = 256) -> Array:
    """The class that a quantised file predicts for each sample, by the largest value of its first output."""
    session = open_session(model, threads=1, optimise=False)
    outputs = (session.run(None, batch_inputs)[0] for batch_inputs in _equal_batches(inputs, batch))
    return np.concatenate([values.argmax(axis=-1) for values in outputs])


def _equal_batches(inputs: Mapping[str, Array], batch: int) -> Iterator[dict[str, Array]]:
    """Batches of *batch* samples; raises ModelError if inputs have different numbers of samples."""
    counts = {name: len(values) for name, values in inputs.items()}
    if len(set(counts.values())) != 1:
        raise ModelError(f"inputs have {counts} samples; give each the same number")
    return batches(inputs, batch, None)


class _CalibrationReader:
    """Calibration inputs batch by batch, behind the interface that ONNX Runtime requires."""

    def __init__(self, inputs: Mapping[str, Array], batch: int) -> None:
        self._batches = _equal_batches(inputs, batch)

    def get_next(self) -> dict[str, Array] | None:
        return next(self._batches, None)

    def __iter__(self) -> _CalibrationReader:
        return self

    def __next__(self) -> dict[str, Array]:
        return next(self._batches)


def _measure_int8(path: Path) -> Int8Model:
    """Add up the sizes of the 8-bit weights and of the quantisation parameters in a file."""
    graph = load(path, weights=True).graph
    pairs = [node for node in graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    parameters = {name for node in pairs for name in node.input[1:]}
    weights = scale_bytes = 0
    for tensor in graph.initializer:
        if tensor.name in parameters:
            scale_bytes += to_array(tensor).nbytes
        elif tensor.data_type in _EIGHT_BIT_TYPES:
            weights += int(np.prod(tensor.dims, dtype=np.int64))
    return Int8Model(path, weights, scale_bytes)


@contextmanager
def _silence_quantizer() -> Iterator[None]:
    """Suppress the advice of the quantizer, on the console and through the root logger, to which it adds a handler."""
    root: Any = logging.getLogger()
    handlers, disabled_level = list(root.handlers), logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        logging.disable(disabled_level)
        root.handlers[:] = handlers
