"""The speed of rounding values to a number format: 16 Mi float32, out of place, one thread, against a plain copy.

Rivals in the same run: numpy.copyto, and ml_dtypes' round trip through float8_e4m3fn. All variants take turns; the
fastest of the repeats in CPU time counts, so that other processes disturb as little as possible.

    python benchmarks/number_speed.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from machine import machine

from weft.base.jsonfile import write_json
from weft_tune.numbers.arrays import loop_for, rounded
from weft_tune.numbers.format import BIN, EXP, FIXED, FLOAT, FLOAT16, Format, TwosComplement, spell

RESULTS = Path(__file__).parent / "results" / "number_speed.json"
COUNT = 1 << 24
OF_COPY, OVER_ML_DTYPES = 0.7, 15.0
FORMATS = (
    FIXED(8), FIXED(4, -3), FIXED(24), FLOAT(8), FLOAT(4), FLOAT(12), FLOAT(9, exponent_bits=5), EXP(4), EXP(6, 20),
    BIN(), TwosComplement(8, 5), FLOAT16, FLOAT(20), FIXED(32), EXP(9, 255), Format(0, 4, 4, 7),
)  # fmt: skip


def seconds(work: Callable[[], object]) -> float:
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


def measure(repeats: int) -> dict[str, float]:
    """Name -> fastest seconds."""
    x = np.random.default_rng(0).standard_normal(COUNT, np.float32)
    out = np.empty_like(x)
    small = {str(form): rounded(x[:100], form) for form in FORMATS}  # compile
    work: dict[str, Callable[[], object]] = {"copy": lambda: np.copyto(out, x)}
    for form in FORMATS:
        work[spell(form)] = lambda form=form: rounded(x, form, out=out)  # type: ignore[misc]
    work["in place " + spell(FIXED(8))] = lambda: rounded(out, FIXED(8), out=out)
    best = dict.fromkeys(work, np.inf)
    for turn in range(repeats):
        for name, run in work.items():
            best[name] = min(best[name], seconds(run))
        if turn % 20 == 0:
            rival = seconds(lambda: x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
            best["ml_dtypes"] = min(best.get("ml_dtypes", np.inf), rival)
    assert len(small) == len(FORMATS)
    return best


def table(best: dict[str, float]) -> list[dict[str, Any]]:
    loops = {spell(form): loop_for(form) for form in FORMATS}
    rows = []
    for name, took_s in best.items():
        loop = loops.get(name)
        rows.append(
            {
                "what": name,
                "loop": loop.name if loop else "",
                "ms": took_s * 1e3,
                "of_copy_speed": best["copy"] / took_s,
                "times_ml_dtypes": best["ml_dtypes"] / took_s,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=60)
    repeats = parser.parse_args().repeats
    before = machine("numba", "ml_dtypes")
    rows = table(measure(repeats))
    print(f"{'':>22} {'loop':>20} {'ms':>7} {'of copy':>8} {'x ml_dtypes':>12}")
    for row in rows:
        speeds = f"{row['ms']:7.2f} {row['of_copy_speed']:8.2f} {row['times_ml_dtypes']:12.1f}"
        print(f"{row['what']:>22} {row['loop']:>20} {speeds}")
    ours = [row for row in rows if row["loop"]]
    for key, target in (("of_copy_speed", OF_COPY), ("times_ml_dtypes", OVER_ML_DTYPES)):
        met = [row["what"] for row in ours if row[key] >= target]
        print(f"{key} >= {target:g}: {len(met)} of {len(ours)} formats")
    how = {
        "values": COUNT,
        "repeats": repeats,
        "statistic": "fastest, variants interleaved, processor time, one thread",
    }
    RESULTS.parent.mkdir(exist_ok=True)
    write_json(RESULTS, {"format": 1, "machine": {**before, **how}, "rows": rows})


if __name__ == "__main__":
    main()
