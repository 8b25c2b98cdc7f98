"""What the conversion to torch is tested with, but for whole networks: operators, special and random graphs, idioms."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.models.exporter_graphs import IDIOMS, Idiom
from tests.models.operator_cases import alone, at_known_version, cases_by_operator, known_to_torch, taken
from tests.runtime.cuda.converted import NEAR, Case, by_runtime, drawn_for, mismatch
from tests.runtime.row_graphs import KEEPING, MIXING, random_model
from tests.runtime.special_models import SPECIAL
from weft.models.operators import find
from weft.runtime.cuda.precision import FP32


def operator_graphs(most: int | None = None) -> dict[str, list[Case]]:
    """Operator -> its nodes as graphs, those that torch and ONNX Runtime take; about *most* of them."""
    graphs = {}
    for name, cases in cases_by_operator().items():
        if find(name).torch:
            usable = list(filter(known_to_torch, cases))
            chosen = usable[:: max(1, len(usable) // most)] if most else usable
            numbers = find(name).torch_numbers
            graphs[name] = [
                Case(case.title, *alone(case, numbers)) for case in filter(taken, map(at_known_version, chosen))
            ]
    return graphs


def special_graphs() -> Iterator[Case]:
    """All special models but those that take texts."""
    for special in SPECIAL:
        model = special.build()
        if all(value.type.tensor_type.elem_type != 8 for value in model.graph.input):
            shapes = {name: (2, *shape[1:]) for name, shape in special.shapes.items()}
            yield Case(special.name, model, drawn_for(model, shapes))


def idiom_graphs(idiom: Idiom) -> Iterator[Case]:
    """An idiom as the first and as the last exporter wrote it."""
    for opset in (idiom.opsets[0], idiom.opsets[-1]):
        model, shapes = idiom.build(opset)
        yield Case(f"{idiom.name} {opset}", model, drawn_for(model, shapes))


def random_graph(steps: list[str], seed: int) -> Case:
    feed = {"x": np.random.default_rng(seed).standard_normal((3, 6)).astype(np.float32)}
    return Case(f"random graph {seed}: {'; '.join(steps)}", random_model(steps, seed), feed)


def random_graphs(count: int) -> Iterator[Case]:
    """Those of *count* random graphs whose answers do not hang on rounding: a tie may be decided by the last bit."""
    for seed in range(count):
        rng = np.random.default_rng(seed)
        case = random_graph(list(map(str, rng.choice(KEEPING + MIXING, rng.integers(1, 7)))), seed)
        if is_steady(case):
            yield case


def is_steady(case: Case) -> bool:
    """Whether the answers are finite, and changes of the inputs in their last bits change them no more."""
    wanted, rng = by_runtime(case.model, case.feed), np.random.default_rng(0)
    if not all(np.isfinite(output).all() for output in wanted):
        return False  # a constant that is normalised: where the standard adds 1e-9, ONNX Runtime divides by 0
    for _ in range(8):
        noise = {name: 1 + rng.uniform(-1e-6, 1e-6, array.shape) for name, array in case.feed.items()}
        moved = {name: (array * noise[name]).astype(array.dtype) for name, array in case.feed.items()}
        if mismatch(wanted, by_runtime(case.model, moved), NEAR[FP32]):
            return False
    return True


def all_graphs() -> Iterator[Case]:
    """Everything, with 200 random graphs."""
    for cases in operator_graphs().values():
        yield from cases
    yield from special_graphs()
    for idiom in IDIOMS:
        yield from idiom_graphs(idiom)
    yield from random_graphs(200)
