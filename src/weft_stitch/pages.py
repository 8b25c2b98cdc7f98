"""Reports of stitched models, which compare the ways to run them: tables, sentences, JSON and a picture.

A model is stitched by channels (``Stitching``) or to a body (``BodyStitching``), each of whose steps runs once for a
*crew*: models with equal weights in it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.base.version import __version__
from weft.reports.exhibits import Axis, Bars, Panel, draw
from weft.reports.page import PALETTE
from weft.reports.tables import ResultTable, TableRow, number
from weft_stitch.advice import Advice
from weft_stitch.bodies.body_stitching import BodyStitching, SharedStep
from weft_stitch.cost import ITEM_BYTES
from weft_stitch.stitching_run import Stitching
from weft_stitch.summary import SLABBED, LayerRow, Summary, Way

if TYPE_CHECKING:
    from weft.reports.pictures import Figure


UNIQUE = "split"
"""The form that stores every weight once."""
SPARE = 1.05
"""If a graph stores more than this multiple of the unique weights, a sentence mentions its copies."""
MANY = 0.5
"""A sentence names the largest layers until they make up this fraction of the total, but at most ``FEW_LAYERS``."""
FEW_LAYERS = 3
"""At most this many layers fit into one sentence."""

NOTHING_SHARED = "; were normalisations folded into the filters? docs/stitching.md tells how to export without"
"""The end of the sentence about sharing if nothing is shared."""


def stitching_report(
    stitching: Stitching, files: Sequence[str | Path], served: Sequence[Advice] = ()
) -> dict[str, Any]:
    """The report of stitched models, ready for JSON.

    *files*: the file of each group. *served*: for each group, whether to serve it or the separate models, if timed.
    """
    options = stitching.options
    return {
        "format": 1,
        "kind": "stitching",
        "version": __version__,
        "settings": {
            "files": {name: str(path) for name, path in stitching.files.items()},
            "form": options.form,
            "tolerance": options.tolerance,
            "machine": options.machine,
            "measured": options.measures,
            "threads": options.used_threads,
            "slack": options.allowed_slack,
            "memory_cap_bytes": options.memory_cap_bytes,
            "latency_target_s": options.latency_target_s,
        },
        "largest_difference": stitching.difference and stitching.difference.relative,
        "total": {"sequential": asdict(stitching.before), "stitched": asdict(stitching.after)},
        "groups": [
            {"file": str(path), **asdict(group)} for path, group in zip(files, stitching.summaries, strict=True)
        ],
        "served": [advice.as_dict() for advice in served],
    }


def sentences(stitching: Stitching) -> list[str]:
    """Sentences about the sharing, the time and the memory of *stitching*."""
    groups = stitching.summaries
    alone = len(groups) > 1 and all(len(summary.models) == 1 for summary in groups)
    return [
        *(["groups: the limits leave every model alone: nothing is shared"] if alone else []),
        _sharing_sentence(groups),
        _time_sentence(groups, stitching.before, stitching.after),
        _memory_sentence(groups, stitching.before, stitching.after, _number_bytes(stitching)),
    ]


def _sharing_sentence(groups: Sequence[Summary]) -> str:
    """How many inner channels the models share, in percent."""
    rows = [row for group in groups for row in group.spaces if row.inner]
    by_all, by_some, own = percents([sum(getattr(row, key) for row in rows) for key in ("by_all", "by_some", "own")])
    of_group = "" if len(groups) == 1 else " of a group"
    some = f", {by_some}% by some" if any(row.by_some for row in rows) else ""
    hint = "" if any(row.by_all + row.by_some for row in rows) or len(groups[0].models) == 1 else NOTHING_SHARED
    return f"sharing: {by_all}% of the inner channels are shared by all models{of_group}{some}, {own}% by none{hint}"


def percents(amounts: Sequence[int]) -> list[int]:
    """Whole percents that add up to 100: the largest remainders are rounded up first. All zero if all *amounts* are."""
    total = max(1, sum(amounts))
    percentages = [100 * amount // total for amount in amounts]
    by_remainder = sorted(range(len(amounts)), key=lambda index: -(100 * amounts[index] % total))
    missing = 100 - sum(percentages) if any(amounts) else 0
    for index in by_remainder[:missing]:
        percentages[index] += 1
    return percentages


def _time_sentence(groups: Sequence[Summary], before: Way, after: Way) -> str:
    """The time of *after*, how many times faster it is than *before*, and the layers that take most of it."""
    measured = before.measured_s is not None and after.measured_s is not None
    before_s, after_s = (_seconds(way, measured=measured) for way in (before, after))
    gain = before_s / after_s if after_s else 1.0
    layers = [row for group in groups for row in group.layers]
    largest = _largest_layers(layers, "predicted_s", after.predicted_s)
    baseline = "one after another" if sum(len(group.models) for group in groups) > 1 else "the model as it is"
    sentence = f"{_ms(after_s)}{'' if measured else ' predicted'}, {gain:.2f} times as fast as {baseline}"
    slabbed = [way for way in groups[0].ways if way.name == SLABBED] if len(groups) == 1 else []
    if slabbed and after_s:
        sentence += f" and {_seconds(slabbed[0], measured=measured) / after_s:.2f} times as fast as that in slabs"
    return f"time: {sentence}; {largest} of it{' by the prediction' if measured else ''}"


def _seconds(way: Way, *, measured: bool) -> float:
    """The measured seconds of *way* if *measured* and available, else the predicted ones."""
    return way.measured_s if measured and way.measured_s is not None else way.predicted_s


def _number_bytes(stitching: Stitching) -> float:
    """Average bytes of a weight: 4 for float32, fewer if a model is tuned."""
    separate = sum(summary.kernels.separate for summary in stitching.summaries)
    tuned = separate and any(net.tuned for net in stitching.family.nets)
    return stitching.before.weight_bytes / separate if tuned else ITEM_BYTES


def _memory_sentence(groups: Sequence[Summary], before: Way, after: Way, number_bytes: float) -> str:
    """The weights and the total memory of *after* and *before*, and how much of the weights is unique and shared.

    *number_bytes*: average bytes of a weight.
    """
    kernels = [group.kernels for group in groups]
    unique = number_bytes * sum(counts.unique for counts in kernels)
    shared = number_bytes * sum(counts.by_all + counts.by_some for counts in kernels)
    layers = [row for group in groups for row in group.layers]
    largest = _largest_layers(layers, "weight_bytes", after.weight_bytes)
    sentence = (
        f"memory: weights {_mb(after.weight_bytes)} instead of {_mb(before.weight_bytes)}, in all with tables and "
        f"activations {_mb(after.total_bytes)} instead of {_mb(before.total_bytes)}; {_mb(unique)} of weights are "
        f"different, {_mb(shared)} of them shared; {largest} of what is stored"
    )
    planned = any(len(row.seconds) > 1 for row in layers)
    if not planned or after.weight_bytes <= SPARE * unique:
        return sentence
    return f"{sentence}. {_copies_sentence(groups)}"


def _copies_sentence(groups: Sequence[Summary]) -> str:
    """Say that weights are stored more than once, and how to avoid it.

    With several groups there are limits, within which --slack does not apply.
    """
    if len(groups) > 1:
        return "This is fast and keeps copies"
    unique_way = next((way for way in groups[0].ways if way.name == UNIQUE), None)
    price = "" if unique_way is None else f", in {_ms(unique_way.measured_s or unique_way.predicted_s)}"
    return f"This is fast and keeps copies; more --slack allows fewer, --form {UNIQUE} stores each once{price}"


def _largest_layers(layers: Sequence[LayerRow], key: str, total: float) -> str:
    """The layers with the largest fraction of *total*, as text. *key*: the field of ``LayerRow`` that is summed."""
    sum_by_layer: Counter[str] = Counter()
    for row in layers:
        sum_by_layer[row.name] += getattr(row, key)
    named: list[str] = []
    named_sum = 0.0
    for name, amount in sum_by_layer.most_common(FEW_LAYERS):
        named.append(name)
        named_sum += amount
        if named_sum >= MANY * total:
            break
    return f"{', '.join(named)} take{'s' * (len(named) == 1)} {named_sum / total if total else 0:.0%}"


def _mb(count: float) -> str:
    return f"{count / 1e6:.2f} MB" if count < 1e8 else f"{count / 1e6:.0f} MB"


def _ms(seconds: float) -> str:
    """Milliseconds to three digits."""
    return f"{seconds * 1e3:#.3g} ms" if seconds < 0.0995 else f"{seconds * 1e3:.0f} ms"


WAYS = (
    "", "MMACs", "weights MB", "of separate", "tables MB", "activations MB", "total MB", "launches", "predicted ms",
    "measured ms", "speed-up",
)  # fmt: skip
"""Columns of ``ways_table``."""


def tables(stitching: Stitching) -> tuple[ResultTable, ...]:
    """The table of the ways to run the models, with sentences about time and memory as notes."""
    return (ways_table(stitching)._replace(notes=tuple(sentences(stitching))),)


def figure(stitching: Stitching) -> Figure:
    """A picture of the time and the weights of each way to run the models."""
    ways = [(label, way) for way, label, _ in labelled_ways(stitching)]
    timed = all(way.measured_s is not None for _, way in ways)
    columns = {
        "measured ms" if timed else "predicted ms": [1e3 * _seconds(way, measured=timed) for _, way in ways],
        "weights MB": [way.weight_bytes / 1e6 for _, way in ways],
    }
    labels = [label for label, _ in ways]
    panels = [
        Panel(
            [Bars(labels, {column: values}, {column: PALETTE[0]}, flat=True, values="%.3g")],
            x=Axis(label=column),
            grid="",
        )
        for column, values in columns.items()
    ]
    return draw(title(stitching), panels, size=(11.0, 1.6 + 0.42 * len(ways)), columns=2, share_y=True)


def title(stitching: Stitching) -> str:
    """One line: what was stitched, for how many rows, and by which machine it was planned."""
    family, options = stitching.family, stitching.options
    count = f"{family.tasks} models" if family.tasks > 1 else "1 model, which shares with none"
    equal_rows = len(set(family.batches)) == 1
    suffix = " each" * (family.tasks > 1)
    rows = f"{family.batches[0]}{suffix}" if equal_rows else ", ".join(map(str, family.batches))
    threads = f"{options.used_threads} thread{'s' * (options.used_threads != 1)}"
    by = f"ONNX Runtime, {threads}" if options.measures else f"{options.machine} as described"
    return f"{count}; rows: {rows}{', or any' * options.dynamic}; {by}"


def ways_table(stitching: Stitching) -> ResultTable:
    """The ways to run the models side by side, without the measured column if nothing was timed."""
    timed = stitching.before.measured_s is not None
    rows = [
        TableRow((label, *_way_cells(way, stitching.before, timed=timed, is_group=label.startswith("group "))), best)
        for way, label, best in labelled_ways(stitching)
    ]
    if timed:
        return ResultTable(title(stitching), WAYS, tuple(rows))
    measured_column = WAYS.index("measured ms")
    columns = [column for column in range(len(WAYS)) if column != measured_column]
    shown = tuple(row._replace(cells=tuple(row.cells[column] for column in columns)) for row in rows)
    return ResultTable(title(stitching), tuple(WAYS[column] for column in columns), shown)


def labelled_ways(stitching: Stitching) -> list[tuple[Way, str, bool]]:
    """Every way to run the models, its label, and whether it is the result of the stitching."""
    groups = stitching.summaries
    separate_label = "one after another" if stitching.family.tasks > 1 else "as it is"
    rows = [(stitching.before, separate_label, False)]
    if len(groups) == 1:
        rows.append((groups[0].stitched, _stitched_label(groups[0]), True))
        rivals = groups[0].ways[2:]  # behind the sequential and the stitched way
        rows += [(way, _rival_label(way, separate_label), False) for way in rivals]
    else:
        rows += [(group.stitched, f"group {n}: {', '.join(group.models)}", False) for n, group in enumerate(groups)]
        rows.append((stitching.after, "all groups", True))
    return rows


def _stitched_label(summary: Summary) -> str:
    return f"stitched: {summary.form}{' in slabs' * summary.stitched.slabs}"


def _rival_label(way: Way, separate_label: str) -> str:
    return way.name.replace("sequential", separate_label) + " in slabs" * way.slabs


def _way_cells(way: Way, separate: Way, *, timed: bool, is_group: bool) -> tuple[str, ...]:
    """The cells of a way to run the models.

    *separate*: the models one after another, to compare with. *is_group*: the way runs only one group of the models, so
    that it is not compared.
    """
    ratio = "" if is_group else number(way.weight_bytes / separate.weight_bytes if separate.weight_bytes else None, 3)
    seconds, separate_s = (way.measured_s, separate.measured_s) if timed else (way.predicted_s, separate.predicted_s)
    gain = "" if is_group else number(separate_s / seconds if seconds and separate_s else None, 2)
    return (
        number(way.macs, 1, scale=1e-6),
        number(way.weight_bytes, scale=1e-6),
        ratio,
        number(way.table_bytes, scale=1e-6),
        number(way.activation_bytes, scale=1e-6),
        number(way.total_bytes, scale=1e-6),
        str(way.launches),
        number(way.predicted_s, 2, scale=1e3),
        number(way.measured_s, 2, scale=1e3),
        gain,
    )


BODY_WAYS = ("", "weights MB", "of separate", "measured ms", "speed-up")
"""Columns of ``way_rows``."""
STEPS = ("step", "operator", "kB", "models", "shared by", "own")
"""Columns of ``step_rows``."""
_FEW = 8
"""At most this many layers are named in a sentence; ``--layers`` shows all."""
_NUMBERED = re.compile(r"(.*?(?:\.|layer|block)_?\d+)(?=[./]|$)")
"""The name of a numbered layer at the beginning of a step's name, as ``encoder.layer.3``."""


