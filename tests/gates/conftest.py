"""Gates of tests are patient: how fast this machine is decides nothing."""

from __future__ import annotations

import pytest

from tests.serving.live import PATIENCE_S
from weft_cluster.gates import forward


@pytest.fixture(autouse=True, scope="module")
def patient():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "PATIENCE_S", PATIENCE_S)
        yield
