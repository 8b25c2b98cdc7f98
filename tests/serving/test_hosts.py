"""Names under which a server may be asked, and pages it takes requests from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.base.errors import BadRequest, Forbidden
from weft.serving.access import HostNames, check_origin, host_name, names_of
from weft.serving.config import ServerConfig


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.0.0.1:9000", "[::1]", "[::1]:8000", "127.0.0.9:1"],
)
def test_a_server_on_loopback_goes_by_the_names_of_this_machine(host: str) -> None:
    HostNames(names_of(ServerConfig(host="127.0.0.9"))).check({"host": host})


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "[::2]",
        "localhost@evil.example",
        "::1:80:80",
    ],
)
def test_it_goes_by_no_others(host: str) -> None:
    with pytest.raises(Forbidden, match="allowed_hosts"):
        HostNames(names_of(ServerConfig())).check({"host": host})


def test_who_names_no_host_is_no_browser() -> None:
    HostNames(names_of(ServerConfig())).check({})


def test_a_server_that_others_reach_goes_by_any_name_unless_some_are_set() -> None:
    HostNames(names_of(ServerConfig(host="0.0.0.0"))).check({"host": "any.example"})
    named = HostNames(names_of(ServerConfig(host="0.0.0.0", allowed_hosts=("API.example", "[::1]"))))
    named.check({"host": "api.example:443"})
    named.check({"host": "[::1]:443"})
    with pytest.raises(Forbidden):
        named.check({"host": "localhost"})
    HostNames(names_of(ServerConfig(allowed_hosts=("*",)))).check({"host": "any.example"})


@pytest.mark.parametrize("name", ["api.example:8000", "API.example.:443", "api.example"])
def test_a_name_may_be_set_with_a_port_that_does_not_matter(name: str) -> None:
    named = HostNames((name, "[::1]:8000", "fe80::1"))
    for host in ("api.example", "api.example:9000", "[::1]", "[fe80::1]:80"):
        named.check({"host": host})
    with pytest.raises(Forbidden):
        named.check({"host": "api"})


@given(st.text(max_size=30))
def test_any_host_has_a_name(host: str) -> None:
    name = host_name(host)
    assert name == name.lower() and not name.endswith(".")


def test_pages_from_elsewhere_have_nothing_done() -> None:
    check_origin("POST", {"origin": "http://Localhost:8000", "host": "localhost:8000"})
    check_origin("GET", {"origin": "http://evil.example", "host": "localhost:8000"})
    check_origin("POST", {"host": "localhost:8000"})
    for origin in ("http://evil.example", "null", "http://localhost:9000", "http://localhost"):
        with pytest.raises(BadRequest, match="pages of"):
            check_origin("POST", {"origin": origin, "host": "localhost:8000"})
