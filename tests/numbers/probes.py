"""Values that are hard for a number format: its own, the middles between them, and what lies next to those."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weft_tune.numbers import plain
from weft_tune.numbers.configuration import AnyFormat

SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 1e-38, -1e-38, 3.4028235e38, -3.4028235e38], np.float32)


def hard_values(form: AnyFormat, seed: int = 0, codes: int = 128) -> npt.NDArray[np.float32]:
    """Without NaN."""
    rng = np.random.default_rng(seed)
    count = 1 << form.bits
    some = (
        np.arange(count) if count <= codes else np.unique(np.append(rng.integers(0, count, codes), [0, 1, count - 1]))
    )
    with np.errstate(over="ignore", invalid="ignore"):
        own, after = plain.values(some, form), plain.values(np.minimum(some + 1, count - 1), form)
        edges = np.array([form.largest, form.lowest, form.step, form.step / 2, form.largest * 1.5, form.lowest * 1.5])
        exact = np.concatenate([own, (own + after) / 2, own * 1.25, own * 1.5, edges, -edges]).astype(np.float32)
        beside = [np.nextafter(exact, np.float32(end)) for end in (-np.inf, np.inf)]
        usual = rng.standard_normal(codes) * form.largest / 2
        bits = rng.integers(0, 1 << 32, codes, dtype=np.uint64).astype(np.uint32).view(np.float32)
        found = np.concatenate([exact, *beside, usual.astype(np.float32), bits, SPECIAL])
    return found[~np.isnan(found)]


def assert_same_bits(found: npt.NDArray[np.float32], wanted: npt.NDArray[np.float32], x: object, form: object) -> None:
    """Equal to the bit, zeros with their signs; any NaN equals any other."""
    assert found.dtype == wanted.dtype == np.float32
    same = (found.view(np.uint32) == wanted.view(np.uint32)) | (np.isnan(found) & np.isnan(wanted))
    wrong = np.flatnonzero(~same)[:3]
    detail = [(float(np.asarray(x)[at]), float(found[at]), float(wanted[at])) for at in wrong]
    assert same.all(), f"{form}: {np.sum(~same)} differ; value, found, wanted: {detail}"
