"""How near our own policy comes to the bound: free mix and one query of each model in turn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from weft.papers import pictures
from weft.papers.base import Part, Row, Table
from weft.papers.layerweaver.lab import PAIRS, Models, Scene, geomean, measured

TOKENS = (16, 32, 48, 64)
MIXES: tuple[tuple[str, tuple[float, ...] | None], ...] = (("free mix", None), ("mix 1:1", (1.0, 1.0)))


def near_the_bound(out: Path, scenes: tuple[Scene, ...], queries: int, pairs: tuple[Models, ...] = PAIRS) -> Part:
    """Geomean and worst fraction of the bound over the pairs, per device, length and mix."""
    body: list[tuple[str, ...]] = []
    rows: list[Row] = []
    figure, axes = pictures.canvas(12, 4.4, 1, len(scenes), sharey=True)
    for one, letter, base in zip(axes, "ab", scenes, strict=True):
        for (label, mix), (colour, mark) in zip(
            MIXES, ((pictures.POLICIES["weft"], "D"), ("#cc79a7", "s")), strict=True
        ):
            fractions = [_fractions(replace(base, seq_len=tokens), queries, mix, pairs) for tokens in TOKENS]
            means, worst = [geomean(values) for values in fractions], [min(values) for values in fractions]
            places = range(len(TOKENS))
            one.plot(places, means, "-", color=colour, marker=mark, ms=5, label=f"{label}, geomean")
            one.plot(places, worst, ":", color=colour, marker=mark, ms=5, mfc="white", label=f"{label}, worst pair")
            body += [
                (base.npu.name, str(tokens), label, f"{means[i]:.4f}", f"{worst[i]:.4f}")
                for i, tokens in enumerate(TOKENS)
            ]
            rows += _rows(base, label, min(means), min(worst))
        one.set_xticks(range(len(TOKENS)), [str(tokens) for tokens in TOKENS])
        one.set_xlabel("tokens")
        pictures.heading(one, f"({letter}) {base.npu.name}, batch {base.batch}")
    axes[0].set_ylabel("fraction of the bound")
    pictures.legend(figure, axes[0])
    picture = pictures.save(figure, out, "weft-bound", "weft: fraction of the bound over the pairs")
    header = ("device", "tokens", "mix", "geomean", "worst pair")
    return Part(tuple(rows), (Table("weft: fraction of the bound", header, tuple(body)),), (picture,))


def _fractions(
    scene: Scene, queries: int, mix: tuple[float, ...] | None, pairs: tuple[Models, ...]
) -> tuple[float, ...]:
    return tuple(measured(scene, pair, "weft", queries, (), mix).fraction_of_bound for pair in pairs)


def _rows(base: Scene, label: str, lowest_mean: float, lowest: float) -> list[Row]:
    figure = f"weft, {base.npu.name} batch {base.batch}"
    what = "of the bound of that mix" if label != "free mix" else "of the two-resource bound"
    why = f"not in the paper; the lowest over {', '.join(map(str, TOKENS))} tokens, {what}, start-up included"
    return [
        Row(figure, f"fraction of the bound, {label}, geomean", None, lowest_mean, "", why),
        Row(figure, f"fraction of the bound, {label}, worst pair", None, lowest, "", why),
    ]
