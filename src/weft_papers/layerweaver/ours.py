"""The distance of weft's own policy from the bound: with a free and a fixed mix of queries, and with a small buffer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from weft.reports.exhibits import Axis, Curve, Panel
from weft.simulation.saturated import make_setting
from weft.workloads import Saturated
from weft_papers import pictures
from weft_papers.base import Exhibit, Row, Table
from weft_papers.layerweaver.lab import (
    CUT_PAIRS,
    FAILSAFE_OFF,
    PAIRS,
    Models,
    Options,
    Scene,
    geomean,
    profile,
    report_of_run,
)

TOKENS = (16, 32, 48, 64)  # sequence lengths of the language models
SMALL_MIB = 12.0  # a weight buffer smaller than the preset's, where cutting layers into chunks matters
CUT_TOKENS = (16, 32, 64)  # the same, where layers are cut
RIVALS: tuple[tuple[str, Options], ...] = (("round-robin", ()), ("aimt", ()), ("layerweaver", FAILSAFE_OFF))
ROLLOUTS_ONLY: Options = (("trial", False),)  # without the trial that chooses among alternatives before the run
MIXES: tuple[tuple[str, tuple[float, ...] | None], ...] = (("free mix", None), ("mix 1:1", (1.0, 1.0)))


def near_the_bound(out: Path, scenes: tuple[Scene, ...], queries: int, pairs: tuple[Models, ...] = PAIRS) -> Exhibit:
    """Report weft's fraction of the bound, mean and worst pair, for every device, sequence length and mix."""
    panels, body, rows = [], [], []
    for letter, base in zip("ab", scenes, strict=True):
        curves, positions = [], range(len(TOKENS))
        for (label, mix), colour, mark in zip(MIXES, (pictures.POLICIES["weft"], "#cc79a7"), "Ds", strict=True):
            fractions = [_fractions(replace(base, seq_len=tokens), queries, mix, pairs) for tokens in TOKENS]
            means, worst = [geomean(values) for values in fractions], [min(values) for values in fractions]
            curves += [
                Curve(positions, means, f"{label}, geomean", colour, mark),
                Curve(positions, worst, f"{label}, worst pair", colour, mark, ":", hollow=True),
            ]
            body += [
                (base.npu.name, str(tokens), label, f"{means[index]:.4f}", f"{worst[index]:.4f}")
                for index, tokens in enumerate(TOKENS)
            ]
            rows += _rows(base, label, min(means), min(worst))
        x = Axis(label="tokens", names=[str(tokens) for tokens in TOKENS])
        heading = f"({letter}) {base.npu.name}, batch {base.batch}"
        panels.append(Panel(curves, heading, x, Axis(label="fraction of the bound")))
    layout = {"size": (12, 4.4), "columns": len(scenes), "share_y": True}
    picture = pictures.picture(out, "weft-bound", "weft: fraction of the bound over the pairs", panels, **layout)
    header = ("device", "tokens", "mix", "geomean", "worst pair")
    return Exhibit(tuple(rows), (Table("weft: fraction of the bound", header, tuple(body)),), (picture,))


def _fractions(
    scene: Scene, queries: int, mix: tuple[float, ...] | None, pairs: tuple[Models, ...]
) -> tuple[float, ...]:
    """Weft's fraction of the bound on every pair; *mix*: queries of each model in a round, None for a free choice."""
    return tuple(report_of_run(scene, pair, "weft", queries, (), mix).fraction_of_bound for pair in pairs)


def _rows(base: Scene, label: str, lowest_mean: float, lowest: float) -> list[Row]:
    """Rows of a device and a mix: the lowest mean and the lowest single fraction over all sequence lengths."""
    figure = f"weft, {base.npu.name} batch {base.batch}"
    bound_text = "of the bound of that mix" if label != "free mix" else "of the two-resource bound"
    why = f"not in the paper; the lowest over {', '.join(map(str, TOKENS))} tokens, {bound_text}, start-up included"
    return [
        Row(figure, f"fraction of the bound, {label}, geomean", None, lowest_mean, "", why),
        Row(figure, f"fraction of the bound, {label}, worst pair", None, lowest, "", why),
    ]


