"""Tune the four classifiers on their full validation images with every method, and store the results.

    python training/fetch.py --to DATA
    python benchmarks/number_formats.py --data DATA
    python benchmarks/number_formats.py --data DATA --nets lenet --only weft Ristretto

writes the file that ``weft reproduce libnumber`` shows, after every search. Searches in that file are not run again
(unless --again), and an interrupted search continues from its database in --scratch. Searches see validation images
only; their results are scored on the test images once. All of it takes hours on two cores and minutes with --cuda
(``cuda_scores.py``); after that, --score-again lets ONNX Runtime score the results.
"""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from machine import machine
from number_bench import CALIBRATION, SMALL_SHARE, NetworkBench, read_splits

from weft.base.errors import InputError
from weft.base.jsonfile import read_json, write_json
from weft.models.classifiers import NAMES, card, model_path
from weft_papers import libnumber
from weft_papers.libnumber import jobs as searches
from weft_papers.libnumber.lab import LENET, OURS, SERIAL
from weft_papers.libnumber.recorded import FORMAT, SHIPPED, run_json, targets_json, tuning_json
from weft_tune.numbers.configuration import Configuration, parse_configuration
from weft_tune.quantised.evaluator import OnnxEvaluator
from weft_tune.tuner import threshold_of

log = logging.getLogger("number_formats")
RESULTS = Path(libnumber.__file__).parents[1] / "data" / "libnumber" / SHIPPED
PATH = searches.SearchJob(OURS, 0.01)
"""The search of LeNet that is kept with all its trials, as in Figure III.4."""


def opened(path: Path, again: bool) -> dict[str, Any]:
    empty: dict[str, Any] = {"format": FORMAT, "machine": {}, "settings": {}, "nets": {}}
    return read_json(path, InputError) if path.exists() and not again else empty


def begun(bench: NetworkBench) -> dict[str, Any]:
    """What is known of a network before any search."""
    plain = Configuration({})
    return {
        "sha256": bench.sha256,
        "targets": targets_json(bench.network),
        "training": card(bench.name).training,
        "validation": bench.validation(plain),
        "test": bench.test(plain),
        "images": bench.images,
        "widths": bench.widths()._asdict(),
        "runs": [],
    }


def score_again(bench: NetworkBench, entry: dict[str, Any]) -> None:
    """Every configuration that was found, and the model in int8; a margin that is missed by now is said so."""
    plain = Configuration({})
    entry |= {"validation": bench.validation(plain), "test": bench.test(plain)}
    entry["int8"] = {kind: result._asdict() for kind, result in bench.int8().items()}
    bases = {True: bench.validation(searches.sixteen_bits(bench.network)), False: entry["validation"]}
    for run in entry["runs"]:
        found, searched = parse_configuration(run["configuration"]), run["validation"]
        run |= {
            "validation": bench.validation(found),
            "test": bench.test(found),
            "base": bases[run["method"] == SERIAL],
        }
        run["feasible"] &= run["validation"] >= threshold_of(run["base"], run["margin"])
        way = f"{run['method']} {run['option'] or ''} at {run['margin']:g}"
        verdict = "" if run["feasible"] else " (fails)"
        log.info("%s, %s: %.4f, was %.4f%s", bench.name, way, run["validation"], searched, verdict)


def is_kept(entry: dict[str, Any], job: searches.SearchJob) -> bool:
    return any((run["method"], run["margin"], run["option"]) == job for run in entry["runs"])


def record(bench: NetworkBench, entry: dict[str, Any], job: searches.SearchJob) -> None:
    """Make one search and add what it found."""
    found, search = bench.run(job)
    entry["runs"] += [finite(run_json(run)) for run in found]
    if search and bench.name == LENET and job == PATH:
        entry["path"] = tuning_json(search)
    for run in found:
        verdict = "" if run.feasible else " (fails)"
        way = run.method if run.option is None else f"{run.method} {run.option}"
        log.info("%s, %s at %g: %.4f on validation, %.4f on test%s", bench.name, way, run.margin, run.validation,
                 run.test, verdict)  # fmt: skip
        log.info("  %d configurations, %d images, %.1f s", run.iterations, run.samples, run.seconds)


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN; a score that is none was never had."""
    return {key: 0.0 if isinstance(value, float) and math.isnan(value) else value for key, value in values.items()}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="where training/fetch.py wrote to")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--scratch", type=Path, help="for the databases; beside the data if left out")
    parser.add_argument("--nets", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--only", nargs="+", help="methods; all if left out")
    parser.add_argument("--margins", nargs="+", type=float, help="all if left out")
    parser.add_argument("--workers", type=int, default=2, help="processes that score")
    parser.add_argument("--seed", type=int, default=0, help="of the small set")
    parser.add_argument("--cuda", action="store_true", help="compute on a GPU (needs torch)")
    parser.add_argument("--score-again", action="store_true", help="make no search, score what was found")
    parser.add_argument("--again", action="store_true", help="begin a new file")
    return parser.parse_args()


def on_gpu(name: str) -> Callable[[OnnxEvaluator], OnnxEvaluator]:
    import cuda_scores

    return lambda evaluator: cuda_scores.on_gpu(evaluator, model_path(name))


def settings(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "small_share": SMALL_SHARE, "calibration_images": CALIBRATION, "seed": args.seed, "bias": searches.USUAL_RULE,
        "enumerated": [
            {"net": net, "margin": margin, **space._asdict(), "biases": list(space.biases)}
            for (net, margin), space in searches.ENUMERATED.items()
        ],
    }  # fmt: skip


def search(bench: NetworkBench, entry: dict[str, Any], args: argparse.Namespace) -> Iterator[None]:
    """Make the searches that are wanted and not in there."""
    for job in searches.jobs(bench.name):
        wanted = (not args.only or job.method in args.only) and (not args.margins or job.margin in args.margins)
        if wanted and not is_kept(entry, job):
            record(bench, entry, job)
            yield


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    args = arguments()
    scratch = (args.scratch or args.data / "number-formats") / ("cuda" if args.cuda else "cpu")
    scratch.mkdir(parents=True, exist_ok=True)
    results = opened(args.out, args.again)
    here = machine("onnx", "onnxruntime", "numba", *(["torch"] if args.cuda else [])) | {"cuda": args.cuda}
    results["machine"]["scored again" if args.score_again else "searched"] = here
    results["settings"] = settings(args)
    for name in args.nets:
        moved = on_gpu(name) if args.cuda else None
        with NetworkBench(
            name, read_splits(args.data, name), scratch, workers=args.workers, seed=args.seed, moved=moved
        ) as bench:
            entry = results["nets"].get(name, {})
            if entry.get("sha256") != bench.sha256:
                entry = results["nets"][name] = begun(bench)
            if args.score_again:
                score_again(bench, entry)
            for _ in search(bench, entry, args) if not args.score_again else ():
                write_json(args.out, results)
        write_json(args.out, results)


if __name__ == "__main__":
    main()
