"""The compiled loop for one stream whose batches shrink and are refilled (``kernels.refill``)."""

from __future__ import annotations

from weft.online.case import Case
from weft.online.tally import Tally
from weft.policies import Policy


def applies(case: Case, policy: Policy) -> bool:
    """Whether there is a compiled loop for this."""
    return False


def serve(case: Case, policy: Policy, late: str, seed: int | None, record: bool) -> Tally:
    """Run a case to its end."""
    raise NotImplementedError
