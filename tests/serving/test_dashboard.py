"""The dashboard in a real browser: what people see of a server that works, goes away, restarts or asks for a key.

The browser is driven over a pair of pipes with the DevTools protocol, so nothing but Chromium is needed. A test waits
for what it wants to see while the page asks the server again and again, and fails when very many more rounds did not
bring it. An error in the page's script fails the test at once.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.support.browser import Browser, needs_chromium
from weft.serving import pages

NONE = "\N{EN DASH}"
PAGE = bytes(pages.dashboard().body)
"""Stands for a figure that is not known."""

EVIL = "<script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>"


def model(name: str, **values: Any) -> dict[str, Any]:
    """A model as the server tells of it."""
    return {
        "name": name, "version": "1", "state": "ready", "message": "", "rate": 3.2, "requests": 40,
        "p50_ms": 5.1, "p90_ms": 9.04, "p99_ms": 20.25, "window_met": 30, "window_missed": 1, "queued": 2,
        "queue_size": 256, "mean_batch": 1.3, "segments": 11, "memory_bytes": 102_000_000, "failures": {"expired": 1},
    } | values  # fmt: skip


def silent(name: str, **values: Any) -> dict[str, Any]:
    """A model that served nothing."""
    nothing = {"p50_ms": None, "p90_ms": None, "p99_ms": None, "window_met": 0, "window_missed": 0, "mean_batch": None}
    return model(name, rate=0.0, requests=0, queued=0, segments=0, memory_bytes=0, failures={}, **nothing) | values


def state(models: list[dict[str, Any]], **values: Any) -> dict[str, Any]:
    """The answer to ``weft/state``."""
    totals = {
        "requests": 1100, "rate": 9.8, "success": 1098, "failures": {"queue_full": 1, "expired": 3},
        "deadline_met": 900, "deadline_missed": 100, "window_met": 40, "window_missed": 0,
        "preemptions": 5, "aborts": 1,
    }  # fmt: skip
    lanes = [{"busy": True, "utilisation": 0.71}, {"busy": False, "utilisation": 0.25}]
    return {
        "server": "weft", "version": "0.1.0", "policy": "punctual", "ready": True, "draining": False,
        "uptime_s": 3700.0, "now_s": 1234.5, "lanes": lanes, "in_flight": 3, "window_s": 10, "totals": totals,
        "memory": {"held_bytes": 304_087_040, "used_bytes": 204_000_000, "budget_bytes": None}, "models": models,
    } | values  # fmt: skip


def span(model: str, start_s: float, length_s: float, **values: Any) -> dict[str, Any]:
    times = {"start_s": start_s, "end_s": start_s + length_s, "predicted_s": length_s * 0.8}
    names = {"lane": 0, "model": model, "segment": "3/11", "batch": 2, "id": 17, "outcome": "done"}
    return names | times | values


def history(times_s: list[float], rates: list[float | None], *models: str) -> dict[str, Any]:
    """The answer to ``weft/history``: models that all had these rates."""
    nothing: list[float | None] = [None] * len(rates)
    samples = {"rate": rates, "p50_ms": nothing, "p99_ms": rates, "missed": nothing, "failed": nothing}
    each = [{"name": name, "version": "1", **samples} for name in models]
    return {"step_s": 2.0, "kept_s": 600.0, "times_s": times_s, "totals": samples, "models": each}


class Stub(ThreadingHTTPServer):
    """A server that answers what a test tells it to, and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.state = state([])
        self.spans: list[dict[str, Any]] = []
        self.history = history([], [])
        self.key = ""
        self.gone = False
        self.since: list[float] = []
        self.asked: list[tuple[str, str]] = []
        self.address = f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_GET(self) -> None:
        address, key = urlsplit(self.path), self.headers.get("Authorization", "")
        self.server.asked.append((address.path, key))
        if address.path == "/":
            self._send(200, PAGE, "text/html; charset=utf-8")
        elif self.server.gone:
            self.close_connection = True
        elif self.server.key and key != f"Bearer {self.server.key}":
            self._send_json({"error": "a key is needed"}, 401)
        elif address.path == "/weft/state":
            self._send_json(self.server.state)
        elif address.path == "/weft/timeline":
            self.server.since.append(float(parse_qs(address.query)["since"][0]))
            spans = [span for span in self.server.spans if span["end_s"] > self.server.since[-1]]
            self._send_json({"now_s": self.server.state["now_s"], "spans": spans, "models": []})
        elif address.path == "/weft/history":
            self._send_json(self.server.history)
        else:
            self._send_json({"traceEvents": []}, 200 if address.path == "/weft/trace" else 404)

    def _send_json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def running(stub: Stub) -> Iterator[Stub]:
    thread = threading.Thread(target=stub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield stub
    finally:
        stub.shutdown()
        thread.join()
        stub.server_close()


@pytest.fixture
def stub(browser: Browser) -> Iterator[Stub]:
    with running(Stub()) as server:
        yield server
        browser.go("about:blank")  # it asks no more while the server goes


def picture(browser: Browser) -> str:
    """The lanes as they are after all that was to be painted."""
    browser.evaluate("new Promise(go => requestAnimationFrame(() => requestAnimationFrame(go)))")
    return str(browser.evaluate("document.querySelector('#lanes').toDataURL()"))


def test_the_page_is_one_small_file_that_asks_nobody_else():
    text, own = PAGE.decode(), files("weft.serving").joinpath("dashboard.html").read_bytes()
    assert len(own) < 42_000 and len(PAGE) < 62_000  # the rest is what all pages share, and the history
    assert "/*weft" not in text
    assert set(re.findall(r"https?://[^'\"\s]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert pages.dashboard() is pages.dashboard()


@needs_chromium
def test_it_shows_the_server_its_totals_and_its_models(browser, stub):
    stub.state = state([model("resnet50"), silent("bert", version="7", state="failed", message="bert/7: no such file")])
    browser.open(stub.address)
    browser.wait_for_text("#state", "Ready")
    assert browser.texts("header") == ["weft Ready version 0.1.0 policy punctual 2 lanes up 1 h 1 min"]
    cards = dict(zip(browser.texts(".card dt"), browser.texts(".card dd:not(.small)"), strict=True))
    assert cards == {
        "Requests/s": "9.8", "In flight": "3", "Deadlines met, 10 s": "100.0 %", "Deadlines met, all": "90.0 %",
        "Drops": "4", "Lanes in use": "48.0 %", "Preemptions": "5", "Memory": "290 MiB",
    }  # fmt: skip
    assert "expired 3, queue full 1" in browser.texts(".card .small")
    assert browser.texts("thead th") == [
        "Model", "State", "Req/s", "Curve", "p50 ms", "p90 ms", "p99 ms", "Deadlines", "Queue", "Batch", "Segments",
        "Memory", "Drops",
    ]  # fmt: skip
    first, second = browser.texts("tbody")
    assert first == "resnet50 v1 ready 3.2 5.1 9.0 20.3 96.7 % 2 / 256 1.3 11 102 MB 1 expired 1"
    assert second == f"bert v7 failed 0 {NONE} {NONE} {NONE} {NONE} 0 / 256 {NONE} 0 0 B 0 bert/7: no such file"
    assert browser.complaints == []


@needs_chromium
def test_it_shows_who_had_which_share_of_a_gpu(browser, stub):
    shares = {"84": 0.25, "132": 0.5, "48": 0.0001}
    stub.state = state(
        [model("a", shares=shares, message="odd"), model("b", shares={})],
        lanes=[{"busy": True, "utilisation": 0.5, "share": share} for share in ("132", "132 high", "84", "48")],
    )
    browser.open(stub.address)
    browser.wait_for_text("#state", "Ready")
    said = "Last minutes: 50.0 % of the time on 132 SMs, 25.0 % of the time on 84 SMs; odd"
    assert browser.texts("tr.message:not([hidden])") == [said]
    assert browser.complaints == []


@needs_chromium
def test_it_shows_where_rows_leave_a_model_with_exits(browser, stub):
    exits = {"names": ["early", "end"], "taken": [30, 10], "threshold": 0.8, "accuracy": 0.9712, "merges": 3}
    fresh = {"names": ["e1", "e2"], "taken": [0, 0], "threshold": 0.55, "accuracy": None, "merges": 1}
    stub.state = state([model("a", exits=exits, message="odd"), model("b", exits=fresh), model("c", exits=None)])
    browser.open(stub.address)
    browser.wait_for_text("#state", "Ready")
    said = "Exits: early 75.0 %, end 25.0 %; sure from 0.80, about 97.1 % of the answers right; 3 merges; odd"
    assert browser.texts("tr.message:not([hidden])") == [
        said, f"Exits: e1 {NONE}, e2 {NONE}; sure from 0.55; 1 merge",
    ]  # fmt: skip
    assert browser.complaints == []


@needs_chromium
def test_it_shows_the_times_of_the_engines_of_a_gpu(browser, stub):
    engines_s = {"onnxruntime": {"1": 0.00067, "32": 0.0033}, "compiled": {"1": 0.00044, "32": 0.0013}}
    stub.state = state([
        model("a", engine="compiled", engines_s=engines_s),
        model("b", engine="onnxruntime", engines_s={"compiled": {"1": 0.5}, "onnxruntime": {"1": 0.25}}),
    ])  # fmt: skip
    browser.open(stub.address)
    browser.wait_for_text("#state", "Ready")
    assert browser.texts("tr.message:not([hidden])") == [
        "Engine: compiled 0.44 ms for 1 row, 1.3 ms for 32 rows; "
        "onnxruntime would take 0.67 ms for 1 row, 3.3 ms for 32 rows",
        "Engine: onnxruntime 250 ms for 1 row; compiled would take 500 ms for 1 row",
    ]
    assert browser.complaints == []


@needs_chromium
def test_names_are_shown_as_text_whatever_is_in_them(browser, stub):
    stub.state = state([model(EVIL, version=EVIL, message=EVIL, failures={EVIL: 1})], server=EVIL, policy=EVIL)
    stub.state["totals"]["failures"] = {EVIL: 1}
    stub.spans = [span(EVIL, 1234.0, 0.4, segment=EVIL, id=EVIL, batch=EVIL, outcome=EVIL)]
    browser.open(stub.address)
    browser.wait_for_text("tbody th", EVIL)
    browser.evaluate("document.querySelector('#lanes').focus()")
    browser.press("ArrowRight")
    browser.wait_for_text("#tip", EVIL)
    browser.wait_for_rounds(2)
    assert browser.text("h1") == EVIL and browser.text("tbody .message") == EVIL
    assert browser.evaluate("[window.hurt ?? null, document.images.length, document.scripts.length]") == [None, 0, 1]
    assert browser.complaints == []


@needs_chromium
def test_a_server_without_models_says_so(browser, stub):
    stub.state = state([], ready=False)
    browser.open(stub.address)
    browser.wait_for_text("#state", "Not ready")
    assert browser.text("#none") == "No models yet."
    stub.state = state([model("late")], draining=True)
    browser.wait_for_text("tbody", "late")
    assert browser.text("#state") == "Draining"
    stub.state = state([])
    browser.wait_for("document.querySelectorAll('tbody').length === 0")


@needs_chromium
def test_forty_models_fit_the_width(browser, stub):
    models = [model(f"a-model-with-a-rather-long-name-{k}", message="a long message " * 20) for k in range(40)]
    stub.state = state(models, lanes=[{"busy": True, "utilisation": 1.0}] * 12)
    stub.spans = [span(f"a-model-with-a-rather-long-name-{k}", 1230 + k / 10, 0.1) for k in range(40)]
    browser.open(stub.address, width=400)
    browser.wait_for("document.querySelectorAll('#legend button').length === 40")
    assert len(browser.texts("tbody")) == 40
    for width in (400, 800, 1280):
        browser.resize(width)
        picture(browser)
        over = "node => node.scrollWidth - node.clientWidth"
        assert browser.evaluate(f"[document.documentElement, document.querySelector('#scroll')].map({over})") == [0, 0]
    colours = "new Set([...document.querySelectorAll('tbody .swatch')].map(node => node.style.background)).size"
    assert browser.evaluate(colours) == 40


@needs_chromium
def test_what_scrolls_sideways_shows_that_it_goes_on(browser, stub):
    stub.state = state([model("resnet50")])
    browser.open(stub.address, width=400)
    browser.wait_for_text("tbody", "resnet50")
    wider = "node.scrollWidth > node.clientWidth && getComputedStyle(node).overflowX === 'auto'"
    shadow = "getComputedStyle(node).backgroundImage.includes('linear-gradient')"
    found = f"[...document.querySelectorAll('main *')].filter(node => {wider}).map(node => [node.id, {shadow}])"
    assert browser.evaluate(found) == [["head", True]]
    assert browser.evaluate(f"(node => {shadow})(document.querySelector('#scroll'))")


@needs_chromium
def test_a_server_that_goes_away_is_told_and_found_again(browser, stub):
    stub.state = state([model("resnet50")])
    browser.open(stub.address)
    browser.wait_for_text("#state", "Ready")
    stub.gone = True
    browser.wait_for_text("#state", "Connection lost, retrying")
    browser.wait_for_text("#lost", "The server cannot be reached; these figures are")
    assert "resnet50" in browser.text("tbody")
    stub.state = state([model("resnet50", rate=77.0)])
    stub.gone = False
    browser.wait_for_text("tbody", "77.0")
    assert browser.text("#state") == "Ready"
    assert browser.evaluate("document.querySelector('#lost').hidden")


@needs_chromium
def test_a_key_is_asked_for_kept_and_sent(browser, stub):
    stub.state, stub.key = state([model("resnet50")]), "secret"
    browser.open(stub.address)
    browser.wait_for("document.activeElement.id === 'key'")
    assert browser.text("#state") == "API key needed"
    browser.evaluate("document.querySelector('#key').value = 'wrong'")
    browser.click("#ask button")
    browser.wait_for_text("#refused", "The server refused this key.")
    browser.evaluate("document.querySelector('#key').value = 'secret'")
    browser.click("#ask button")
    browser.wait_for_text("tbody", "resnet50")
    assert browser.evaluate("document.querySelector('#ask').hidden")
    assert browser.evaluate("sessionStorage.getItem('weft-key')") == "secret"
    browser.click("#trace")
    while ("/weft/trace", "Bearer secret") not in stub.asked:
        browser.wait_for_rounds(1)
    browser.complaints.clear()
    browser.go(stub.address)
    browser.wait_for_text("tbody", "resnet50")
    assert browser.complaints == []


def place(browser: Browser, time_s: float, lane: int, *, window_s: float = 5, now_s: float = 1234.5) -> list[float]:
    """Where a time of a lane is on the page."""
    box = "(({left, top, width}) => [left, top, width])(document.querySelector('#lanes').getBoundingClientRect())"
    left, top, width = browser.evaluate(box)
    return [left + 70 + (width - 70) * (1 - (now_s - time_s) / window_s), top + 22 + 54 * lane + 23]


def colours(browser: Browser, time_s: float, *depths: int, **view: float) -> list[list[int]]:
    """What is painted at a time, so many pixels below the top of the first lane."""
    x, _ = place(browser, time_s, 0, **view)
    canvas = "const node = document.querySelector('#lanes'), pen = node.getContext('2d');"
    left = f"const left = {x} - node.getBoundingClientRect().left;"
    read = f"return {list(depths)}.map(depth => [...pen.getImageData(left, 22 + depth, 1, 1).data]);"
    return list(browser.evaluate(f"(() => {{ {canvas} {left} {read} }})()"))


BLUE, ORANGE, FREE = [0, 114, 178, 255], [230, 159, 0, 255], [241, 243, 246, 255]
LANES = 3, 57
"""Depths near the top of the first and the second lane, where no letters are."""


@needs_chromium
def test_lanes_are_painted_where_and_when_models_ran(browser, stub):
    stub.state = state([model("first"), model("second")])
    stub.spans = [span("first", 1231, 0.5), span("second", 1233, 1.0, lane=1), span("first", 1220, 2.0)]
    browser.open(stub.address)
    browser.wait_for_text("#legend", "first\n5 %")
    assert colours(browser, 1231.25, *LANES) == [BLUE, FREE]
    assert colours(browser, 1233.5, *LANES) == [FREE, ORANGE]
    browser.choose("#window", "1")
    browser.wait_for_text("#legend", "second\n25 %")
    assert colours(browser, 1233.75, *LANES, window_s=1) == [FREE, ORANGE]
    assert colours(browser, 1234.25, *LANES, window_s=1) == [FREE, FREE]
    browser.choose("#window", "20")
    browser.wait_for_text("#legend", "first\n6 %")
    assert colours(browser, 1221.0, *LANES, window_s=20) == [BLUE, FREE]


@needs_chromium
def test_spans_too_narrow_to_see_share_their_column(browser, stub):
    stub.state = state([model("first"), model("second")])
    stub.spans = [span(["first", "second"][k % 2], 1230 + k * 1e-3, 1e-3, id=k) for k in range(4000)]
    browser.open(stub.address)
    browser.wait_for_text("#legend", "first\n20 %")
    assert colours(browser, 1232, 2, 44) == [ORANGE, BLUE]


@needs_chromium
def test_a_span_tells_of_itself_to_pointer_and_keys(browser, stub):
    stub.state = state([model("first"), model("second")])
    spans = [span("first", 1231, 0.5), span("first", 1232, 0.25, segment="4/11"), span("second", 1233, 1.0, lane=1)]
    stub.spans = [*spans, span("second", 1234.2, 0.1, lane=1, outcome="aborted")]
    browser.open(stub.address)
    browser.wait_for_text("#legend", "second")
    browser.point(*place(browser, 1231.3, 0))
    browser.wait_for_text("#tip", "first")
    told = "first segment 3/11, lane 0 Request 17 Batch 2 Took 500 ms Predicted 400 ms (took +25 %) Started 3.500 s ago"
    assert browser.texts("#tip") == [f"{told} Outcome done"]
    browser.point(1, 1)
    browser.wait_for("getComputedStyle(document.querySelector('#tip')).display === 'none'")
    browser.evaluate("document.querySelector('#lanes').focus()")
    browser.press("ArrowDown", "ArrowLeft", "ArrowDown")
    browser.wait_for_text("#said", "segment 3/11, lane 1")
    browser.press("ArrowRight")
    browser.wait_for_text("#tip", "aborted")
    browser.press("Escape")
    browser.wait_for("getComputedStyle(document.querySelector('#tip')).display === 'none'")


@needs_chromium
def test_pause_holds_the_lanes_while_the_figures_go_on(browser, stub):
    stub.state, stub.spans = state([model("first")]), [span("first", 1231, 0.5)]
    browser.open(stub.address)
    browser.wait_for_text("#legend", "first\n5 %")
    browser.click("#pause")
    before = picture(browser)
    stub.spans.append(span("first", 1235, 0.5))
    stub.state = state([model("first", rate=55.0)], now_s=1236.0)
    browser.wait_for_text("tbody", "55.0")
    browser.wait_for_rounds(2)
    assert picture(browser) == before
    browser.click("#pause")
    browser.wait_for_text("#legend", "first\n10 %")
    assert picture(browser) != before


@needs_chromium
def test_it_asks_for_new_spans_only_and_counts_none_twice(browser, stub):
    stub.state, stub.spans = state([model("first")]), [span("first", 1234, 0.5)]
    browser.open(stub.address)
    browser.wait_for_text("#legend", "first\n5 %")
    browser.wait_for_rounds(3)
    picture(browser)
    assert browser.text("#legend") == "first\n5 %"
    assert stub.since[0] == 1214.5 and set(stub.since[1:]) == {1234.25}


@needs_chromium
def test_a_restarted_server_begins_anew(browser, stub):
    stub.state, stub.spans = state([model("first")]), [span("first", 1234, 0.5)]
    browser.open(stub.address)
    browser.wait_for_text("#legend", "first\n5 %")
    stub.spans = [span("first", 2.0, 1.0)]
    stub.state = state([model("first")], now_s=4.0, uptime_s=4.0)
    browser.wait_for_text("#legend", "first\n10 %")
    assert stub.since[-1] in (0.0, 3.75)


@needs_chromium
def test_columns_sort_the_models(browser, stub):
    stub.state = state([model("b", rate=2.0), silent("c", rate=None), model("a", rate=10.0)])
    browser.open(stub.address)
    browser.wait_for_text("tbody", "b")
    assert browser.texts("tbody bdi") == ["b", "c", "a"]
    head = "thead th:nth-child(3)"
    for order, names in (("descending", "abc"), ("ascending", "bac"), (None, "bca")):
        browser.click(f"{head} button")
        assert browser.evaluate(f"document.querySelector('{head}').getAttribute('aria-sort')") == order
        assert browser.texts("tbody bdi") == list(names)


@needs_chromium
def test_a_curve_follows_the_chosen_figure(browser, stub):
    stub.state = state([model("first", p99_ms=None)])
    browser.open(stub.address)
    browser.wait_for_text("tbody", "first")
    for now_s, rate in ((1235.5, 6.4), (1236.5, 0.0)):
        stub.state = state([model("first", p99_ms=None, rate=rate)], now_s=now_s)
        browser.wait_for(f"document.querySelector('tbody td:nth-child(3)').innerText === '{rate or 0}'")
    line = "document.querySelector('tbody .spark path:last-child').getAttribute('d')"
    ends = browser.evaluate(line)
    assert "58.00 10.00" in ends and "59.00 1.00" in ends and ends.endswith("60.00 19.00")
    browser.choose("#trend", "p99_ms")
    assert browser.evaluate(line) == ""


@needs_chromium
def test_the_last_ten_minutes_are_there_when_the_page_opens(browser, stub):
    times_s = [1234.5 - 2 * k for k in range(299, -1, -1)]
    stub.state, stub.history = state([model("first")]), history(times_s, [4.0] * 300, "first")
    browser.open(stub.address)
    browser.wait_for_text("tbody", "first")
    browser.wait_for_rounds(2)
    curve = str(browser.evaluate("document.querySelector('tbody .spark path:last-child').getAttribute('d')"))
    assert len(re.findall("[ML]", curve)) >= 30  # the last minute, sampled every other second
    picture(browser)
    read = "const node = document.querySelector('#past'), pen = node.getContext('2d');"
    read += "const {data} = pen.getImageData(0, 22, node.width, 60);"
    blue = "let found = 0; for (let k = 0; k < data.length; k += 4) found += data[k] < 90 && data[k + 2] > 150;"
    assert browser.evaluate(f"(() => {{ {read} {blue} return found > 0.9 * node.width; }})()")
    asked = [path for path, _ in stub.asked if path == "/weft/history"]
    assert len(asked) == 1  # nothing new was due: the clock stands still
    assert browser.texts(".links a") == ["Interface", "OpenAPI", "Metrics"]


@needs_chromium
def test_scroll_zooms_the_lanes_and_a_key_shows_all(browser, stub):
    stub.state, stub.spans = state([model("first")]), [span("first", 1231, 0.5)]
    browser.open(stub.address)
    browser.wait_for_text("#legend", "first\n5 %")
    x, y = place(browser, 1231.25, 0)
    browser.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=-240)
    browser.wait_for("document.querySelector('#window').selectedOptions[0].text === 'zoomed'")
    assert browser.text("#legend") != "first\n5 %"
    browser.point(1, 1)
    browser.evaluate("document.querySelector('#lanes').focus()")
    browser.press("0")
    browser.wait_for("document.querySelector('#window').value === '20'")
