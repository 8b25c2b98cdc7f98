"""Is the policy ``abreast`` ever much worse than another way to share a GPU? Random mixes on the simulated H200.

A mix is two to five models of the device, at a load of 0.5 to 1.2 of what one model at a time can serve, each with a
deadline of two to twenty times its stand-alone time. The property: ``abreast`` misses at most 1.2 times as many
deadlines as the best rival, plus one percentage point. Rivals are every rule for late requests under ``abreast``, and
the other policies, each as it is and with late requests last; the best rival is the one with the fewest misses.

Every policy gets the same arrivals per seed and is compared with ``abreast`` in pairs. To save time, a rival gets no
more seeds once the mean of these differences is on one side of the limit with 95 % confidence, and a mix ends once the
property is known to hold or to fail. If ``abreast`` misses less than one percent, no rival runs. If the result is still
open after all seeds, the mean decides.

    python benchmarks/abreast_margin.py --cores 16
    python benchmarks/abreast_margin.py --cores 2 --mixes 24 --seconds 1.5

Everything is simulated, so any machine will do; one simulated second of one policy takes 0.5 to 0.9 s of a core.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from random import Random
from statistics import mean, stdev
from typing import Any, NamedTuple

from machine import machine

from weft.base.jsonfile import write_json
from weft_papers.gpu.lab import at_random, h200, run

RESULTS = Path(__file__).parent / "results" / "abreast_margin.json"
OURS = ("abreast", "weave")
RIVALS = (
    ("abreast", "keep"), ("abreast", "drop"), ("edf", "weave"), ("top-up", "weave"), ("punctual", "demote"),
    ("streams", "weave"), ("streams", "demote"), ("orion", "weave"), ("orion", "demote"),
)  # fmt: skip
"""Policies and what becomes of late requests under them: ``weave`` is each policy's own way, which for ``abreast``,
``edf`` and ``top-up`` is ``demote``. ``reef`` and ``weft+`` were never the best of twelve mixes, and are left out."""
TIMES, POINT = 1.2, 0.01
"""How far above the best rival ``abreast`` may be."""
STUDENT = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""Number of runs -> Student's factor for 95 %, two-sided; of more than eight runs, that of eight is a little wide."""
GOLDEN = 0.6180339887498949


class Mix(NamedTuple):
    """Models that share a GPU."""

    models: tuple[str, ...]
    loads: tuple[float, ...]
    """Of what one at a time can do."""
    dues: tuple[int, ...]
    """When requests are due, in times of what they take alone."""

    @property
    def load(self) -> float:
        return sum(self.loads)

    def __str__(self) -> str:
        parts = zip(self.models, self.loads, self.dues, strict=True)
        return " ".join(f"{model}:{load:.2f}:{due}" for model, load, due in parts)

    @property
    def streams(self) -> list[dict[str, Any]]:
        return [at_random(*values) for values in zip(self.models, self.loads, self.dues, strict=True)]


def draw(place: int) -> Mix:
    """Draw a mix. Loads advance by the golden ratio, so that every few mixes in a row cover the whole range."""
    random = Random(place)
    count = random.randint(2, 5)
    models = tuple(random.sample(sorted(h200().models), count))
    load, parts = 0.5 + 0.7 * (place * GOLDEN % 1), [random.uniform(0.2, 1.0) for _ in models]
    loads = tuple(load * part / sum(parts) for part in parts)
    return Mix(models, loads, tuple(random.choice((2, 3, 5, 8, 12, 20)) for _ in models))


KNOWN = (
    Mix(("resnet50-b8", "bertlarge-b1"), (0.54, 0.54), (5, 5)),
    Mix(("encoder-b16", "resnet50-b32", "bertbase-b32"), (0.3, 0.3, 0.3), (8, 8, 8)),
)
"""Mixes of the kind in which ``abreast`` was behind: in mild overload, and of three models near full load."""


def mixes(count: int) -> list[Mix]:
    """The known ones, and others in an order drawn once, so that few mixes are the first of many."""
    return [*KNOWN, *map(draw, range(1, count - len(KNOWN) + 1))][:count]


def missed(mix: Mix, rule: tuple[str, str], seconds: float, seed: int) -> float:
    policy, late = rule
    return run(mix.streams, policy, {}, seconds, seed, late).violation_rate