def body_report(stitching: BodyStitching, files: Sequence[Path]) -> dict[str, Any]:
    """The report of a stitched body, ready for JSON."""
    return {
        "format": 1,
        "kind": "stitched body",
        "version": __version__,
        "models": {name: str(path) for name, path in stitching.files.items()},
        "files": [str(file) for file in files],
        "largest_difference": stitching.difference and stitching.difference.relative,
        "fill": stitching.fill,
        "weight_bytes": {"sequential": stitching.apart_bytes, "stitched": stitching.weight_bytes},
        "measured_s": dict(stitching.times_s),
        "reordered": stitching.reordered,
        "steps": [
            {
                "name": step.name,
                "op": step.op,
                "bytes": step.bytes,
                "rank": step.rank,
                "own": list(step.own),
                "shared_by": [[stitching.names[task] for task in crew] for crew in step.crews],
            }
            for step in stitching.shared
        ],
    }


def way_rows(stitching: BodyStitching) -> list[tuple[str, ...]]:
    """Rows of the table ``BODY_WAYS``: the models one after another, and as one body."""
    rows: list[tuple[str, ...]] = []
    for name, way, size in (
        ("one after another", "sequential", stitching.apart_bytes),
        ("stitched", "stitched", stitching.weight_bytes),
    ):
        seconds, separate_s = stitching.times_s.get(way), stitching.times_s.get("sequential")
        times = (f"{seconds * 1e3:.2f}", f"{separate_s / seconds:.2f}") if seconds and separate_s else ("", "")
        rows.append((name, f"{size / 1e6:.3f}", f"{size / stitching.apart_bytes:.3f}", *times))
    return rows


