"""Train small networks for related tasks and zip them: the weight-shared models that weft ships.

    python training/zipping.py mnist --data DATA --out src/weft_stitch/making/data/zipped

trains one network per task, each from weights of its own, zips them at several sharing ratios, and writes those of one
ratio (.onnx, their weights shared to the last bit) and the card (.json) with the accuracies of all.
DATA is where fetch.py wrote to.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from datasets import HELD_OUT, ORIGINS, Images, Origin, cifar10, mnist
from datasets import Data as Pictures
from multi_task_zipping.networks import Examples, train
from multi_task_zipping.zipping import Data, Zipped, zip_nets
from torch.nn import functional

from weft_stitch.making.generator import FamilyRecipe, save_nets
from weft_stitch.net import Net
from weft_stitch.reading.alignment import align
from weft_stitch.summary import count_kernels

log = logging.getLogger("zipping")

ARCHITECTURE = "tinynet"
RATIOS = (0.9, 0.8, 0.7, 0.6)
SHIPPED = 0.8
"""The ratio whose networks are written."""
STEPS, LAST_STEPS, BATCH = 20, 300, 32


@dataclass(frozen=True)
class Task:
    """A question about a picture: the class that each of the data set's ten labels belongs to."""

    name: str
    question: str
    classes: tuple[int, ...]


@dataclass(frozen=True)
class Set:
    """Tasks on the same pictures."""

    data: Callable[[Path], Pictures]
    origin: Origin
    epochs: float
    tasks: tuple[Task, ...]
    seed: int = 7


SETS = {
    "mnist": Set(
        mnist,
        ORIGINS["mnist"],
        1,
        (
            Task("digit", "which digit", tuple(range(10))),
            Task("odd", "even or odd", (0, 1) * 5),
            Task("large", "below five or not", (0,) * 5 + (1,) * 5),
        ),
    ),
    "cifar": Set(
        cifar10,
        ORIGINS["cifar10"],
        2,
        (
            Task("thing", "which of the ten", tuple(range(10))),
            Task("animal", "vehicle or animal", (0, 0, 1, 1, 1, 1, 1, 1, 0, 0)),
            Task("place", "air, road, water or land", (0, 1, 0, 3, 3, 3, 2, 3, 2, 1)),
        ),
    ),
}


def examples(images: Images, task: Task) -> Examples:
    """The pictures at half their size, from 0 to 1."""
    pixels = functional.avg_pool2d(images.pixels.float() / 255, 2).numpy()
    return Examples(pixels, np.array(task.classes)[images.labels.numpy()])


def trained(name: str, number: int, data: Data) -> Net:
    """A network of its own for a task."""
    those, task = SETS[name], SETS[name].tasks[number]
    _, channels, side, _ = data.train.images.shape
    seed, classes = those.seed + number, max(task.classes) + 1
    recipe = FamilyRecipe(ARCHITECTURE, 1, channels=channels, resolution=side, classes=classes, seed=seed)
    net = train(recipe.net(0), data.train, epochs=those.epochs, seed=seed)
    return replace(net, name=f"{name}-{task.name}")


def zipped(nets: list[Net], data: list[Data], sharing: float, seed: int) -> tuple[Zipped, dict[str, object]]:
    """The zipped networks, and their line of the card."""
    merged = zip_nets(nets, data, sharing=sharing, finetune_steps=0, last_steps=0, batch=BATCH, seed=seed)
    tuned = zip_nets(nets, data, sharing=sharing, finetune_steps=STEPS, last_steps=LAST_STEPS, batch=BATCH, seed=seed)
    family = align(tuned.nets)
    line = {
        "sharing": sharing,
        "untuned": _rounded(merged.after),
        "accuracy": _rounded(tuned.after),
        "unique_weights": count_kernels(family, tuned.planted).unique,
    }
    log.info("%s", json.dumps(line))
    return tuned, line


def _rounded(numbers: tuple[float, ...]) -> list[float]:
    return [round(number, 4) for number in numbers]


def write(name: str, folder: Path, out: Path) -> None:
    """Train, zip and write all files of a set."""
    those = SETS[name]
    pictures = those.data(folder)
    data = [Data(examples(pictures.train, task), examples(pictures.test, task)) for task in those.tasks]
    nets = [trained(name, number, mine) for number, mine in enumerate(data)]
    log.info("trained %s", [net.name for net in nets])
    results = {ratio: zipped(nets, data, ratio, those.seed) for ratio in RATIOS}
    shipped = results[SHIPPED][0]
    paths = save_nets(shipped.nets, out, dynamic=True)
    _, channels, side, _ = data[0].train.images.shape
    card = {
        "name": name,
        "input": "image: float32 pixels from 0 to 1, each the mean of 2 x 2 of the data set's",
        "shape": [channels, side, side],
        "data": those.origin.source,
        "licence": those.origin.licence,
        "training": f"{ARCHITECTURE}, a seed each; epochs: {those.epochs}; all but the last {HELD_OUT} training images",
        "zipping": f"{STEPS} steps after each space and {LAST_STEPS} at the end, of {BATCH} images per task",
        "seed": those.seed,
        "versions": {package: version(package) for package in ("torch", "numpy", "onnx")},
        "tasks": [
            {
                "name": task.name,
                "question": task.question,
                "classes": list(task.classes),
                "accuracy": round(before, 4),
                "file": path.name,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
            for task, before, path in zip(those.tasks, shipped.before, paths, strict=True)
        ],
        "weights": sum(op.weight.size for net in nets for op in net.ops if op.weight is not None),
        "zipped": [line for _, line in results.values()],
        "shipped": SHIPPED,
    }
    (out / f"{name}.json").write_text(json.dumps(card, indent=1) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=SETS)
    parser.add_argument("--data", type=Path, required=True, help="folder that fetch.py wrote to")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--threads", type=int, default=1, help="of torch; the weights depend on it")
    options = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s")
    log.setLevel(logging.INFO)
    torch.set_num_threads(options.threads)
    write(options.name, options.data, options.out)


if __name__ == "__main__":
    main()
