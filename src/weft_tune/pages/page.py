"""A search for number formats as one page that opens from a file: what came out, the formats, and the way there.

The page is ``tuning.html`` beside this module; here its data is made.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from weft.reports.page import write_page
from weft.reports.words import layer_meaning
from weft_tune.network import ROLES, Target
from weft_tune.numbers.spelling import spell
from weft_tune.pages.picture import draw_search, move_text
from weft_tune.pages.words import format_meaning
from weft_tune.result import TuningResult
from weft_tune.trials import FLOAT32_BITS, PHASES, Tuning

LABELS = (
    "in the steps below, short for EXP 4 8: E is EXP, I FIXED, F FLOAT, B BIN, T two's complement; the bits; the bias"
)
"""How ``numbers.spelling.label`` is read."""


def write_tuning_page(path: Path | str, result: TuningResult, told: Sequence[str]) -> None:
    """Write the page, the search drawn in it; *told* is what came out in sentences."""
    with TemporaryDirectory() as folder:
        picture = Path(folder) / "search.svg"
        draw_search(result.tuning, picture)
        drawn = b64encode(picture.read_bytes()).decode("ascii")
    write_page(path, "tuning.html", {**page_data(result, told), "picture": drawn}, "weft_tune.pages")


def page_data(result: TuningResult, told: Sequence[str]) -> dict[str, Any]:
    """All but the picture."""
    tuning = result.tuning
    return {
        "title": tuning.network.name,
        "subtitle": f"formats that keep {1 - tuning.margin:.4g} of the score, on {tuning.platform}, {tuning.layerwise}",
        "cards": _cards(result),
        "told": list(told),
        "layers": [_layer(target, tuning) for target in tuning.network.targets],
        "words": _words(tuning),
        "methods": list(_methods(result)),
        "path": list(_path(tuning)),
    }


def _cards(result: TuningResult) -> list[tuple[str, str, str]]:
    """What it is about, how much, and compared with what."""
    tuning = result.tuning
    before = [_kb(FLOAT32_BITS * count) for count in (tuning.network.weights, tuning.network.inputs)]
    return [
        ("weights", f"{tuning.weight_reduction:.1f} times smaller", f"{_kb(tuning.weight_bits)} from {before[0]}"),
        ("one sample's activations", _kb(tuning.activation_bits), f"from {before[1]}"),
        ("score", f"{tuning.score:.4f}", f"from {tuning.base['full']:.4f}, {tuning.thresholds['full']:.4f} asked"),
        ("search", f"{tuning.iterations:,} configurations", f"{result.seconds:,.1f} s"),
    ]


def _layer(target: Target, tuning: Tuning) -> list[Any]:
    """Name, then for weights and inputs: how many, format, bits, and kilobytes before and after."""
    row: list[Any] = [target.name]
    for role in ROLES:
        forms = [tuning.configuration[name] for name in target.objects(role)]
        bits, size = max(form.bits for form in forms), target.size(role)
        spelled = ", ".join(dict.fromkeys(map(spell, forms)))
        row += [f"{size:,}", spelled, bits, _kb(size * FLOAT32_BITS), _kb(size * bits)]
    return row


def _words(tuning: Tuning) -> dict[str, str]:
    """What the names of formats mean, the smallest first, then those of layers as far as they tell."""
    objects = (name for target in tuning.network.targets for role in ROLES for name in target.objects(role))
    formats = sorted({tuning.configuration[name] for name in objects}, key=lambda form: (form.bits, spell(form)))
    layers = {target.name: layer_meaning(target.name) for target in tuning.network.targets}
    told = {name: meaning for name, meaning in layers.items() if meaning}
    return {spell(form): format_meaning(form) for form in formats} | {"E4(8)": LABELS} | told


def _methods(result: TuningResult) -> Iterator[list[str]]:
    for each in result.methods if result.others else ():
        score = f"{each.score:.4f}" + ("" if each.feasible else " too low")
        yield [each.method, _kb(each.weight_bits), _kb(each.activation_bits), score, str(each.evaluations)]


def _path(tuning: Tuning) -> Iterator[list[str]]:
    """Every step that was kept: phase, step, what it changed, score, and the objective as a share of the base's."""
    ways = [tuning.base_configuration, *(kept.configuration for kept in tuning.path)]
    for (before, after), kept in zip(pairwise(ways), tuning.path, strict=True):
        if tuning.base_objective > 0:
            objective = f"{kept.objective / tuning.base_objective:.2%}"
        else:
            objective = f"{kept.objective:.6g}"
        what = move_text(before, after) or "as it was"
        yield [f"{kept.phase} {PHASES[kept.phase]}", kept.step, what, f"{kept.score:.4f}", objective]


def _kb(bits: int) -> str:
    return f"{bits / 8e3:,.2f} kB"