class Rival(NamedTuple):
    """What a rival missed with each seed, and how far above the limit that it sets ``abreast`` was."""

    name: str
    missed: tuple[float, ...]
    above: tuple[float, ...]

    @property
    def mean(self) -> float:
        return mean(self.above)

    @property
    def error(self) -> float:
        """The true mean is within this of the mean, with 95 % confidence."""
        count = len(self.above)
        if count < min(STUDENT):
            return float("inf")
        return STUDENT[min(count, max(STUDENT))] * stdev(self.above) / count**0.5

    @property
    def decided(self) -> bool:
        return abs(self.mean) > self.error


def compare(mix: Mix, rule: tuple[str, str], ours: list[float], seconds: float) -> Rival:
    """Run a rival with more and more seeds until it is decided, or has had as many as ``abreast``."""
    theirs, rival = list[float](), None
    for seed in range(1, len(ours) + 1):
        theirs.append(missed(mix, rule, seconds, seed))
        above = (one - (TIMES * other + POINT) for one, other in zip(ours, theirs, strict=False))
        rival = Rival(named(rule), tuple(theirs), tuple(above))
        if rival.decided:
            break
    assert rival
    return rival


def row_of(mix: Mix, seconds: float, seeds: int) -> dict[str, Any]:
    """Run a mix until it is known whether the property holds for it."""
    ours, rivals = list[float](), list[Rival]()
    for seed in range(1, seeds + 1):
        ours.append(missed(mix, OURS, seconds, seed))
        # the limit is at least a point: as if a rival had missed nothing
        none = Rival("a rival without misses", (0.0,) * seed, tuple(missed - POINT for missed in ours))
        if none.decided and none.mean < 0:
            rivals.append(none)
            break
    else:
        for rule in RIVALS:
            rivals.append(compare(mix, rule, ours, seconds))
            if rivals[-1].decided and rivals[-1].mean > 0:
                break
    worst = max(rivals, key=lambda rival: (rival.decided and rival.mean > 0, rival.mean))
    failed = worst.decided and worst.mean > 0
    return {
        "models": mix.models,
        "loads": [round(load, 4) for load in mix.loads],
        "dues": mix.dues,
        "load": round(mix.load, 4),
        "verdict": "fails" if failed else "holds" if all(rival.decided for rival in rivals) else "open",
        "abreast": [round(missed, 5) for missed in ours],
        "best": worst.name,
        "best_missed": mean(worst.missed),
        "above": worst.mean,
        "error": worst.error,
        "missed": {rival.name: [round(missed, 5) for missed in rival.missed] for rival in rivals},
    }


def named(rule: tuple[str, str]) -> str:
    policy, late = rule
    return policy if late == "weave" else f"{policy} {late}"


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ranked = sorted(rows, key=lambda row: row["above"], reverse=True)
    keys = ("models", "loads", "dues", "verdict", "abreast", "best", "best_missed", "above", "error")
    return {
        "mixes": len(rows),
        "verdicts": Counter(row["verdict"] for row in rows),
        "above": sum(row["above"] > 0 for row in rows),
        "without_a_rival": sum(not row["missed"].keys() & {named(rule) for rule in RIVALS} for row in rows),
        "worst": [{key: row[key] for key in keys} for row in ranked[:3]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0, help="simulated, for each mix, rule and seed")
    parser.add_argument("--seeds", type=int, default=4, help="at most, of each rule: 3 or more")
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--json", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    before, began_s = machine(), time.monotonic()
    chosen = mixes(arguments.mixes)
    rows: dict[int, dict[str, Any]] = {}
    with ProcessPoolExecutor(arguments.cores) as pool:
        task = partial(row_of, seconds=arguments.seconds, seeds=arguments.seeds)
        tasks = {pool.submit(task, mix): place for place, mix in enumerate(chosen)}
        for done in as_completed(tasks):
            place = tasks[done]
            rows[place] = row = done.result()
            print(
                f"{time.monotonic() - began_s:6.0f} s {len(rows)}/{len(chosen)} {row['verdict']}: "
                f"{mean(row['abreast']):.1%}, {row['best']} {row['best_missed']:.1%}, above by {row['above']:+.1%} "
                f"+- {row['error']:.1%} at {row['load']:.2f}: {chosen[place]}",
                flush=True,
            )
            ordered = [rows[place] for place in sorted(rows)]
            environment = {"format": 2, "machine": before, "seconds": arguments.seconds, "seeds": arguments.seeds}
            write_json(arguments.json, {**environment, "summary": summary(ordered), "rows": ordered})
    print(json.dumps(summary(ordered), indent=1))


if __name__ == "__main__":
    main()
