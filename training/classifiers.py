"""Train the four classifiers that weft ships for tuning number formats: mlp-m, lenet, mlp-c and cuda-convnet.

    python training/classifiers.py all --data DATA --out src/weft/models/classifiers

writes each network (.onnx), its card (.json) and some validation images of its data set (.npz). DATA is where fetch.py
wrote to. With --weights DIR trained weights are kept there, or, if there already, only written out again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from datasets import HELD_OUT, ORIGINS, Data, Images, augmented, cifar10, mnist
from plain_onnx import Normalise, write
from torch import nn
from torch.nn import functional

log = logging.getLogger("classifiers")

SAMPLES = {"mnist": 2000, "cifar10": 600}
"""Validation images shipped beside the networks."""
SETS = {"mnist": mnist, "cifar10": cifar10}
SHAPES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
MEAN, SCALE = [0.4914, 0.4822, 0.4465], 3.6
"""How CIFAR-10 is normalised: what enters the first layer has a deviation near 1 and stays within -2..2."""


def named(**modules: nn.Module) -> nn.Sequential:
    net = nn.Sequential()
    for name, module in modules.items():
        net.add_module(name, module)
    return net


def mlp_m() -> nn.Sequential:
    """Fully connected layers, 784-256-128-10."""
    return named(
        flat=nn.Flatten(),
        fc1=nn.Linear(784, 256), relu1=nn.ReLU(),
        fc2=nn.Linear(256, 128), relu2=nn.ReLU(),
        fc3=nn.Linear(128, 10),
    )  # fmt: skip


def lenet() -> nn.Sequential:
    """Caffe's LeNet: no nonlinearity but the pools behind the convolutions."""
    return named(
        conv1=nn.Conv2d(1, 20, 5), pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(20, 50, 5), pool2=nn.MaxPool2d(2),
        flat=nn.Flatten(),
        ip1=nn.Linear(800, 500), relu1=nn.ReLU(),
        ip2=nn.Linear(500, 10),
    )  # fmt: skip


def mlp_c() -> nn.Sequential:
    """Fully connected layers, 3072-512-256-128-10."""
    return named(
        input=Normalise(MEAN, SCALE), flat=nn.Flatten(),
        fc1=nn.Linear(3072, 512), relu1=nn.ReLU(),
        fc2=nn.Linear(512, 256), relu2=nn.ReLU(),
        fc3=nn.Linear(256, 128), relu3=nn.ReLU(),
        fc4=nn.Linear(128, 10),
    )  # fmt: skip


def cuda_convnet() -> nn.Sequential:
    """Caffe's quick network for CIFAR-10, with the one fully connected layer of the original."""
    return named(
        input=Normalise(MEAN, SCALE),
        conv1=nn.Conv2d(3, 32, 5, padding=2), pool1=nn.MaxPool2d(3, 2, ceil_mode=True), relu1=nn.ReLU(),
        conv2=nn.Conv2d(32, 32, 5, padding=2), relu2=nn.ReLU(), pool2=nn.AvgPool2d(3, 2, ceil_mode=True),
        conv3=nn.Conv2d(32, 64, 5, padding=2), relu3=nn.ReLU(), pool3=nn.AvgPool2d(3, 2, ceil_mode=True),
        flat=nn.Flatten(),
        ip1=nn.Linear(1024, 10),
    )  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """One network, its data, and how it is trained."""

    build: Callable[[], nn.Sequential]
    data: str
    epochs: int
    learning_rate: float
    """The highest of the cycle."""
    pad: int
    """Images are moved by up to this many pixels."""
    flip: bool = False
    decay: float = 0.05
    clip: float = 3.0
    """Weights stay within this many standard deviations of their layer: without outliers few bits go further."""
    batch: int = 256
    seed: int = 8

    def text(self, epochs: int, device: torch.device) -> str:
        mirrored = " and mirrored" if self.flip else ""
        return (
            f"{epochs} epochs, seed {self.seed}, torch {torch.__version__} on {device.type}; AdamW in batches of "
            f"{self.batch}, one cycle up to {self.learning_rate:g}, weight decay {self.decay:g}, weights clipped at "
            f"{self.clip:g} standard deviations of their layer; images moved by up to {self.pad} pixels{mirrored}; "
            f"all but the last {HELD_OUT} training images"
        )


RECIPES = {
    "mlp-m": Recipe(mlp_m, "mnist", 40, 2e-3, 1),
    "lenet": Recipe(lenet, "mnist", 30, 2e-3, 2),
    "mlp-c": Recipe(mlp_c, "cifar10", 60, 1e-3, 2, flip=True),
    "cuda-convnet": Recipe(cuda_convnet, "cifar10", 120, 2e-3, 4, flip=True),
}


