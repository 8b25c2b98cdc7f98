"""Train a small encoder and tune it for three tasks, three ways: the fine-tuned encoders that weft ships.

    python training/encoders.py --out src/weft_stitch/making/data/encoders

The text are names of territories, languages and currencies in thirteen languages, out of the package Babel (which has
them from Unicode's CLDR). A base learns two questions at once. Then *language* gets a head on the base as it is, *kind*
an adapter of low rank, merged, and *family* a last layer of its own. The files (.onnx) and the card (.json), with the
accuracies alone and as one body and with names to try, are written.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import logging
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from babel import Locale
from torch import nn
from torch.nn import functional

from weft_stitch.bodies.body_stitching import BodyStitching, stitch_body

log = logging.getLogger("encoders")

FAMILIES = {
    "Germanic": ("en", "de", "nl", "sv"),
    "Romance": ("fr", "es", "it", "pt"),
    "Slavic": ("pl", "cs"),
    "Uralic": ("fi", "hu"),
    "Turkic": ("tr",),
}
LANGUAGES = [language for each in FAMILIES.values() for language in each]
KINDS = ("territories", "languages", "currencies")
FIRST, SHIFT, LONGEST = 1, 2, 40
"""Tokens: nothing, the first of every name, then its bytes; names are cut."""
WIDTH, HEADS, LAYERS, RANK = 48, 4, 2, 4
EPOCHS, TUNING, BATCH, SEED = 10, 2, 128, 7
SAMPLES = 300
"""Names that are written beside the files, of those that nothing was trained on."""


@dataclass(frozen=True)
class Names:
    """Names as tokens, and the answers to all questions."""

    texts: list[str]
    tokens: torch.Tensor
    answers: dict[str, torch.Tensor]


def names(*, test: bool) -> Names:
    """Names that one language alone has; an eighth of all things is kept for the test, in all languages."""
    everything = [
        (str(text), language, kind, code)
        for language in LANGUAGES
        for kind in KINDS
        for code, text in sorted(getattr(Locale.parse(language), kind).items())
    ]
    spoken = Counter(text for text, _ in {(text, language) for text, language, *_ in everything})
    found = [
        (text, language, kind)
        for text, language, kind, code in everything
        if spoken[text] == 1 and (hashlib.sha256(f"{kind} {code}".encode()).digest()[0] < 32) == test
    ]
    families = {language: place for place, each in enumerate(FAMILIES.values()) for language in each}
    answers = {
        "language": [LANGUAGES.index(language) for _, language, _ in found],
        "kind": [KINDS.index(kind) for _, _, kind in found],
        "family": [families[language] for _, language, _ in found],
    }
    texts = [text for text, _, _ in found]
    return Names(texts, tokens(texts), {name: torch.tensor(each) for name, each in answers.items()})


def tokens(texts: list[str]) -> torch.Tensor:
    found = torch.zeros(len(texts), LONGEST, dtype=torch.long)
    for row, text in enumerate(texts):
        told = [FIRST, *(byte + SHIFT for byte in text.encode())][:LONGEST]
        found[row, : len(told)] = torch.tensor(told)
    return found


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mixed, self.up, self.down = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows, length, _ = hidden.shape
        parts = [
            each(hidden).view(rows, length, HEADS, -1).transpose(1, 2) for each in (self.query, self.key, self.value)
        ]
        scores = parts[0] @ parts[1].transpose(-1, -2) / (WIDTH // HEADS) ** 0.5 + mask
        seen = (scores.softmax(-1) @ parts[2]).transpose(1, 2).reshape(rows, length, WIDTH)
        hidden = self.first(hidden + self.mixed(seen))
        return self.second(hidden + self.down(functional.gelu(self.up(hidden))))


class Encoder(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(256 + SHIFT, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.words(input_ids) + self.places(places)
        mask = (1.0 - attention_mask[:, None, None, :].to(hidden.dtype)) * -1e4
        for layer in self.layers:
            hidden = layer(hidden, mask)
        found: torch.Tensor = self.head(hidden[:, 0])
        return found


def fit(model: Encoder, data: Names, tasks: dict[str, slice], epochs: int, seed: int, rate: float) -> None:
    """Train what wants a gradient; each task has a part of the head."""
    drawn = torch.Generator().manual_seed(seed)
    trained = [each for each in model.parameters() if each.requires_grad]
    steps = epochs * (len(data.texts) // BATCH + 1)
    optimiser = torch.optim.AdamW(trained, rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(data.texts), generator=drawn).split(BATCH):
            ids = data.tokens[rows]
            ids = ids[:, : int((ids > 0).sum(1).max())]
            found = model(ids, (ids > 0).long())
            loss = sum(
                functional.cross_entropy(found[:, part], data.answers[name][rows]) for name, part in tasks.items()
            )
            optimiser.zero_grad()
            loss.backward()  # type: ignore[union-attr]
            optimiser.step()
            schedule.step()


def tuned(base: Encoder, data: Names, task: str, classes: int, seed: int) -> Encoder:
    """The base with a new head, and with what the task has of its own."""
    model = copy.deepcopy(base)
    torch.manual_seed(seed)
    model.head = nn.Linear(WIDTH, classes)
    for name, each in model.named_parameters():
        each.requires_grad = name.startswith("head") or (task == "family" and name.startswith(f"layers.{LAYERS - 1}"))
    if task == "kind":
        adapted = [product for layer in model.layers for product in (layer.query, layer.value)]
        for product in adapted:
            nn.utils.parametrize.register_parametrization(product, "weight", Adapter())
        fit(model, data, {task: slice(None)}, TUNING, seed, 3e-3)
        for product in adapted:
            nn.utils.parametrize.remove_parametrizations(product, "weight", leave_parametrized=True)
    else:
        fit(model, data, {task: slice(None)}, TUNING, seed, 3e-3)
    return model.eval()


class Adapter(nn.Module):
    """What is added to a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(RANK, WIDTH) / RANK), nn.Parameter(torch.zeros(WIDTH, RANK))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.up @ self.down


