"""Random families of every class of operators through ``weft stitch``: the models' answers, or one line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.stitching.outcomes import STITCHED, outcome
from tests.stitching.random import JUMPY, OPERATORS, one_of, random_family

SEEDS = (*range(120), 124, 212, 213, 2083)
"""Any number is a family, to look for more; between them these have every operator."""


def settings_of(seed: int) -> dict[str, Any]:
    """Options of the command at random."""
    rng = np.random.default_rng([seed, 5])
    settings: dict[str, Any] = {
        "islands": bool(rng.random() < 0.75),
        "dynamic": bool(rng.random() < 0.25),
        "form": str(one_of(rng, "planned", "planned", "mts", "grouped", "split", "half", "separate")),
        "measure": bool(rng.random() < 0.05),
        "slabs": bool(rng.random() < 0.8),
        "layers": bool(rng.random() < 0.2),
    }
    if rng.random() < 0.1:
        settings["memory_cap"] = "1m"
    return settings


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_family_is_stitched_or_refused_in_one_line(seed, tmp_path):
    family = random_family(seed)
    outcome(family.models, tmp_path, jumpy=not JUMPY.isdisjoint(family.operators), **settings_of(seed))


def test_the_random_families_have_every_operator_between_them():
    assert {name for seed in SEEDS for name in random_family(seed).operators} == set(OPERATORS)


def test_a_good_part_of_the_random_families_can_be_stitched(tmp_path):
    assert [outcome(random_family(seed).models, tmp_path, islands=True) for seed in (0, 1, 3, 4, 6)] == [STITCHED] * 5
