"""A search for number formats as tables, and as one page that opens from a file: results, formats, and the steps.

The page is ``tuning.html`` in this folder; this module computes its data.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from weft.reports.page import write_page
from weft.reports.tables import ResultTable, TableRow, number
from weft.reports.words import layer_meaning
from weft_tune.network import ROLES, Role, Target
from weft_tune.numbers.configuration import describe_change
from weft_tune.numbers.format import Format, TwosComplement, spell
from weft_tune.result import FLOAT32_BITS, PHASES, OtherMethod, Tuning, TuningResult

if TYPE_CHECKING:
    from weft.reports.pictures import Figure

LABEL_KEY = (
    "in the steps below, short for EXP 4 8: E is EXP, I FIXED, F FLOAT, B BIN, T two's complement; the bits; the bias"
)
"""The key to ``numbers.format.label``."""
LAYER_COLUMNS = ("layer", "weights", "format", "kB before", "kB", "inputs", "format", "kB before", "kB")
METHOD_COLUMNS = (
    "method", "weights kB", "times smaller", "activations kB", "all kB", "times smaller", "score", "evaluated",
)  # fmt: skip


def tables(result: TuningResult) -> tuple[ResultTable, ...]:
    """A search as ``weft tune`` prints it: formats by layer, and other methods where there are any."""
    return (layers_table(result), *([methods_table(result)] if result.others else []))


def figure(result: TuningResult) -> Figure:
    """A picture of the search: the score of every trial, and the size of the network."""
    from weft_tune.pages.picture import draw_search  # loads matplotlib, which tables do without

    return draw_search(result.tuning)


def layers_table(result: TuningResult) -> ResultTable:
    """The format of every layer."""
    tuning, network = result.tuning, result.tuning.network
    rows = [TableRow((target.name, *_cells(target, tuning))) for target in network.targets]
    totals = ((network.weights, tuning.weight_bits), (network.inputs, tuning.activation_bits))
    cells = [(f"{count:,}", "", kilobytes(count * FLOAT32_BITS), kilobytes(bits)) for count, bits in totals]
    rows.append(TableRow(("all", *cells[0], *cells[1]), best=True))
    title = f"{network.name}: formats that keep {1 - tuning.margin:.4g} of the score, on {tuning.platform}"
    return ResultTable(title, LAYER_COLUMNS, tuple(rows))


def _cells(target: Target, tuning: Tuning) -> list[str]:
    """For weights and inputs: their number, format, and kilobytes before and after."""
    rows = [_object_cells(target, role, tuning) for role in ROLES]
    return [cell for count, formats, _, before, after in rows for cell in (count, formats, before, after)]


def _object_cells(target: Target, role: Role, tuning: Tuning) -> tuple[str, str, int, str, str]:
    """The number of values, their formats and bits, and kilobytes before and after."""
    forms = [tuning.configuration[name] for name in target.objects(role)]
    bits, size = max(form.bits for form in forms), target.size(role)
    spelled = ", ".join(dict.fromkeys(map(spell, forms)))
    return f"{size:,}", spelled, bits, kilobytes(size * FLOAT32_BITS), kilobytes(size * bits)


def methods_table(result: TuningResult) -> ResultTable:
    """A table of all methods, scored on the same samples: sizes, score and number of evaluations."""
    before = result.methods[0]
    float32_bits = before.weight_bits + before.activation_bits
    rows = []
    for method in result.methods:
        bits = method.weight_bits + method.activation_bits
        cells = (
            method.method,
            kilobytes(method.weight_bits),
            number(before.weight_bits / method.weight_bits if method.weight_bits else None, 2),
            kilobytes(method.activation_bits),
            kilobytes(bits),
            number(float32_bits / bits, 2),
            _score(method),
            str(method.evaluations),
        )
        rows.append(TableRow(cells, best=method.method == "weft"))
    return ResultTable("other methods, on the same samples", METHOD_COLUMNS, tuple(rows))


def kilobytes(bits: float) -> str:
    return f"{bits / 8e3:,.2f}"


def _score(method: OtherMethod) -> str:
    """The score as text, marked if it misses the threshold."""
    return f"{method.score:.4f}" + ("" if method.feasible else " too low")


# The page


def write_tuning_page(path: Path | str, result: TuningResult, sentences: Sequence[str]) -> None:
    """Write the page, with a picture of the search; *sentences* sum up the result."""
    from weft_tune.pages.picture import draw_search

    with TemporaryDirectory() as folder:
        picture = Path(folder) / "search.svg"
        draw_search(result.tuning, picture)
        encoded = b64encode(picture.read_bytes()).decode("ascii")
    write_page(path, "tuning.html", {**page_data(result, sentences), "picture": encoded}, "weft_tune.pages")


def page_data(result: TuningResult, sentences: Sequence[str]) -> dict[str, Any]:
    """The data of the page without the picture."""
    tuning = result.tuning
    return {
        "title": tuning.network.name,
        "subtitle": f"formats that keep {1 - tuning.margin:.4g} of the score, on {tuning.platform}, {tuning.layerwise}",
        "cards": _cards(result),
        "told": list(sentences),
        "layers": [_layer_row(target, tuning) for target in tuning.network.targets],
        "words": _words(tuning),
        "methods": list(_method_rows(result)),
        "path": list(_path_rows(tuning)),
    }


def _cards(result: TuningResult) -> list[tuple[str, str, str]]:
    """The key numbers on top: a heading, a value, and the value before."""
    tuning = result.tuning
    before = [_kb(FLOAT32_BITS * count) for count in (tuning.network.weights, tuning.network.inputs)]
    return [
        ("weights", f"{tuning.weight_reduction:.1f} times smaller", f"{_kb(tuning.weight_bits)} from {before[0]}"),
        ("one sample's activations", _kb(tuning.activation_bits), f"from {before[1]}"),
        ("score", f"{tuning.score:.4f}", f"from {tuning.base['full']:.4f}, {tuning.thresholds['full']:.4f} asked"),
        ("search", f"{tuning.iterations:,} configurations", f"{result.seconds:,.1f} s"),
    ]


def _layer_row(target: Target, tuning: Tuning) -> list[Any]:
    """Name, then for weights and inputs: number, format, bits, and kilobytes before and after."""
    row: list[Any] = [target.name]
    for role in ROLES:
        *cells, before, after = _object_cells(target, role, tuning)
        row += [*cells, f"{before} kB", f"{after} kB"]
    return row


def _words(tuning: Tuning) -> dict[str, str]:
    """Explanations: of the formats, the narrowest first, then of layers whose names have a meaning."""
    used = {tuning.configuration[name] for name in tuning.network.objects}
    formats = sorted(used, key=lambda form: (form.bits, spell(form)))
    layers = {target.name: layer_meaning(target.name) for target in tuning.network.targets}
    meanings = {name: meaning for name, meaning in layers.items() if meaning}
    label_example = {"E4(8)": LABEL_KEY}
    return {spell(form): format_meaning(form) for form in formats} | label_example | meanings


def _method_rows(result: TuningResult) -> Iterator[list[str]]:
    for method in result.methods if result.others else ():
        sizes = _kb(method.weight_bits), _kb(method.activation_bits)
        yield [method.method, *sizes, _score(method), str(method.evaluations)]


def _path_rows(tuning: Tuning) -> Iterator[list[str]]:
    """A row per kept point: phase, step, the change, score, and the objective as a share of the base's."""
    points = [tuning.base_configuration, *(kept.configuration for kept in tuning.path)]
    for (before, after), kept in zip(pairwise(points), tuning.path, strict=True):
        if tuning.base_objective > 0:
            objective = f"{kept.objective / tuning.base_objective:.2%}"
        else:
            objective = f"{kept.objective:.6g}"
        change = describe_change(before, after) or "as it was"
        yield [f"{kept.phase} {PHASES[kept.phase]}", kept.step, change, f"{kept.score:.4f}", objective]


