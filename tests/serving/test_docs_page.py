"""The page at ``/docs`` in a real browser: it shows what the server describes, and its forms ask the server."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
from collections.abc import Iterator

import pytest

from tests.serving.live import PATIENCE_S, Live, mlp, running
from tests.support.browser import Browser, needs_chromium, wait_until_shown
from weft.serving import pages
from weft.serving.endpoints import ENDPOINTS

KEY = "k3y"
PAGE = bytes(pages.docs().body)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    net = mlp(tmp_path_factory.mktemp("models") / "net.onnx", features=4, classes=2)
    with running(net, grpc_port=None, learn_s=0) as live:
        yield live


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    net = mlp(tmp_path_factory.mktemp("models") / "net.onnx")
    with running(net, grpc_port=None, learn_s=0, api_key=KEY) as live:
        yield live


def shows(browser: Browser, selector: str, text: str) -> None:
    wait_until_shown(browser, f"document.querySelector({json.dumps(selector)})?.innerText.includes({json.dumps(text)})")


def test_the_page_is_one_file_that_asks_nobody_else() -> None:
    text = PAGE.decode()
    assert len(PAGE) < 24_000
    assert set(re.findall(r"https?://[^'\"\s]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|style=|onclick=", text)


def test_only_its_own_script_and_style_may_be_used() -> None:
    policy = dict(pages.docs().headers)["Content-Security-Policy"]
    assert "unsafe" not in policy and policy.startswith("default-src 'none'; ")
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", PAGE.decode(), flags=re.S)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'; " in policy


def test_it_is_served_without_a_key_and_with_its_policy(locked: Live) -> None:
    connection = http.client.HTTPConnection(locked.address, timeout=PATIENCE_S)
    connection.request("GET", "/docs")
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (200, PAGE)
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert answer.headers["Content-Security-Policy"] == dict(pages.docs().headers)["Content-Security-Policy"]
    connection.close()


@needs_chromium
def test_it_shows_every_path_by_its_groups(browser: Browser, server: Live) -> None:
    browser.open(f"{server.url}/docs")
    shows(browser, "#shown", "Repository")
    described = {endpoint.path for endpoint in ENDPOINTS}
    assert set(browser.texts("summary .path")) == described
    assert browser.texts("h2") == ["Inference", "Models", "Repository", "Server", "What weft shows of itself"]
    assert browser.complaints == []


@needs_chromium
def test_a_model_is_tried_out(browser: Browser, server: Live) -> None:
    browser.open("about:blank")
    browser.open(f"{server.url}/docs#infer")
    wait_until_shown(browser, "document.querySelector('#infer[open] textarea')")
    assert browser.evaluate("document.querySelector('#infer input').value") == "net"
    assert "inputs list of object" in browser.evaluate("document.querySelector('#infer .body').textContent")
    browser.click("#infer button[type=button]")
    wait_until_shown(browser, "document.querySelector('#infer textarea').value.includes('[1,4]')")
    browser.click("#infer button.send")
    shows(browser, "#infer .status", "200 OK")
    assert '"model_name": "net"' in browser.text("#infer .answer")
    assert "curl -X POST" in browser.evaluate("document.querySelector('#infer [role=status] details').textContent")
    assert browser.complaints == []


@needs_chromium
def test_a_refusal_is_shown_as_one(browser: Browser, server: Live) -> None:
    browser.open("about:blank")
    browser.open(f"{server.url}/docs#infer")
    wait_until_shown(browser, "document.querySelector('#infer[open] textarea')")
    browser.evaluate("document.querySelector('#infer textarea').value = '{}'")
    browser.click("#infer button.send")
    shows(browser, "#infer .status.bad", "400 Bad Request")
    assert "inputs must be a list" in browser.text("#infer .answer")


@needs_chromium
def test_it_asks_for_the_key_and_uses_it(browser: Browser, locked: Live) -> None:
    browser.open("about:blank")
    browser.open(f"{locked.url}/docs#server")
    wait_until_shown(browser, "document.querySelector('#ask')?.hidden === false")
    browser.evaluate("document.querySelector('#key').value = 'wrong'")
    browser.click("#ask button")
    shows(browser, "#trouble", "refused")
    browser.evaluate(f"document.querySelector('#key').value = '{KEY}'")
    browser.click("#ask button")
    wait_until_shown(browser, "document.querySelector('#server[open] button.send')")
    assert browser.evaluate("document.querySelector('#ask').hidden && document.querySelector('#trouble').hidden")
    browser.click("#server button.send")
    shows(browser, "#server .status", "200 OK")
    assert '"name": "weft"' in browser.text("#server .answer")
    shown = browser.evaluate("document.querySelector('#server [role=status]').textContent")
    assert KEY not in shown and "WEFT_API_KEY" in shown
