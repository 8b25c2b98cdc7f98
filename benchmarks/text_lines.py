"""Images of lines of text with their texts, and the share of the text that a recogniser reads correctly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HEIGHT, WIDTH, LONGEST = 48, 320, 40
FONTS = ("DejaVuSans", "DejaVuSerif", "DejaVuSans-Bold", "DejaVuSansMono")
WORDS = (
    "the quick brown fox jumps over lazy dog invoice total amount street number order price paid date tax open "
    "closed north station platform gate flight morning evening coffee water bread paper train ticket return "
    "single weight left right only danger exit please keep clear report table figure model server plan"
)


def characters(outputs: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The part of the characters that is read right, for each line: 1 less edits per character."""
    space = outputs.shape[-1] - 1
    said = [_collapsed(output.argmax(axis=-1), space) for output in outputs]
    return np.array([_right(line, list(label[label > 0])) for line, label in zip(said, labels, strict=True)])


def draw_lines(model: Path, count: int, seed: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Pictures as the recogniser takes them, and the classes of their characters, filled up with zeros."""
    known, rng = _classes(model), np.random.default_rng(seed)
    pictures, labels = [], []
    while len(pictures) < count:
        text = _text(rng)
        picture = _picture(text, rng)
        if picture is not None:
            row = [known.get(character, len(known) + 1) for character in text]  # the last class is a blank
            pictures.append(picture)
            labels.append(row + [0] * (LONGEST - len(row)))
    return np.stack(pictures), np.array(labels)


def _classes(model: Path) -> dict[str, int]:
    """Character -> its class, as the file says; 0 is no character."""
    import onnx

    told = {entry.key: entry.value for entry in onnx.load(str(model)).metadata_props}
    return {part: number for number, part in enumerate(told["character"].split("\n"), 1)}


def _text(rng: np.random.Generator) -> str:
    if rng.integers(4) == 0:
        return f"{rng.integers(10, 99999)}.{rng.integers(10, 99)}"
    text = " ".join(rng.choice(WORDS.split(), rng.integers(1, 3)))
    return (text, text, text.upper(), text.title())[rng.integers(4)]


def _picture(text: str, rng: np.random.Generator) -> npt.NDArray[np.float32] | None:
    """Dark on light with some noise; None where the text is too wide."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    file = Path(matplotlib.get_data_path(), "fonts", "ttf", f"{FONTS[rng.integers(len(FONTS))]}.ttf")
    font = ImageFont.truetype(str(file), int(rng.integers(26, 36)))
    paper, ink = ([int(level) for level in rng.integers(*ends, 3)] for ends in ((150, 256), (0, 100)))
    place = int(rng.integers(2, 14)), int(rng.integers(0, 6))
    if font.getlength(text) > WIDTH - 16:
        return None
    image: Any = Image.new("RGB", (WIDTH, HEIGHT), tuple(paper))
    ImageDraw.Draw(image).text(place, text, font=font, fill=tuple(ink))
    noisy = np.asarray(image, np.float32) + rng.normal(0, 8, (HEIGHT, WIDTH, 3)).astype(np.float32)
    return ((noisy / 255 - 0.5) / 0.5).transpose(2, 0, 1).astype(np.float32)


def _collapsed(path: npt.NDArray[np.int64], space: int) -> list[int]:
    """Classes without repeats, without what is no character, and without blanks at the ends."""
    said = [
        int(class_index)
        for at, class_index in enumerate(path)
        if class_index and (at == 0 or class_index != path[at - 1])
    ]
    inside = [at for at, character in enumerate(said) if character != space]
    return said[inside[0] : inside[-1] + 1] if inside else []


def _right(said: Sequence[int], label: Sequence[int]) -> float:
    row = list(range(len(label) + 1))
    for number, one in enumerate(said, 1):
        before, row = row, [number]
        for at, other in enumerate(label, 1):
            row.append(min(before[at] + 1, row[-1] + 1, before[at - 1] + (one != other)))
    return max(0.0, 1 - row[-1] / len(label))
