"""A request that never ends holds a lane, and nothing else: health, other models, its deadline, the server's end."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.serving.contracts.endless import *  # noqa: F403
from tests.serving.live import serve_process
from tests.support.concurrency import Background, until
from tests.support.endless import ENDLESS, loop_input, other_model_answers
from tests.support.inference import Refused, infer, send


def test_sigterm_ends_a_process_that_computes_it(folder: Path) -> None:
    with serve_process(folder, "--lanes", "2", "--drain-s", "0.1") as (server, address):
        waiting = Background(lambda: infer(address, "turning", loop_input(ENDLESS)))
        until(lambda: any(lane["busy"] for lane in send(address, "GET", "/weft/state").json()["lanes"]), "it runs")
        assert other_model_answers(address)
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=120)
        with pytest.raises(Refused) as refused:
            waiting.result()
    assert refused.value.status == 503
    assert server.returncode == 1  # a request went without its result
    assert "Traceback" not in errors
