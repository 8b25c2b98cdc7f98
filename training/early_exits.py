"""Train the two networks with exits that weft ships: ``mnist-vit`` and ``cifar-cnn``.

    python training/early_exits.py cifar-cnn --data DATA --out src/weft/models/trained

writes the network (.onnx), what it answers on the whole test set (.npz), some test images (.samples.npz) and the
card that says where all of it comes from (.json). DATA is where fetch.py wrote to.
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
from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
import torch
from datasets import HELD_OUT, ORIGINS, Data, Images, augmented, cifar10, mnist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

log = logging.getLogger("early_exits")

SAMPLES = 256  # test images shipped beside a network


class MultiExit(nn.Module):
    """Stages one after the other, each followed by a head that answers; input: pixels from 0 to 1."""

    def __init__(self, stages: list[nn.Module], heads: list[nn.Module], mean: list[float], deviation: list[float]):
        super().__init__()
        self.stages, self.heads = nn.ModuleList(stages), nn.ModuleList(heads)
        self.register_buffer("shift", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("scale", 1 / torch.tensor(deviation).view(-1, 1, 1))

    def forward(self, image: Tensor, exits: int | None = None) -> tuple[Tensor, ...]:
        """Logits of the first *exits* exits, or of all."""
        x = (image - self.shift) * self.scale
        answers = []
        for stage, head in list(zip(self.stages, self.heads, strict=True))[:exits]:
            x = stage(x)
            answers.append(head(x))
        return tuple(answers)


class Pooled(nn.Module):
    """The head of an exit: the mean over the given dimensions, then one fully connected layer."""

    def __init__(self, width: int, over: tuple[int, ...]):
        super().__init__()
        self.over, self.out = over, nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.mean(self.over))


class Patches(nn.Module):
    """An image as tokens of 7 x 7 pixels, each with its place."""

    def __init__(self, width: int):
        super().__init__()
        self.cut = nn.Conv2d(1, width, 7, stride=7)
        self.place = nn.Parameter(torch.randn(1, 16, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.cut(x).flatten(2).transpose(1, 2) + self.place


class Block(nn.Module):
    """A transformer block over 16 tokens that normalises last, so that a single tensor leaves it."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.width, self.heads = width, heads
        self.qkv, self.out, self.first_norm = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.LayerNorm(width)
        self.up, self.down, self.second_norm = nn.Linear(width, hidden), nn.Linear(hidden, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first_norm(x + self.out(self.attention(x)))
        return self.second_norm(x + self.down(torch.relu(self.up(x))))

    def attention(self, x: Tensor) -> Tensor:
        each = self.width // self.heads
        q, k, v = self.qkv(x).reshape(-1, 16, 3, self.heads, each).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = torch.softmax((q * each**-0.5) @ k.transpose(-1, -2), -1) @ v
        return mixed.transpose(1, 2).reshape(-1, 16, self.width)


def mnist_vit() -> MultiExit:
    """Six transformer blocks on 16 tokens of width 48; exits after two, four and six."""
    width = 48
    stages = [nn.Sequential(Block(width, 4, 2 * width), Block(width, 4, 2 * width)) for _ in range(3)]
    stages[0].insert(0, Patches(width))
    return MultiExit(list(stages), [Pooled(width, (1,)) for _ in stages], [0.1307], [0.3081])


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution with batch normalisation, which the exporter takes into the weights."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Residual(nn.Module):
    """Two convolutions, and what came in added."""

    def __init__(self, inputs: int, width: int, stride: int = 1):
        super().__init__()
        self.first, self.second = convolution(inputs, width, 3, stride), convolution(width, width, 3)
        self.past: nn.Module = nn.Identity()
        if inputs != width:
            self.past = nn.Sequential(nn.AvgPool2d(stride), convolution(inputs, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.past(x) + self.second(torch.relu(self.first(x))))


def cifar_cnn() -> MultiExit:
    """A residual network: 48 channels of 16 x 16, then 80 of 8 x 8; an exit after every two blocks."""
    stages = [
        nn.Sequential(convolution(3, 32, 3), nn.ReLU(), Residual(32, 48, 2), Residual(48, 48)),
        nn.Sequential(Residual(48, 48), Residual(48, 48)),
        nn.Sequential(Residual(48, 80, 2), Residual(80, 80)),
        nn.Sequential(Residual(80, 80), Residual(80, 80)),
    ]
    heads: list[nn.Module] = [Pooled(width, (2, 3)) for width in (48, 48, 80, 80)]
    return MultiExit(list(stages), heads, [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616])


@dataclass(frozen=True)
class Recipe:
    """One network, its data, and how it is trained."""

    data: Callable[[Path], Data]
    build: Callable[[], MultiExit]
    epochs: int
    batch: int
    learning_rate: float
    """The highest of the cycle."""
    pad: int
    """Images are moved by up to this many pixels."""
    flip: bool
    drop: float
    """How much accuracy on the held-out images leaving early may cost: what the threshold is chosen by."""
    source: str
    licence: str
    seed: int = 5


RECIPES = {
    "mnist-vit": Recipe(mnist, mnist_vit, 30, 256, 3e-3, 2, False, 0.0, *ORIGINS["mnist"]),
    "cifar-cnn": Recipe(cifar10, cifar_cnn, 80, 256, 5e-3, 4, True, 0.005, *ORIGINS["cifar10"]),
}


def train(net: MultiExit, data: Data, recipe: Recipe, epochs: int, device: torch.device) -> None:
    """All exits together: the sum of their losses, with one cycle of the learning rate."""
    images, held_out = data.train.to(device), data.held_out.to(device)
    net.to(device)
    rng = torch.Generator(device).manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.05)
    steps = epochs * (len(images.labels) // recipe.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, total_steps=steps)
    for epoch in range(epochs):
        net.train()
        order = torch.randperm(len(images.labels), generator=rng, device=device)
        for rows in order.split(recipe.batch)[: steps // epochs]:
            optimizer.zero_grad(set_to_none=True)
            pixels, labels = augmented(images.pixels[rows], recipe.pad, recipe.flip, rng), images.labels[rows]
            loss = torch.stack([functional.cross_entropy(answer, labels) for answer in net(pixels)]).sum()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 2.0)
            optimizer.step()
            schedule.step()
        log.info("epoch %d: last loss %.3f, held out %s", epoch + 1, loss.item(), accuracies(net, held_out))


@torch.inference_mode()
def accuracies(net: MultiExit, images: Images) -> list[float]:
    net.eval()
    answers = [net(part.float() / 255) for part in images.pixels.split(500)]
    right = [torch.cat(exit_).argmax(1) == images.labels for exit_ in zip(*answers, strict=True)]
    return [round(each.float().mean().item(), 4) for each in right]


def export(net: MultiExit, image: Tensor, path: Path) -> tuple[str, ...]:
    """Write the network with any batch size; returns the names of its exits."""
    names = (*(f"exit{number}" for number in range(1, len(net.heads))), "logits")
    program = torch.onnx.export(
        net, (image.repeat(2, 1, 1, 1),), input_names=["image"], output_names=list(names), opset_version=18,
        dynamic_shapes=({0: torch.export.Dim("batch", min=1)},), dynamo=True, external_data=False, verbose=False,
    )  # fmt: skip
    model = program.model_proto
    for part in (model, model.graph, *model.graph.node):  # where in the sources each came from
        del part.metadata_props[:]
    onnx.helper.set_model_props(model, {"weft.exits": ",".join(names)})
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, str(path))
    return names


class Answers(NamedTuple):
    """What every exit says about every image, (images, exits)."""

    confidence: np.ndarray
    prediction: np.ndarray
    correct: np.ndarray
    label: np.ndarray

    def exits_taken(self, threshold: float) -> np.ndarray:
        """The first exit that is as sure as *threshold*, or the last, for each image."""
        sure = self.confidence >= threshold
        sure[:, -1] = True
        return sure.argmax(1)

    def right(self, threshold: float) -> np.ndarray:
        return np.take_along_axis(self.correct, self.exits_taken(threshold)[:, None], 1)[:, 0]


def answers(session: ort.InferenceSession, images: Images) -> Answers:
    parts = [session.run(None, {"image": part.numpy().astype(np.float32) / 255}) for part in images.pixels.split(250)]
    logits = np.stack([np.concatenate(exit_) for exit_ in zip(*parts, strict=True)], axis=1)
    odds = np.exp(logits - logits.max(2, keepdims=True))
    confidence = (odds / odds.sum(2, keepdims=True)).max(2).astype(np.float32)
    label, prediction = images.labels.numpy().astype(np.uint8), logits.argmax(2).astype(np.uint8)
    return Answers(confidence, prediction, prediction == label[:, None], label)


def choose_threshold(held_out: Answers, drop: float) -> float:
    """The lowest threshold that costs at most *drop* of the last exit's accuracy on held-out images."""
    wanted = held_out.correct[:, -1].mean() - drop
    return next((t / 100 for t in range(30, 100) if held_out.right(t / 100).mean() >= wanted), 1.0)


def compare(net: MultiExit, session: ort.InferenceSession, images: Images) -> None:
    batch = images.pixels[:64].float() / 255
    pairs = zip(net(batch), session.run(None, {"image": batch.numpy()}), strict=True)
    worst = max(float(np.abs(ours.detach().numpy() - theirs).max()) for ours, theirs in pairs)
    log.info("the logits of torch and onnxruntime differ by at most %.1e", worst)


def macs(net: MultiExit, image: Tensor, exits: int) -> int:
    """Multiplications up to an exit, the heads on the way included, for one image."""
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        net(image, exits)
    return counter.get_total_flops() // 2


def exit_cards(names: tuple[str, ...], work: list[int], test: Answers, threshold: float) -> list[dict[str, object]]:
    taken, right = test.exits_taken(threshold), test.right(threshold)
    return [
        {
            "name": name,
            "macs": work[at],
            "accuracy": round(float(test.correct[:, at].mean()), 4),
            "rate": round(float((taken == at).mean()), 4),
            "accuracy_of_leavers": round(float(right[taken == at].mean()), 4) if (taken == at).any() else None,
        }
        for at, name in enumerate(names)
    ]


def write(name: str, net: MultiExit, data: Data, how: str, out: Path) -> None:
    """The four files of a network."""
    recipe, model, image = RECIPES[name], out / f"{name}.onnx", data.test.pixels[:1].float() / 255
    names = export(net, image, model)
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    compare(net, session, data.test)
    held_out, test = answers(session, data.held_out), answers(session, data.test)
    np.savez_compressed(out / f"{name}.npz", **test._asdict())
    rows = np.sort(np.random.default_rng(recipe.seed).choice(len(test.label), SAMPLES, replace=False))
    pixels = data.test.pixels.numpy()[rows]
    np.savez_compressed(out / f"{name}.samples.npz", image=pixels, label=test.label[rows], row=rows.astype(np.uint16))
    threshold, work = (
        choose_threshold(held_out, recipe.drop),
        [macs(net, image, exits + 1) for exits in range(len(names))],
    )
    card = {
        "name": name,
        "input": "image: float32 pixels from 0 to 1 (a byte divided by 255); normalised inside",
        "data": recipe.source,
        "licence": recipe.licence,
        "training": f"{how}; all but the last {HELD_OUT} training images; sum of the exits' cross entropies",
        "seed": recipe.seed,
        "versions": {package: version(package) for package in ("torch", "numpy", "onnx", "onnxruntime")},
        "exits": exit_cards(names, work, test, threshold),
        "threshold": threshold,
        "threshold_rule": f"lowest that costs at most {recipe.drop:.1%} of accuracy on the held-out images",
        "held_out_accuracy": round(float(held_out.right(threshold).mean()), 4),
        "accuracy": round(float(test.right(threshold).mean()), 4),
        "mean_macs": round(float(np.asarray(work)[test.exits_taken(threshold)].mean())),
        "sha256": hashlib.sha256(model.read_bytes()).hexdigest(),
    }
    (out / f"{name}.json").write_text(json.dumps(card, indent=2) + "\n", "utf-8")
    log.info("%s", json.dumps(card["exits"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=RECIPES)
    parser.add_argument("--data", type=Path, required=True, help="folder that fetch.py wrote to")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--weights", type=Path, help="file of trained weights: read if it is there, else written")
    parser.add_argument("--epochs", type=int, help="instead of the recipe's")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="to train on: cpu, cuda")
    options = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s")
    log.setLevel(logging.INFO)
    recipe = RECIPES[options.name]
    torch.manual_seed(recipe.seed)
    data, net, epochs = recipe.data(options.data), recipe.build(), options.epochs or recipe.epochs
    if options.weights and options.weights.exists():
        how, weights = torch.load(options.weights)
        net.load_state_dict(weights)
    else:
        train(net, data, recipe, epochs, options.device)
        how = f"{epochs} epochs, seed {recipe.seed}, torch {torch.__version__} on {options.device.type}"
    if options.weights:
        torch.save((how, net.cpu().state_dict()), options.weights)
    write(options.name, net.cpu().eval(), data, how, options.out)


if __name__ == "__main__":
    main()
