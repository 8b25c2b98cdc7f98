"""Several keys: who is let in, what each may ask for, and what a change of the file does."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.base.errors import InputError, OverQuota, Unauthorised
from weft.serving.access import (
    ANYBODY,
    LOOK_EVERY_S,
    OWN,
    Caller,
    KeyConfig,
    Keys,
    read_keys,
)
from weft.serving.config import ServerConfig
from weft.serving.server import Server, _Signals, serve

TWO = """
[[keys]]
name = "one"
key = "first"
requests_per_s = 2
[[keys]]
name = "two"
key = "second"
in_flight = 1
priority = 2
top_priority = 2
"""


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(TWO)
    return path


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def name(keys: Keys, headers: dict[str, str]) -> str | None:
    found = keys.caller(headers)
    return found and found.name


def test_without_keys_everybody_is_anybody() -> None:
    keys = Keys()
    assert not keys.required and name(keys, {}) == name(keys, bearer("x")) == ANYBODY


def test_the_servers_own_key() -> None:
    keys = Keys("open-sesame")
    assert keys.required
    assert name(keys, bearer("open-sesame")) == name(keys, {"x-api-key": "open-sesame"}) == OWN
    assert name(keys, {"authorization": "bearer  open-sesame "}) == OWN
    for headers in (
        {},
        bearer(""),
        bearer("open-sesam"),
        {"authorization": "Basic open-sesame"},
        {"x-api-key": "\udcff"},
    ):
        assert name(keys, headers) is None


def test_keys_of_a_file_beside_the_servers_own(file: Path) -> None:
    keys = Keys("open-sesame", file)
    assert [name(keys, bearer(key)) for key in ("open-sesame", "first", "second", "third")] == [OWN, "one", "two", None]
    assert [*keys.callers] == [OWN, "one", "two"]


def test_a_file_without_keys_lets_nobody_in(tmp_path: Path) -> None:
    (tmp_path / "none.toml").write_text("")
    keys = Keys(None, tmp_path / "none.toml")
    assert keys.required and name(keys, {}) is None


# Quotas


def test_requests_per_second(clock: Clock) -> None:
    caller = Caller("x", clock)
    caller.set_limits(KeyConfig(name="x", key="k", requests_per_s=4))
    for _ in range(4):
        caller.begin()
        caller.end()
    with pytest.raises(OverQuota, match="'x' asks for more than 4 requests per second") as refused:
        caller.begin()
    assert refused.value.retry_after_s == 0.25 and (refused.value.status, refused.value.code) == (
        429,
        "RESOURCE_EXHAUSTED",
    )
    clock.now_s += 0.25
    caller.begin()
    assert (caller.requests, caller.in_flight, caller.refused["rate"]) == (5, 1, 1)
    clock.now_s += 1000
    for _ in range(4):
        caller.begin()
    with pytest.raises(OverQuota):
        caller.begin()


def test_a_rate_below_one_a_second(clock: Clock) -> None:
    caller = Caller("x", clock)
    caller.set_limits(KeyConfig(name="x", key="k", requests_per_s=0.1))
    caller.begin()
    with pytest.raises(OverQuota) as refused:
        caller.begin()
    assert refused.value.retry_after_s == pytest.approx(10)
    clock.now_s += 10.001
    caller.begin()


def test_requests_in_flight(clock: Clock) -> None:
    caller = Caller("x", clock)
    caller.set_limits(KeyConfig(name="x", key="k", in_flight=2))
    caller.begin()
    caller.begin()
    with pytest.raises(OverQuota, match="2 requests in flight"):
        caller.begin()
    caller.end()
    caller.begin()
    assert (caller.requests, caller.in_flight, caller.refused["in_flight"]) == (3, 2, 1)


def test_who_was_admitted_enters_only_where_there_is_room_still() -> None:
    caller = Caller("x")
    caller.set_limits(KeyConfig(name="x", key="k", in_flight=1))
    caller.admit()
    caller.admit()
    caller.enter()
    with pytest.raises(OverQuota, match="1 requests in flight"):
        caller.enter()
    caller.end()
    caller.enter()
    assert (caller.requests, caller.in_flight, caller.refused["in_flight"]) == (2, 1, 1)


@settings(deadline=None)
@given(rate=st.floats(0.5, 50), pauses=st.lists(st.floats(0, 2), max_size=60))
def test_no_more_come_than_the_rate_allows(rate: float, pauses: list[float]) -> None:
    clock = Clock()
    caller = Caller("x", clock)
    caller.set_limits(KeyConfig(name="x", key="k", requests_per_s=rate))
    for pause_s in pauses:
        clock.now_s += pause_s
        try:
            caller.begin()
        except OverQuota as error:
            assert error.retry_after_s > 0
    assert caller.requests <= max(1, rate) + rate * sum(pauses) + 1e-6


# Changes


def change(file: Path, text: str) -> None:
    """Write it with another time, whatever the clock of the files is like."""
    before = file.stat().st_mtime_ns if file.exists() else 0
    file.write_text(text)
    os.utime(file, ns=(before + 10**9, before + 10**9))


def test_a_change_is_seen_within_a_second(file: Path, clock: Clock) -> None:
    keys = Keys(None, file, clock)
    one = keys.caller(bearer("first"))
    assert one is not None
    one.begin()
    change(file, '[[keys]]\nname = "one"\nkey = "other"\n')
    assert name(keys, bearer("first")) == "one"  # nobody looked
    clock.now_s += LOOK_EVERY_S
    assert name(keys, bearer("first")) is None
    assert keys.caller(bearer("other")) is one and (one.requests, one.in_flight) == (1, 1)
    assert name(keys, bearer("second")) is None
    for _ in range(9):
        one.begin()  # it has no rate any more


def test_a_key_that_is_gone_is_refused_also_where_it_is_in_use(file: Path, clock: Clock) -> None:
    keys = Keys(None, file, clock)
    two = keys.caller(bearer("second"))
    assert two is not None
    change(file, "")
    keys.reload(force=True)
    with pytest.raises(Unauthorised):
        two.begin()
    change(file, TWO)
    keys.reload(force=True)
    two.begin()


@pytest.mark.parametrize("broken", ["[[keys]", '[[keys]]\nname = "one"\n', '[[keys]]\nname = "a"\nkey = "own"\n', None])
def test_a_broken_file_changes_nothing_and_is_logged_once(
    file: Path, clock: Clock, caplog: pytest.LogCaptureFixture, broken: str | None
) -> None:
    keys = Keys("own", file, clock)
    file.unlink() if broken is None else change(file, broken)
    for _ in range(3):
        clock.now_s += LOOK_EVERY_S
        assert name(keys, bearer("first")) == "one"
    (record,) = caplog.records
    assert "keys stay as they were" in record.message and str(file) in record.message
    change(file, "")
    clock.now_s += LOOK_EVERY_S
    assert name(keys, bearer("first")) is None


# Files


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("keys = 's3cret'", "keys: "),
        ("[[keys]]\nname = 'a'\nkey = 's3cret with spaces'", "keys.0.key: "),
        ("[[keys]]\nname = 'a'\nkey = ['s3cret']", "keys.0.key: "),
        ("[[keys]]\nname = 'a'", "keys.0.key: "),
        ("[[keys]]\nkey = 's3cret'", "keys.0.name: "),
        ("[[keys]]\nname = 'a'\nkey = 's3cret'\nrate = 1", "keys.0.rate: "),
        ("[[keys]]\nname = 'a'\nkey = 's3cret'\npriority = 4", "keys.0.priority: "),
        ("[[keys]]\nname = 'a'\nkey = 's3cret'\ntop_priority = 0", "keys.0.top_priority: "),
        ("[[keys]]\nname = 'a'\nkey = 's3cret'\nrequests_per_s = 0", "keys.0.requests_per_s: "),
        ("[[keys]]\nname = 'a'\nkey = 's3cret'\nin_flight = 0", "keys.0.in_flight: "),
        ("[[keys]]\nname = 'a'\nkey = 's3cret'\n[[keys]]\nname = 'a'\nkey = 's3cret2'", "name 'a' is given twice"),
        ("[[keys]]\nname = 'a'\nkey = 's3cret'\n[[keys]]\nname = 'b'\nkey = 's3cret'", "same key"),
        ("[[keys]]\nname = 'api_key'\nkey = 's3cret'", "name 'api_key'"),
        ("more = 1", "more: "),
        ("[[keys]]\nname = 'a'\nkey = 's3cret", "not a TOML file"),
    ],
)
def test_a_file_with_a_mistake_is_refused_without_showing_a_key(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(InputError) as refused:
        read_keys(path)
    message = str(refused.value)
    assert message.startswith(f"{path}: ") and said in message
    assert "s3cret" not in message and message.isprintable()
    assert "s3cret" not in repr(refused.value.__cause__)


def test_a_file_that_cannot_be_read_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read it"):
        Keys(None, tmp_path / "none.toml")


def test_a_key_is_not_printed() -> None:
    assert "s3cret" not in repr(KeyConfig(name="a", key="s3cret"))


PIECES = st.sampled_from(
    [
        "[[keys]]",
        "name = 'a'",
        "name = 'b'",
        "key = 'k'",
        "key = 1",
        "in_flight = 1",
        "requests_per_s = nan",
        "x = 1",
        "[",
    ]
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=80), st.lists(PIECES, max_size=8).map("\n".join).map(str.encode)))
def test_any_file_is_read_or_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keys.toml"
    path.write_bytes(content)
    try:
        found = read_keys(path)
    except InputError as error:
        assert str(error).isprintable()
    else:
        assert len({each.name for each in found}) == len(found)


def test_whoever_asks_with_a_wrong_key_learns_nothing_from_how_it_is_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is compared are digests with a secret: no two processes make the same of a key."""
    digests: list[Callable[[str], bytes]] = [Keys("k")._digest for _ in range(2)]
    assert digests[0]("k") != digests[1]("k") and digests[0]("k") == digests[0]("k")


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="the system has no SIGHUP")
def test_a_signal_has_the_file_read_again(file: Path) -> None:
    keys = Keys(None, file)
    server = SimpleNamespace(config=ServerConfig(keys_file=file), keys=keys)

    async def main() -> None:
        _Signals(0.0).reread_keys(cast(Server, server))
        before = file.stat()
        file.write_text(TWO.replace("second", "SECOND"))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # nothing tells that it has changed
        os.kill(os.getpid(), signal.SIGHUP)
        while name(keys, bearer("SECOND")) != "two":
            await asyncio.sleep(0)

    asyncio.run(main())
    assert name(keys, bearer("second")) is None


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="the system has no SIGHUP")
def test_a_signal_while_models_are_loaded_ends_nothing(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missed: list[int] = []
    seen: list[str | None] = []

    async def start(server: Server, say: object) -> None:
        file.write_text(TWO.replace("second", "SECOND"))
        os.kill(os.getpid(), signal.SIGHUP)
        while not missed and name(server.keys, bearer("SECOND")) is None:
            await asyncio.sleep(0)
        seen.append(name(server.keys, bearer("SECOND")))
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    monkeypatch.setattr(Server, "start", start)
    before = signal.signal(signal.SIGHUP, lambda *_: missed.append(1))
    try:
        config = ServerConfig(keys_file=file, cache=tmp_path / "cache")
        assert asyncio.run(serve(config, None, lambda _: None))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert seen == ["two"] and not missed


def test_a_server_whose_keys_cannot_be_read_is_not_even_made(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read it"):
        Server(ServerConfig(keys_file=tmp_path / "none.toml", cache=tmp_path / "cache"))