def _kb(bits: int) -> str:
    return f"{kilobytes(bits)} kB"


def format_meaning(form: Format | TwosComplement) -> str:
    """The values of a number format, in words."""
    if isinstance(form, TwosComplement):
        least, most = -(2.0 ** (form.bits - 1)) * form.step, form.largest
        return f"{form.bits} bits in two's complement: {least:.4g} to {most:.4g} in steps of {form.step:.4g}"
    sign = "a sign, " if form.sign_bits else "no sign, "
    plus = "±" if form.sign_bits else ""
    match form.kind:
        case "BIN":
            return f"1 bit: plus or minus {form.largest:.4g}"
        case "FIXED":
            size = f"{form.fraction_bits} bits of magnitude in steps of {form.step:.4g}"
            return f"{form.bits} bits, fixed point: {sign}{size}, up to {plus}{form.largest:.4g}"
        case "EXP":
            span = f"{form.smallest:.4g}" + (f" to {form.largest:.4g}" if form.largest > form.smallest else "")
            what = "a power of two" if form.largest == form.smallest else "powers of two"
            field = f"{_bits_text(form.exponent_bits)} of exponent, bias {form.bias}"
            return f"{form.bits} bits, {what}: zero and {plus}{span} ({field})"
    fields = (
        f"{_bits_text(form.exponent_bits)} of exponent (bias {form.bias}), {_bits_text(form.fraction_bits)} of fraction"
    )
    ieee = ", as in IEEE 754" if form.specials else ""
    return f"{form.bits} bits, floating point{ieee}: {sign}{fields}; {form.smallest:.3g} to {form.largest:.3g}"


def _bits_text(bits: int) -> str:
    return f"{bits} bit{'' if bits == 1 else 's'}"