def train(net: nn.Sequential, data: Data, recipe: Recipe, epochs: int, device: torch.device) -> None:
    images, held_out = data.train.to(device), data.held_out.to(device)
    net.to(device)
    rng = torch.Generator(device).manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=recipe.decay)
    steps = len(images.labels) // recipe.batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, total_steps=epochs * steps)
    for epoch in range(epochs):
        order = torch.randperm(len(images.labels), generator=rng, device=device)
        for rows in order.split(recipe.batch)[:steps]:
            optimizer.zero_grad(set_to_none=True)
            pixels = augmented(images.pixels[rows], recipe.pad, recipe.flip, rng)
            loss = functional.cross_entropy(net(pixels), images.labels[rows])
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 2.0)
            optimizer.step()
            schedule.step()
            clip(net, recipe.clip)
        log.info("epoch %d: last loss %.3f, held out %.4f", epoch + 1, loss.item(), accuracy(net, held_out))


@torch.no_grad()
def clip(net: nn.Sequential, deviations: float) -> None:
    for module in net:
        if isinstance(module, nn.Conv2d | nn.Linear):
            most = deviations * module.weight.std()
            module.weight.clamp_(-most, most)


@torch.inference_mode()
def accuracy(net: nn.Sequential, images: Images) -> float:
    said = torch.cat([net(part.float() / 255).argmax(1) for part in images.pixels.split(500)])
    return (said == images.labels).float().mean().item()


def answers(session: ort.InferenceSession, images: Images) -> np.ndarray:
    parts = [
        session.run(None, {"image": part.numpy().astype(np.float32) / 255})[0] for part in images.pixels.split(250)
    ]
    return np.concatenate(parts)


def write_files(name: str, net: nn.Sequential, data: Data, how: str, out: Path) -> None:
    """The network and its card."""
    recipe, path = RECIPES[name], out / f"{name}.onnx"
    write(net, SHAPES[recipe.data], path)
    session = ort.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    compare(net, session, data.held_out)
    origin = ORIGINS[recipe.data]
    card = {
        "name": name,
        "input": "image: float32 pixels from 0 to 1 (a byte divided by 255)"
        + ("; normalised inside" if isinstance(net[0], Normalise) else ""),
        "data": origin.source,
        "licence": origin.licence,
        "training": how,
        "seed": recipe.seed,
        "versions": {package: version(package) for package in ("torch", "numpy", "onnx", "onnxruntime")},
        "parameters": sum(each.numel() for each in net.parameters()),
        "validation_accuracy": share(answers(session, data.held_out), data.held_out),
        "accuracy": share(answers(session, data.test), data.test),
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    (out / f"{name}.json").write_text(json.dumps(card, indent=2) + "\n", "utf-8")
    log.info("%s: validation %s, test %s", name, card["validation_accuracy"], card["accuracy"])


def share(logits: np.ndarray, images: Images) -> float:
    """The share of right answers."""
    return round(float((logits.argmax(1) == images.labels.numpy()).mean()), 4)


@torch.inference_mode()
def compare(net: nn.Sequential, session: ort.InferenceSession, images: Images) -> None:
    few = Images(images.pixels[:500], images.labels[:500])
    worst = np.abs(net(few.pixels.float() / 255).numpy() - answers(session, few)).max()
    log.info("the logits of torch and onnxruntime differ by at most %.1e", worst)


def write_samples(name: str, images: Images, seed: int, out: Path) -> None:
    rows = np.sort(np.random.default_rng(seed).choice(len(images.labels), SAMPLES[name], replace=False))
    labels = images.labels.numpy().astype(np.uint8)
    np.savez_compressed(out / f"{name}.npz", image=images.pixels.numpy()[rows], label=labels[rows])


def trained(name: str, data: Data, options: argparse.Namespace) -> tuple[nn.Sequential, str]:
    """The network on the CPU, and how it was trained: now, or by an earlier run that kept its weights."""
    recipe, kept = RECIPES[name], options.weights and options.weights / f"{name}.pt"
    torch.manual_seed(recipe.seed)
    net, epochs = recipe.build(), options.epochs or recipe.epochs
    if kept and kept.exists():
        how, weights = torch.load(kept)
        net.load_state_dict(weights)
        return net, how
    train(net, data, recipe, epochs, options.device)
    how, net = recipe.text(epochs, options.device), net.cpu()
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save((how, net.state_dict()), kept)
    return net, how


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=[*RECIPES, "all"])
    parser.add_argument("--data", type=Path, required=True, help="folder that fetch.py wrote to")
    parser.add_argument("--out", type=Path, help="folder to write to; without it only weights are kept")
    parser.add_argument("--weights", type=Path, help="folder of trained weights: used if there, else written")
    parser.add_argument("--epochs", type=int, help="instead of the recipes'")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="to train on: cpu, cuda")
    options = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s")
    log.setLevel(logging.INFO)
    torch.backends.cudnn.deterministic = True
    for name in list(RECIPES) if "all" in options.names else options.names:
        recipe = RECIPES[name]
        data = SETS[recipe.data](options.data)
        log.info("%s", name)
        net, how = trained(name, data, options)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            write_files(name, net, data, how, options.out)
            write_samples(recipe.data, data.held_out, recipe.seed, options.out)


if __name__ == "__main__":
    main()
