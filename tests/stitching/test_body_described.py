"""What the file of a body says of its models, when it was changed by somebody: refused in one line, and at once."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from tests.stitching.encoders import tiny_encoders
from weft.base.errors import StitchError
from weft.runtime.metadata import BODY_KEY
from weft_stitch.bodies.body_description import read_body, rebuild_body
from weft_stitch.bodies.body_stitching import stitch_body
from weft_stitch.file_description import read_note
from weft_stitch.running.body_reading import read_encoder

Told = tuple[dict[str, Any], Callable[[str], Any]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What is said, and the weights."""
    folder = tmp_path_factory.mktemp("encoders")
    path = folder / "body.onnx"
    stitch_body(tiny_encoders(folder, rank=2), tolerance=1e-6, measure=False, check=False).to_onnx(path)
    assert len(read_encoder(read_body(path)).names) == 3
    text, weights = read_note(path, BODY_KEY)
    return json.loads(text), weights


def first(note: dict[str, Any], op: str) -> dict[str, Any]:
    return next(step for step in note["steps"] if step["op"] == op)


def reads_itself(note: dict[str, Any]) -> None:
    """The sum that the first norm reads."""
    number = first(note, "LayerNormalization")["inputs"][0][0]
    note["steps"][number]["inputs"] = [[number, 0], [number, 0]]


def answers_itself(note: dict[str, Any]) -> None:
    number = len(note["steps"])
    note["steps"].append({"op": "Identity", "name": "loop", "inputs": [[number, 0]], "crews": [{"held": [""]}]})
    note["outputs"] = [{port: [number, 0] for port in each} for each in note["outputs"]]


def part(note: dict[str, Any], **changes: Any) -> None:
    next(iter(next(step for step in note["steps"] if step.get("parts"))["parts"].values())).update(changes)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (reads_itself, r"reads output 0 of step (\d+) at step \1 \(\w+\), which is not made before"),
        (answers_itself, r"reads output 0 of step \d+ at step \d+ \(loop\)"),
        (lambda note: first(note, "Tanh").update(inputs=[[-2, 0]]), "reads output 0 of step -2 at step"),
        (lambda note: first(note, "Tanh").update(inputs=[[-1, 9]]), "reads output 9 of step -1 at step"),
        (lambda note: note["outputs"][1].update(logits=[999, 0]), "of step 999 at the outputs of tiny-encoder-1"),
        (lambda note: note["outputs"].pop(), "has outputs of 2 models, and names of 3"),
        (lambda note: note.update(names=[], outputs=[]), "has outputs of 0 models"),
        (lambda note: first(note, "Tanh")["crews"][0].update(tasks=[0, 3]), "none of number 3 at step"),
        (lambda note: first(note, "Tanh").update(parts={"-1": {"kind": "odd"}}), "none of number -1 at step"),
        (lambda note: first(note, "Tanh").update(crews=[]), "does not say for each of its inputs"),
        (lambda note: first(note, "Tanh")["crews"][0].update(held=["lost"]), "'lost', which is not there, at step"),
        (lambda note: first(note, "Tanh")["crews"][0].update(held=[[2**70]]), "does not fit the constants at step"),
        (lambda note: part(note, down="lost"), "names the constant 'lost'"),
        (lambda note: part(note, at=999), "does not fit the constants at step"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_its_step(
    told: Told, change: Callable[[dict[str, Any]], Any], why: str
) -> None:
    note = copy.deepcopy(told[0])
    change(note)
    with pytest.raises(StitchError, match=f"^its weft.body .*{why}") as error:
        rebuild_body(json.dumps(note), told[1])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("op", "reader"), [("Add", "LayerNormalization"), ("Concat", "Reshape")])
def test_what_is_read_over_and_over_is_not_followed(told: Told, op: str, reader: str) -> None:
    """A chain of steps that read the one before twice, in front of one that is followed back."""
    note = copy.deepcopy(told[0])
    at = next(number for number, step in enumerate(note["steps"]) if step["op"] == reader)
    step, more = note["steps"][at], 60
    for other in (*note["steps"], *({"inputs": list(each.values())} for each in note["outputs"])):
        for value in filter(None, other["inputs"]):
            value[0] += more if value[0] >= at else 0
    place = 0 if op == "Add" else 1
    read = step["inputs"][place] or [-1, 0]
    chain = [{"op": op, "name": f"{number}", "inputs": [[at + number - 1, 0] if number else read] * 2,
              "crews": [{"held": ["", ""]}]} for number in range(more)]  # fmt: skip
    step["inputs"][place] = [at + more - 1, 0]
    note["steps"][at:at] = chain
    with pytest.raises(StitchError, match=r"more than once|number of heads"):
        read_encoder(rebuild_body(json.dumps(note), told[1]))


def places(node: Any) -> list[tuple[Any, Any]]:
    """All there is within JSON: what it lies in, and where."""
    pairs = list(node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ())
    return [each for at, inner in pairs for each in ((node, at), *places(inner))]


def edit(note: dict[str, Any], rng: random.Random) -> None:
    """Something is left out, or becomes what stands at such a place elsewhere, or a number that no place has."""
    found = places(note)
    inside, at = rng.choice(found)
    if rng.random() < 0.1:
        del inside[at]
    elif isinstance(inside[at], int):
        inside[at] = rng.choice((-1, 0, 1, 2, 7, rng.randrange(len(note.get("steps", ())) + 2), 10**6, 2**65))
    else:
        alike = [other[its] for other, its in found if its == at and type(other[its]) is type(inside[at])]
        inside[at] = copy.deepcopy(rng.choice(alike))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 4))])
def test_whatever_it_says_is_read_or_refused(told: Told, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        note = copy.deepcopy(told[0])
        for _ in range(rng.choice((1, 1, 2, 5))):
            edit(note, rng)
        with suppress(StitchError):
            read_encoder(rebuild_body(json.dumps(note), told[1]))
