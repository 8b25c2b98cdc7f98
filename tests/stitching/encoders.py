"""Small encoders as files, and what they answer, for the tests of bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from weft_stitch.making.encoders import EncoderRecipe

TOKENS = 50
"""Lines in the tables of tiny encoders."""

Feed = Mapping[str, np.ndarray]


def tiny_encoders(folder: Path, tasks: int = 3, **tuned: object) -> list[Path]:
    return list(EncoderRecipe("tiny-encoder", tasks, **tuned).save(folder))  # type: ignore[arg-type]


def as_tagger(path: Path, *, head: str = "layer1.output.norm") -> Path:
    """The file with an answer for each token: the encoder without its head."""
    proto = onnx.load(path)
    del proto.graph.output[:]
    proto.graph.output.append(helper.make_tensor_value_info(head, TensorProto.FLOAT, ["rows", "length", 32]))
    onnx.save(proto, path)
    return path


def with_exit(path: Path, classes: int, seed: int) -> Path:
    """The file with an early answer after its first layer, which its metadata names."""
    proto = onnx.load(path)
    drawn = 3 * np.random.default_rng(seed).standard_normal((32, classes))
    held = {"exit.at": np.array(0), "exit.weight": drawn.astype(np.float32)}
    proto.graph.initializer.extend(numpy_helper.from_array(each, name) for name, each in held.items())
    proto.graph.node.extend(
        [
            helper.make_node("Gather", ["layer0.output.norm", "exit.at"], ["exit.first"], axis=1),
            helper.make_node("MatMul", ["exit.first", "exit.weight"], ["early"], name="exit.head"),
        ]
    )
    proto.graph.output.append(helper.make_tensor_value_info("early", TensorProto.FLOAT, ["rows", classes]))
    helper.set_model_props(proto, {"weft.exits": "early, logits"})
    onnx.save(proto, path)
    return path


def sentences(rows: int, length: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Tokens, each row with an end of its own, the first without one."""
    rng = np.random.default_rng([seed, rows, length])
    ends = rng.integers(1, length + 1, rows)
    ends[:1] = length
    shown = np.arange(length) < ends[:, None]
    return {"input_ids": rng.integers(0, TOKENS, (rows, length)), "attention_mask": shown.astype(np.int64)}


def answers(path: Path, feed: Feed) -> dict[str, np.ndarray]:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feed)), strict=True))


def together(path: Path, names: Sequence[str], feeds: Sequence[Feed]) -> list[dict[str, np.ndarray]]:
    """What the models of a body answer in one run."""
    joined = {f"{name}.{port}": each for name, feed in zip(names, feeds, strict=True) for port, each in feed.items()}
    found = answers(path, joined)
    return [
        {key.removeprefix(f"{name}."): each for key, each in found.items() if key.startswith(f"{name}.")}
        for name in names
    ]


def distinct_bytes(files: Sequence[Path]) -> int:
    """What all different tensors of the files take."""
    held = {}
    for path in files:
        for each in onnx.load(path).graph.initializer:
            array = numpy_helper.to_array(each)
            held[array.dtype.str, array.shape, array.tobytes()] = array.nbytes
    return sum(held.values())