def export(model: Encoder, path: Path) -> None:
    sizes = {0: "rows", 1: "length"}
    ports = {"input_ids": sizes, "attention_mask": sizes, "logits": {0: "rows"}}
    example = (torch.ones(2, 7, dtype=torch.long),) * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.eval(), example, path, dynamo=False, opset_version=17, input_names=list(ports)[:2],
            output_names=["logits"], dynamic_axes=ports,
        )  # fmt: skip


def answered(path: Path, data: Names, tasks: list[str], prefix: bool) -> dict[str, float]:
    """The part of right answers, by task."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    right = dict.fromkeys(tasks, 0)
    for rows in torch.arange(len(data.texts)).split(256):
        ids = data.tokens[rows].numpy()
        feed = {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64)}
        whole = {f"names-{task}.{name}": each for task in tasks for name, each in feed.items()} if prefix else feed
        outputs = [f"names-{task}.logits" if prefix else "logits" for task in tasks]
        for task, found in zip(tasks, session.run(outputs, whole), strict=True):
            right[task] += int((found.argmax(1) == data.answers[task][rows].numpy()).sum())
    return {task: round(each / len(data.texts), 4) for task, each in right.items()}


def stitched(made: BodyStitching, data: Names, tasks: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        (path,) = made.to_onnx(Path(folder) / "one.onnx")
        weights = round(made.weight_bytes / made.apart_bytes, 4)
        return {"weights": weights, "accuracy": answered(path, data, tasks, prefix=True)}


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    train, test = names(test=False), names(test=True)
    base = Encoder(len(LANGUAGES) + len(KINDS))
    parts = {"language": slice(0, len(LANGUAGES)), "kind": slice(len(LANGUAGES), None)}
    fit(base, train, parts, EPOCHS, SEED, 4e-3)
    classes = {"language": LANGUAGES, "kind": KINDS, "family": list(FAMILIES)}
    files, alone = [], {}
    for number, (task, told) in enumerate(classes.items()):
        files.append(out / f"names-{task}.onnx")
        export(tuned(base, train, task, len(told), SEED + number), files[-1])
        alone |= answered(files[-1], test, [task], prefix=False)
    chosen = torch.randperm(len(test.texts), generator=torch.Generator().manual_seed(SEED))[:SAMPLES].tolist()
    tasks = list(classes)
    card = {
        "name": "names",
        "input": "input_ids: 1, then the bytes of a name in UTF-8, each plus 2; 40 at most",
        "data": "Babel (CLDR's names of territories, languages and currencies)",
        "licence": "BSD-3-Clause; Unicode-3.0",
        "training": f"{len(train.texts)} names; {EPOCHS} epochs of the base, {TUNING} of each task; language: a head, "
        f"kind: rank {RANK} in queries and values, merged, family: the last layer",
        "seed": SEED,
        "versions": {package: version(package) for package in ("torch", "numpy", "onnx", "babel")},
        "classes": {task: list(told) for task, told in classes.items()},
        "accuracy": alone,
        "exact": stitched(stitch_body(files, measure=False), test, tasks),
        "low_rank": stitched(stitch_body(files, measure=False, tolerance=1e-5), test, tasks),
        "samples": [[test.texts[at], *(int(test.answers[task][at]) for task in tasks)] for at in chosen],
    }
    (out / "names.json").write_text(json.dumps(card, indent=1, ensure_ascii=False) + "\n", "utf-8")
    log.info("%s", {key: card[key] for key in ("accuracy", "exact", "low_rank")})


if __name__ == "__main__":
    main()
