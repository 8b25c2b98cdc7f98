"""What a worker says it has written into clients' regions: it may be compromised, and every field is checked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from weft.base.errors import BadRequest
from weft.runtime.backend import OutputTarget, Step, Written
from weft.runtime.client_memory import LendingTerms, LentPart
from weft.runtime.isolated.packets import Garbled
from weft.runtime.isolated.written_outputs import (
    describe_targets,
    describe_written,
    open_targets,
    restore_written,
)


def lent(number: int, offset: int = 0, byte_size: int = 8) -> LentPart:
    lender: Any = SimpleNamespace(terms=LendingTerms(number, "cuda", 0, 64), file=None)
    return LentPart(lender, offset, byte_size)


STEP = Step(
    0, (), 3, targets=[OutputTarget({"y": lent(1)}, (0, 1)), OutputTarget({"y": lent(2), "z": lent(2)}, (1, 3))]
)


def test_targets_reach_the_worker_and_name_their_regions() -> None:
    lenders: list[Any] = []
    described = describe_targets(STEP.targets, lenders)
    assert [lender.terms.number for lender in lenders] == [1, 2, 2]

    def unusable(offset: int, byte_size: int) -> Any:
        raise BadRequest("the region cannot be used there")

    usable: Any = SimpleNamespace(target=lambda offset, byte_size: (offset, byte_size))
    regions: Any = {1: usable, 2: SimpleNamespace(target=unusable)}
    assert open_targets(described, regions) == (OutputTarget({"y": (0, 8)}, (0, 1)), OutputTarget({}, (1, 3)))
    (whole,) = open_targets(describe_targets([OutputTarget({"y": lent(1)})], []), regions)
    assert whole.rows is None


def test_an_output_that_only_clients_have_gets_a_stand_in() -> None:
    written = Written((0, 1), {"y": ((3, 2), np.dtype(np.float16))})
    answers: dict[str, Any] = {"z": np.zeros((3, 2))}
    assert restore_written(STEP, describe_written(written), answers, 1) == written
    assert answers.keys() == {"y", "z"} and answers["y"].shape == (3, 2) and answers["y"].dtype == np.float16
    assert answers["y"].nbytes == 12 and answers["y"].strides == (0, 0)
    assert describe_written(None) is None and restore_written(STEP, None, answers, 1) is None


@pytest.mark.parametrize(
    "forged",
    [
        7,
        [[0]],
        [[0, 1], [["y", "FP32", [3, 2]]], 0],
        [[2], []],
        [[-1], []],
        [[True], []],
        [["0"], []],
        [[[0]], []],
        [[0], [["y", "FP32", [3, 2]]]],  # rows of the other request would be nowhere
        [[0, 0, 0], [["y", "FP32", [3, 2]]]],
        [[0, 1], [["z", "FP32", [3, 2]]]],  # the first request has no region for it
        [[0, 1], [["another", "FP32", [3, 2]]]],
        [[0, 1], [["y", "FP31", [3, 2]]]],
        [[0, 1], [["y", "FP32", [3, -2]]]],
        [[0, 1], [["y", "FP32", [3, 1.0]]]],
        [[0, 1], [["y", "FP32", [3, 1 << 62, 1 << 62]]]],
        [[0, 1], [["y", "FP32", [3, 1 << 63]]]],
        [[0, 1], [["y", "FP32", 3]]],
        [[0, 1], [["y", "FP16", [3, 3]]]],  # more than the regions take
    ],
)
def test_what_cannot_have_been_written_is_garbled(forged: Any) -> None:
    with pytest.raises(Garbled, match="no written outputs"):
        restore_written(STEP, forged, {}, 1)


def test_a_step_without_targets_has_nothing_written() -> None:
    with pytest.raises(Garbled):
        restore_written(Step(0, (), 3), [[], [["y", "FP32", [3, 2]]]], {}, 1)


def test_a_part_of_a_batch_has_nothing_written() -> None:
    described = describe_written(Written((0, 1), {"y": ((3, 2), np.dtype(np.float16))}))
    with pytest.raises(Garbled, match="one of 2 parts"):
        restore_written(STEP, described, {}, 2)
