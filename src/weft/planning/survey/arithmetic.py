"""How much a core of this machine multiplies: ``core_tflops``, for estimates of what layers take on it."""

from __future__ import annotations

import time

import numpy as np

from weft.runtime.timing import Clock, mean_seconds

SIZE = 512
"""Of square matrices: large enough that the product is all the work there is."""
ROUNDS = 8
"""The fastest of these counts: other processes and a rising clock only make a product slower."""


def core_tflops(*, clock: Clock = time.process_time) -> float:
    """Multiplications and additions of float32 numbers per second of a core, in 10^12, of a large product.

    Processor time counts all threads, so that it is what one core does however many of them a product takes.
    """
    one, two = (np.full((SIZE, SIZE), value, np.float32) for value in (0.5, 2.0))
    one @ two
    least_s = min(mean_seconds(lambda: one @ two, clock) for _ in range(ROUNDS))
    return round(2 * SIZE**3 / max(least_s, 1e-6) / 1e12, 4)
