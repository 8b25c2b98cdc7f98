"""Child processes: messages, calls, errors that are carried over, and an end with the parent."""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.base.child_processes import (
    ChildPool,
    ChildProcess,
    PoolClosed,
    answer_calls,
    bare_environment,
    inherited_environment,
    receive,
    send,
)
from weft.base.errors import ChildDied


@pytest.fixture(scope="module")
def child() -> Iterator[ChildProcess]:
    process = ChildProcess(answer_calls)
    yield process
    process.close()


class Stubborn(Exception):
    """An error that can be pickled, but not unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def fail_stubbornly() -> None:
    raise Stubborn("not", "portable")


def print_and_double(value: Any) -> Any:
    os.write(1, b"a library's chatter")
    return value * 2


def make_function() -> object:
    return lambda: None


@given(st.lists(st.binary(max_size=50), max_size=5), st.integers(0, 3))
def test_messages_arrive_as_they_were_sent(data: list[bytes], views: int) -> None:
    stream = io.BytesIO()
    arrays = [np.arange(size) for size in range(views)]
    send(stream, (data, arrays, [pickle.PickleBuffer(item) for item in data]))
    send(stream, "next")
    stream.seek(0)
    received, received_arrays, buffers = receive(stream)
    assert received == data and [bytes(buffer) for buffer in buffers] == data
    assert all((a == b).all() for a, b in zip(received_arrays, arrays, strict=True))
    assert receive(stream) == "next"
    with pytest.raises(EOFError):
        receive(stream)


def test_half_a_message_is_the_end_of_the_stream() -> None:
    stream = io.BytesIO()
    send(stream, "whole")
    with pytest.raises(EOFError):
        receive(io.BytesIO(stream.getvalue()[:-1]))


def test_a_function_is_called_in_the_child_and_may_print(child: ChildProcess) -> None:
    assert child.call(os.getpid) == child.pid != os.getpid()
    assert child.call(print_and_double, np.arange(3)).tolist() == [0, 2, 4]


def test_an_error_is_raised_here_with_the_traceback_of_there(child: ChildProcess) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        child.call(divmod, 1, 0)
    assert "Traceback" in caught.value.__notes__[0] and "divmod" not in str(caught.value)
    assert child.call(divmod, 7, 2) == (3, 1)


def test_an_error_or_a_result_that_cannot_travel_is_told_in_words(child: ChildProcess) -> None:
    with pytest.raises(RuntimeError, match="Stubborn: not portable"):
        child.call(fail_stubbornly)
    with pytest.raises(Exception, match="pickle"):
        child.call(make_function)
    assert child.call(max, 1, 2) == 2


def test_a_message_that_cannot_be_read_there_is_an_error_and_not_the_end(
    child: ChildProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert child.alive
    (tmp_path / "only_here.py").write_text("def function(): ...")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    with pytest.raises(ModuleNotFoundError, match="only_here"):
        child.call(only_here.function)
    assert child.call(max, 1, 2) == 2


def test_a_death_is_told_with_how_it_happened() -> None:
    for kill, how in ((partial(os._exit, 3), "with code 3"), (partial(signal.raise_signal, 9), "by signal 9")):
        child = ChildProcess(answer_calls)
        with pytest.raises(ChildDied, match=how):
            child.call(kill)
        with pytest.raises(ChildDied, match=how):
            child.call(max, 1, 2)
        child.close()


def test_a_child_ends_when_its_parent_closes_its_end(child: ChildProcess) -> None:
    other = ChildProcess(answer_calls)
    other._input.close()  # as the system does when the parent dies
    assert other.wait() == 0
    other.close()


def test_a_child_has_a_session_of_its_own_so_ctrl_c_is_for_the_parent(child: ChildProcess) -> None:
    assert os.getsid(child.pid) == child.pid


def test_a_child_imports_nothing_from_the_working_directory_unless_its_parent_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "colorsys.py").write_text("rgb_to_hsv = None")
    monkeypatch.chdir(tmp_path)
    for path, shadowed in (([*sys.path], False), (["", *sys.path], True)):
        monkeypatch.setattr(sys, "path", path)
        other = ChildProcess(answer_calls)
        assert (other.call(has_shadow) is True) is shadowed
        other.close()


def has_shadow() -> bool:
    import colorsys

    return colorsys.rgb_to_hsv is None


def test_a_bare_environment_has_no_secrets_and_not_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFT_API_KEY", "secret")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    bare, whole = bare_environment(), inherited_environment()
    assert "WEFT_API_KEY" not in bare and bare_environment(["WEFT_API_KEY"])["WEFT_API_KEY"] == "secret"
    assert whole["WEFT_API_KEY"] == "secret" and bare["PATH"] == os.environ["PATH"]
    for environment, has_directory in ((bare, False), (whole, True)):
        assert (os.getcwd() in environment["PYTHONPATH"].split(os.pathsep)) is has_directory


@pytest.fixture
def pool() -> Iterator[ChildPool]:
    children = ChildPool(partial(ChildProcess, answer_calls))
    yield children
    children.close()


def test_a_pool_keeps_its_child_and_replaces_a_dead_one(pool: ChildPool) -> None:
    assert pool.process_ids == []
    first = pool.call(os.getpid)
    with pytest.raises(ZeroDivisionError):
        pool.call(divmod, 1, 0)
    assert pool.call(os.getpid) == first
    with pytest.raises(ChildDied):
        pool.call(os._exit, 1)
    assert pool.process_ids == []
    assert pool.call(os.getpid) != first


def test_closing_a_pool_ends_who_waits(pool: ChildPool) -> None:
    pool.call(max, 1, 2)
    (process_id,) = pool.process_ids
    os.kill(process_id, signal.SIGSTOP)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            pool.call(max, 1, 2)
        except (ChildDied, PoolClosed) as error:
            errors.append(error)

    waiting = Thread(target=wait)
    waiting.start()
    pool.close()
    waiting.join()
    assert len(errors) == 1
    with pytest.raises(PoolClosed):
        pool.call(max, 1, 2)
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)
