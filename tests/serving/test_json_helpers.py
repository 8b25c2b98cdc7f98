"""Large JSON in processes beside the server: the same requests and answers, and nobody hurt when a process dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import weakref
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serving.wire_examples import BODIES, INPUTS, JSON, MODEL, OUTPUTS, TYPED, assert_fits, grpc_request
from weft.base.errors import BadRequest, Failed, Overloaded
from weft.serving import grpc_wire, proto, wire
from weft.serving.json_helpers import JsonHelpers
from weft.serving.wire import InferRequest, InferResponse, Wanted, decode, encode, is_large


class Used:
    """Helpers and a loop of their own, for tests that are not asynchronous."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.helpers = JsonHelpers(workers=1)

    def do(self, begin: Callable[[JsonHelpers], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            return await begin(self.helpers)

        return self.loop.run_until_complete(main())


@pytest.fixture(scope="module")
def used() -> Iterator[Used]:
    made = Used()
    yield made
    made.helpers.close()
    made.loop.close()


def same(a: InferRequest, b: InferRequest) -> None:
    assert (a.id, a.parameters, a.wanted, [*a.inputs]) == (b.id, b.parameters, b.wanted, [*b.inputs])
    for name, array in a.inputs.items():
        other = b.inputs[name]
        assert array.dtype == other.dtype and array.shape == other.shape
        assert array.tolist() == other.tolist()


# Reading and writing


@pytest.mark.parametrize(("body", "length"), BODIES)
def test_a_request_is_read_as_it_would_be_here(used: Used, body: bytes, length: int | None) -> None:
    found = used.do(lambda helpers: helpers.decode(body, length, MODEL))
    assert_fits(found, MODEL)
    same(found, decode(body, length, MODEL))


def test_a_request_over_grpc_is_read_as_it_would_be_here(used: Used) -> None:
    message = grpc_request(TYPED, typed=True)
    found = used.do(lambda helpers: helpers.decode_message(message.SerializeToString(), TYPED))
    assert_fits(found, TYPED)
    same(found, grpc_wire.decode_infer(message, TYPED))


def test_what_is_wrong_is_told_as_it_would_be_here(used: Used) -> None:
    for body in (b"{", b"[]", orjson.dumps(JSON | {"inputs": []}), b"\xff"):
        with pytest.raises(BadRequest) as here:
            decode(body, None, MODEL)
        with pytest.raises(BadRequest) as there:
            used.do(lambda helpers, body=body: helpers.decode(body, None, MODEL))  # type: ignore[misc]
        assert str(there.value) == str(here.value)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bodies_are_read_or_refused_alike(used: Used, data: st.DataObject) -> None:
    body, length = data.draw(st.sampled_from(BODIES))
    damaged = bytearray(body)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    outcomes = []
    for read in (lambda: decode(bytes(damaged), length, MODEL), lambda: used.do(
        lambda helpers: helpers.decode(bytes(damaged), length, MODEL))):  # fmt: skip
        try:
            outcomes.append(read())
        except BadRequest as error:
            outcomes.append(str(error))
    assert type(outcomes[0]) is type(outcomes[1])
    if isinstance(outcomes[0], str):
        assert outcomes[0] == outcomes[1]
    else:
        assert_fits(outcomes[1], MODEL)


def response(**outputs: Any) -> InferResponse:
    wanted = (Wanted("y", False), Wanted("s", True))
    return InferResponse(InferRequest(INPUTS, "1", {}, wanted), MODEL, OUTPUTS | outputs, {"weft_batch": 1})


def test_an_answer_is_written_as_it_would_be_here(used: Used) -> None:
    large = response(y=np.arange(8.0).reshape(4, 2)[:, ::-1], s=np.array(["ü", b"x"], np.object_))
    parts, length = used.do(lambda helpers: helpers.encode(large))
    assert ([bytes(part) for part in parts], length) == encode(large)
    written = used.do(lambda helpers: helpers.encode_message(large))
    assert proto.CLASSES["ModelInferResponse"].FromString(written) == grpc_wire.encode_infer(large)


def test_an_answer_that_cannot_be_written_says_why(used: Used) -> None:
    with pytest.raises(Failed, match="came out as float32"):
        used.do(lambda helpers: helpers.encode(response(y=np.zeros((1, 2), np.float32))))


def test_only_answers_with_much_json_are_large() -> None:
    many = np.zeros((wire.LARGE_ELEMENTS, 2))
    assert is_large(response(y=many)) and not is_large(response())
    binary = response(y=many)
    binary.request.wanted = (Wanted("y", True),)
    assert not is_large(binary)


@pytest.mark.parametrize("binary", [True, False])
def test_answers_with_many_or_long_strings_are_large(binary: bool) -> None:
    few, many = wire.LARGE_ELEMENTS // 2, wire.LARGE_ELEMENTS + 1
    long = b"x" * (wire.LARGE_BYTES + 1)
    for items, large in (([b"x"] * few, False), ([b"x"] * many, True), ([long], True), (["x", long], True)):
        made = response(s=np.array(items, np.object_))
        made.request.wanted = (Wanted("s", binary),)
        assert is_large(made) is large


def test_an_error_nobody_thought_of_is_our_fault_and_not_the_end(used: Used) -> None:
    for _ in range(2):
        with pytest.raises(Failed, match=r"internal error: ValueError: .*invalid literal"):
            used.do(lambda helpers: helpers.call(int, b"no number"))
    (process,) = used.helpers.processes
    assert used.do(lambda helpers: helpers.call(process_of, b"")) == process


def process_of(message: memoryview) -> int:
    return os.getpid()


# Life


def test_a_process_that_dies_is_replaced(used: Used, caplog: pytest.LogCaptureFixture) -> None:
    body, length = BODIES[0]
    used.do(lambda helpers: helpers.decode(body, length, MODEL))
    (first,) = used.helpers.processes
    os.kill(first, signal.SIGKILL)
    assert_fits(used.do(lambda helpers: _until_read(helpers, body)), MODEL)
    (second,) = used.helpers.processes
    assert second != first


async def _until_read(helpers: JsonHelpers, body: bytes) -> InferRequest:
    """The request that meets the dying process may fail; those behind it do not."""
    try:
        return await helpers.decode(body, None, MODEL)
    except Failed as error:
        assert "died" in str(error)
        return await helpers.decode(body, None, MODEL)


def test_signals_for_the_server_do_not_end_it(used: Used) -> None:
    body, length = BODIES[0]
    used.do(lambda helpers: helpers.decode(body, length, MODEL))
    before = used.helpers.processes
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(before[0], each)
    used.do(lambda helpers: helpers.decode(body, length, MODEL))
    assert used.helpers.processes == before


def test_who_left_before_its_turn_is_not_read(used: Used) -> None:
    body, length = BODIES[0]
    large = orjson.dumps(JSON | {"parameters": {f"p{i}": i for i in range(200_000)}})

    async def main(helpers: JsonHelpers) -> None:
        first = helpers.decode(large, None, MODEL)
        second = helpers.decode(body, length, MODEL)
        third = helpers.decode(body, length, MODEL)
        second.cancel()
        assert_fits(await third, MODEL)
        assert (await first).parameters["p7"] == 7 and second.cancelled()
        await asyncio.sleep(0)
        assert helpers.busy == 0

    used.do(main)


def test_nothing_is_held_for_who_left_before_its_turn() -> None:
    made = Used()
    body, length = BODIES[0]

    async def main(helpers: JsonHelpers) -> None:
        await helpers.decode(body, length, MODEL)
        (process,) = helpers.processes
        os.kill(process, signal.SIGSTOP)
        try:
            first = helpers.decode(body, length, MODEL)
            large = Body(body)
            gone = weakref.ref(large)
            waiting = helpers.decode(cast(bytes, large), length, MODEL)
            del large
            assert gone() is not None
            waiting.cancel()
            await asyncio.wait([waiting])
            await asyncio.sleep(0)
            assert gone() is None and not first.done()
        finally:
            os.kill(process, signal.SIGCONT)
        assert_fits(await first, MODEL)

    made.do(main)
    made.helpers.close()
    made.loop.close()


class Body(bytearray):
    """One that can be watched."""


def test_none_is_started_before_it_is_needed_nor_after_the_end() -> None:
    made = Used()
    assert made.helpers.processes == []
    made.helpers.close()
    with pytest.raises(Overloaded, match="going down"):
        made.do(lambda helpers: helpers.decode(*BODIES[0], MODEL))
    made.loop.close()


def test_it_knows_no_secret_and_imports_nothing_from_the_folder_it_is_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    for name in ("sitecustomize", "pickle", "orjson", "weft"):
        (tmp_path / f"{name}.py").write_text(f"open({str(ran)!r}, 'w')\nraise ImportError")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFT_API_KEY", "s3cret")
    seen: dict[str, Any] = {}
    start = subprocess.Popen

    def spied(*args: Any, **options: Any) -> Any:
        seen.update(options)
        return start(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", spied)
    made = Used()
    assert_fits(made.do(lambda helpers: helpers.decode(*BODIES[0], MODEL)), MODEL)
    made.helpers.close()
    made.loop.close()
    assert not ran.exists() and "s3cret" not in seen["env"].values()


def test_an_end_stops_what_is_being_read() -> None:
    made = Used()
    body, length = BODIES[0]

    async def main(helpers: JsonHelpers) -> None:
        await helpers.decode(body, length, MODEL)
        os.kill(helpers.processes[0], signal.SIGSTOP)
        reading = [helpers.decode(body, length, MODEL) for _ in range(3)]  # two of them wait for their turn
        await asyncio.to_thread(helpers.close)
        for each in reading:
            with pytest.raises((Failed, Overloaded)):
                await each

    made.do(main)
    made.loop.close()