class Margin(NamedTuple):
    """Fractions of the bound that policies reach on one pair with a small weight buffer."""

    rollouts: float
    """``weft`` without its trial, whole layers."""
    whole: float
    """``weft`` with whole layers."""
    cut: float
    """``weft`` with the pieces it chose."""
    rival: float
    """The best policy of RIVALS, with whole layers."""
    rival_cut: float
    """The best policy of RIVALS, with the pieces that ``weft`` chose."""
    charged: float
    """``weft`` with pieces of its choice, if every piece after a layer's first costs a fill and drain of the array."""
    decisions: float
    """Pieces issued for each layer by ``weft`` with pieces of its choice."""


def small_buffer(scenes: tuple[Scene, ...], queries: int, pairs: tuple[Models, ...] = CUT_PAIRS) -> Exhibit:
    """Report fractions of the bound with a quarter of the paper's buffer, for whole layers and for cut ones."""
    rows, body = [], []
    for base in scenes:
        for tokens in CUT_TOKENS:
            scene = replace(base, seq_len=tokens).on(weight_buffer_mib=SMALL_MIB)
            margins = [_margin(scene, pair, queries) for pair in pairs]
            means = Margin(*(geomean(column) for column in zip(*margins, strict=True)))
            body.append((base.npu.name, str(tokens), *(f"{value:.3f}" for value in means)))
            rows.append(_cut_row(scene, means))
    header = (
        "device", "tokens", "weft, no trial", "weft, whole", "weft, its pieces", "best rival, whole",
        "best rival, same pieces", "weft, pieces charged", "issues per layer",
    )  # fmt: skip
    title = f"weft with {SMALL_MIB:g} MiB: fraction of the bound, geomean of {len(pairs)} pairs"
    return Exhibit(tuple(rows), (Table(title, header, tuple(body)),))


def _margin(scene: Scene, pair: Models, queries: int) -> Margin:
    """Run a pair under weft's variants and the best rival, with whole layers and with pieces."""

    def fraction(policy: str, options: Options = (), pieces: int | None = None) -> float:
        return report_of_run(scene, pair, policy, queries, options, None, pieces).fraction_of_bound

    # A systolic array takes this many cycles to fill and to drain.
    fill_cycles = scene.npu.array_rows + scene.npu.array_columns - 2
    cut = report_of_run(scene, pair, "weft", queries)
    return Margin(
        rollouts=fraction("weft", ROLLOUTS_ONLY),
        whole=fraction("weft", (), 1),
        cut=cut.fraction_of_bound,
        rival=max(fraction(policy, options, 1) for policy, options in RIVALS),
        rival_cut=max(fraction(policy, options, cut.pieces) for policy, options in RIVALS),
        charged=report_of_run(scene.on(piece_cycles=fill_cycles), pair, "weft", queries).fraction_of_bound,
        decisions=_issues(scene, pair, cut.pieces) / _issues(scene, pair, 1),
    )


def _issues(scene: Scene, pair: Models, pieces: int) -> int:
    """The number of layers or pieces issued for one query of each model."""
    setting = make_setting([profile(scene, model) for model in pair], scene.npu, Saturated(1), pieces=pieces)
    return sum(map(len, setting.programs))


def _cut_row(scene: Scene, means: Margin) -> Row:
    """Row with weft's fraction of the bound when it may cut layers; *means*: over the pairs."""
    return Row(
        f"weft, {scene.npu.name} batch {scene.batch}",
        f"fraction of the bound with {SMALL_MIB:g} MiB, {scene.seq_len} tokens, CNN and encoder, geomean", None,
        means.cut, "",
        f"not in the paper; {means.whole:.3f} with whole layers; the best other policy of each pair {means.rival:.3f}, "
        f"with the same pieces {means.rival_cut:.3f}; {means.charged:.3f} if a piece cost a fill of the array",
    )  # fmt: skip
