"""A search for number formats as tables: formats by layer, and other methods beside ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.reports.tables import ResultTable, TableRow, number
from weft_tune.network import Role, Target
from weft_tune.numbers.configuration import Configuration
from weft_tune.numbers.spelling import spell
from weft_tune.result import TuningResult

if TYPE_CHECKING:
    from weft.reports.pictures import Figure

LAYERS = ("layer", "weights", "format", "kB before", "kB", "inputs", "format", "kB before", "kB")
METHODS = ("method", "weights kB", "times smaller", "activations kB", "all kB", "times smaller", "score", "evaluated")


def tables(result: TuningResult) -> tuple[ResultTable, ...]:
    """What a search came to, as ``weft tune`` prints it."""
    return (layers_table(result), *([methods_table(result)] if result.others else []))


def figure(result: TuningResult) -> Figure:
    """The score of every trial, and how small the network became."""
    from weft_tune.pages.picture import draw_search

    return draw_search(result.tuning)


def layers_table(result: TuningResult) -> ResultTable:
    """The format of every layer."""
    tuning = result.tuning
    rows = []
    for target in tuning.network.targets:
        cells = [_object(target, role, tuning.configuration) for role in ("weight", "input")]
        rows.append(TableRow((target.name, *cells[0], *cells[1])))
    whole = [_total(tuning.network.weights, tuning.weight_bits), _total(tuning.network.inputs, tuning.activation_bits)]
    rows.append(TableRow(("all", *whole[0], *whole[1]), best=True))
    title = f"{tuning.network.name}: formats that keep {1 - tuning.margin:.4g} of the score, on {tuning.platform}"
    return ResultTable(title, LAYERS, tuple(rows))


def methods_table(result: TuningResult) -> ResultTable:
    """Other methods on the same samples."""
    before = result.methods[0]
    whole = before.weight_bits + before.activation_bits
    rows = []
    for each in result.methods:
        bits = each.weight_bits + each.activation_bits
        cells = (
            each.method,
            kilobytes(each.weight_bits),
            number(before.weight_bits / each.weight_bits if each.weight_bits else None, 2),
            kilobytes(each.activation_bits),
            kilobytes(bits),
            number(whole / bits, 2),
            f"{each.score:.4f}" + ("" if each.feasible else " too low"),
            str(each.evaluations),
        )
        rows.append(TableRow(cells, best=each.method == "weft"))
    return ResultTable("other methods, on the same samples", METHODS, tuple(rows))


def kilobytes(bits: float) -> str:
    return f"{bits / 8e3:,.2f}"


def _object(target: Target, role: Role, configuration: Configuration) -> tuple[str, ...]:
    forms = list(dict.fromkeys(spell(configuration[name]) for name in target.objects(role)))
    bits, size = max(configuration[name].bits for name in target.objects(role)), target.size(role)
    return f"{size:,}", ", ".join(forms), kilobytes(size * 32), kilobytes(size * bits)


def _total(values: int, bits: int) -> tuple[str, ...]:
    return f"{values:,}", "", kilobytes(values * 32), kilobytes(bits)
