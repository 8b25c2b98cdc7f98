"""Models of every special kind: those that may be batched keep their rows, whatever the neighbours hold."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.runtime.neighbours import problems
from tests.runtime.row_graphs import KEEPING, MIXING, random_model
from tests.runtime.special_models import SPECIAL, Special
from weft.base.errors import ModelError
from weft.runtime.onnxruntime_cpu.preparing import LoadOptions, prepare

SIZE = 4


def test_there_are_many_and_each_has_a_name_of_its_own() -> None:
    names = [special.name for special in SPECIAL]
    assert len(names) == len({*names}) >= 40
    assert sum(special.batched for special in SPECIAL) >= 40


@pytest.mark.parametrize("special", [each for each in SPECIAL if each.batched], ids=lambda each: each.name)
def test_neighbours_do_not_move_the_rows_of_a_batch(special: Special, tmp_path: Path) -> None:
    model = prepare(special.save(tmp_path), LoadOptions(max_batch=SIZE, shapes=special.shapes))
    assert model.batching.batchable and model.batching.max_batch == SIZE
    assert [*problems(model, special, SIZE, np.random.default_rng(5))] == []


@pytest.mark.parametrize("special", [each for each in SPECIAL if not each.batched], ids=lambda each: each.name)
def test_models_whose_rows_are_not_their_own_are_not_batched(special: Special, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be batched"):
        prepare(special.save(tmp_path), LoadOptions(max_batch=SIZE, shapes=special.shapes))


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.sampled_from(KEEPING + MIXING), min_size=1, max_size=5), seed=st.integers(0, 2**16))
def test_whatever_is_batched_of_random_graphs_keeps_its_rows(tmp_path: Path, steps: list[str], seed: int) -> None:
    special = Special("random", lambda: random_model(steps, seed))
    try:
        model = prepare(special.save(tmp_path), LoadOptions(max_batch=3))
    except ModelError as error:
        assert {*steps} & {*MIXING}, f"{steps} keep rows apart, but: {error}"
        return
    assert [*problems(model, special, 3, np.random.default_rng(seed))] == []


def lying_at(array: np.ndarray, offset: int) -> np.ndarray:
    """The array so many bytes behind a border in memory."""
    room = np.zeros(array.nbytes + 128, np.uint8)
    first = -room.ctypes.data % 64 + offset
    room[first : first + array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
    return room[first : first + array.nbytes].view(array.dtype).reshape(array.shape)


@pytest.mark.parametrize("name", ["normalised-globally", "scalar-output", "instance"])
def test_answers_do_not_depend_on_where_a_request_lies_in_memory(name: str, tmp_path: Path) -> None:
    (special,) = (each for each in SPECIAL if each.name == name)
    model = prepare(special.save(tmp_path), LoadOptions(max_batch=1))
    for seed, mood in product(range(6), ("plain", "nan", "zero", "negative")):
        feed = special.rows(model.inputs, 1, mood, np.random.default_rng(seed))
        places = [{key: lying_at(each, offset) for key, each in feed.items()} for offset in (0, 4, 8, 12, 36)]
        found = {tuple(each.tobytes() for each in model.run(place).values()) for place in places}
        assert len(found) == 1
