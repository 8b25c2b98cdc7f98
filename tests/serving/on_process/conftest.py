"""Tests of the server, unchanged, with its models in another process.

``pytest --backend process`` runs all of them so; here is a part that every run has.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving import live


@pytest.fixture(scope="module", autouse=True)
def on_process(chosen_backend: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "BACKEND", "process")
        yield
