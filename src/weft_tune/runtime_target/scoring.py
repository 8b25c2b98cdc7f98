"""What a variant of a model is worth on samples, run as anybody would run it, fused kernels and all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.runtime.tensors import Array
from weft_tune.quantised.data import LabelledData, Labels
from weft_tune.quantised.feeding import batches, count_rows
from weft_tune.quantised.likeness import LIKENESS, likeness
from weft_tune.quantised.metrics import Metric, make_metric
from weft_tune.quantised.opened import Opened
from weft_tune.quantised.stages import run_on


@dataclass(frozen=True, slots=True, eq=False)
class SampleScorer:
    """Scores sessions over variants of one model on the same samples."""

    opened: Opened
    inputs: Mapping[str, Array]
    labels: Labels
    metric: Metric
    batch: int

    def score(self, session: Any) -> float:
        """The mean over the samples."""
        total, done = 0.0, 0
        for given in batches(self.inputs, self.batch, self.opened.fixed_batch):
            right = self.labels[done : done + self.batch]
            (outputs,) = run_on(self.opened, session, [self.opened.output], given)
            total += float(self.metric.scores(outputs[: len(right)], right).sum())
            done += len(right)
        return total / done


def make_scorer(
    opened: Opened, data: LabelledData | Mapping[str, Array], metric: str, session: Any, batch: int
) -> SampleScorer:
    """What scores on *data*; without labels those are the answers of *session*, which runs the model as it was."""
    if isinstance(data, LabelledData):
        measure = make_metric(metric, gives_probability=opened.gives_probability)
        labels = measure.check_labels(data.labels, count_rows(data.inputs))
        scorer = SampleScorer(opened, data.inputs, labels, measure, batch)
        measure.check_classes(_outputs(scorer, session, only_first=True), labels)
        return scorer
    scorer = SampleScorer(opened, data, np.zeros(count_rows(data)), likeness(metric), batch)
    return SampleScorer(opened, data, _outputs(scorer, session), likeness(metric), batch)


def needs_no_labels(metric: str) -> bool:
    """Whether a measure compares a model with what it was."""
    return metric in LIKENESS


def _outputs(scorer: SampleScorer, session: Any, *, only_first: bool = False) -> Array:
    """What a session says to all samples, or to those of the first batch."""
    opened, found = scorer.opened, list[Array]()
    for given in batches(scorer.inputs, scorer.batch, opened.fixed_batch):
        found += run_on(opened, session, [opened.output], given)
        if only_first:
            break
    return np.concatenate(found)[: count_rows(scorer.inputs)]