def step_rows(stitching: BodyStitching) -> list[tuple[str, ...]]:
    """Rows of the table ``STEPS``: every step that has weights, with the models that share them."""
    return [
        (
            step.name, step.op, f"{step.bytes / 1e3:.1f}", str(sum(map(len, step.crews))),
            _sharers_text(stitching, step), _own_text(step),
        )
        for step in stitching.shared
    ]  # fmt: skip


def body_sentences(stitching: BodyStitching) -> list[str]:
    """Sentences about the sharing, the lengths of rows, early exits, and the exactness of a body."""
    total_bytes = sum(step.bytes for step in stitching.shared)
    shared_bytes = sum(step.bytes for step in stitching.shared if _sharers_text(stitching, step) == "all")
    own_layers = list(
        dict.fromkeys(_layer_name(step.name) for step in stitching.shared if _sharers_text(stitching, step) != "all")
    )
    more = f" and {len(own_layers) - _FEW} more (--layers names all steps)" if len(own_layers) > _FEW else ""
    own_text = f"; not by all: {', '.join(own_layers[:_FEW])}{more}" if own_layers else ""
    lines = [f"sharing: {shared_bytes / max(total_bytes, 1):.0%} of a model's weights are shared by all{own_text}"]
    if low_rank_steps := [step for step in stitching.shared if step.rank]:
        rank = max(step.rank for step in low_rank_steps)
        lines.append(f"low rank: {len(low_rank_steps)} products are shared but for parts of rank {rank} at most")
    if changed_steps := [step for step in stitching.shared if step.own]:
        kinds, count = _own_kinds(changed_steps), len(changed_steps)
        lines.append(f"few differences: {count} weights are shared but for {kinds} (--layers says where)")
    if stitching.reordered:
        lines.append(
            f"order: {stitching.reordered} products are another model's, with heads or channels in another order"
        )
    if stitching.long and stitching.fill is None:
        lines.append("lengths: no input masks padding, so that all rows of a run must be of one length")
    elif stitching.long and stitching.fill is not None:
        filled = ", ".join(f"{name} with {number:g}" for name, number in stitching.fill.items())
        lines.append(f"lengths: any in one run; shorter rows are filled, {filled}")
    if any(stitching.body.exits):
        models = ", ".join(name for name, exits in zip(stitching.names, stitching.body.exits, strict=True) if exits)
        lines.append(
            f"exits: {models} answer with the first confident exit, but all rows are computed to the end of the body"
        )
    if stitching.difference is not None:
        lines.append(
            f"largest difference to the models: {stitching.difference.relative:.1e} of an output's largest number"
        )
    return lines


def _layer_name(name: str) -> str:
    """The numbered layer that a step belongs to, by its name; else the module in front of the last slash."""
    if match := _NUMBERED.match(name):
        return match[1]
    return name.rpartition("/")[0] if name.startswith("/") else name


def _own_kinds(steps: Sequence[SharedStep]) -> str:
    """The kinds of the models' own differences, as text: of "3 columns", only "columns"."""
    return ", ".join(sorted({difference.split()[-1] for step in steps for difference in step.own}))


def _own_text(step: SharedStep) -> str:
    """The differences of models to the shared weights of *step*, as text."""
    return ", ".join(([f"rank {step.rank}"] if step.rank else []) + list(step.own))


def _sharers_text(stitching: BodyStitching, step: SharedStep) -> str:
    """The models that share the weights of *step*, as text."""
    if step.crews == (tuple(range(len(stitching.names))),):
        return "all"
    shared = [crew for crew in step.crews if len(crew) > 1]
    return "; ".join(", ".join(stitching.names[task] for task in crew) for crew in shared) or "none"
