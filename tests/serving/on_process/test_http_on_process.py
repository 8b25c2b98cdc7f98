"""Requests over HTTP: what they ask, how they are refused, who goes away."""

import pytest

from tests.serving.contracts.clients import *  # noqa: F403
from tests.serving.contracts.http import *  # noqa: F403

pytestmark = pytest.mark.long  # what another backend must do is in runtime/test_backend_contract.py, too


@pytest.fixture(params=["http", "http.aio"])
def speaks(request: pytest.FixtureRequest) -> str:
    return str(request.param)
