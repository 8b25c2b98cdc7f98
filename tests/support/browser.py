"""A headless Chromium driven over the DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome in PATH")

ROUNDS = 5000
"""How often the page may ask the server before what a test waits for must be there: minutes, for a browser that draws
when the machine lets it."""

FASTER = "const slow = setTimeout; window.setTimeout = (act, ms, ...rest) => slow(act, ms / 20, ...rest);"
"""Makes the page's second a twentieth of one."""


class Browser:
    """A headless Chromium with one page; every call is a command of the DevTools protocol and its answer."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        ways = folder / "commands", folder / "answers"
        for way in ways:
            os.mkfifo(way)
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--remote-debugging-pipe", "--disable-background-networking", f"--user-data-dir={folder / 'profile'}"]
        start = 'exec "$@" 3<"$0/commands" 4>"$0/answers"'  # the pipe is the descriptors 3 and 4
        self._log = (folder / "chromium.log").open("wb")
        command = ["sh", "-c", start, str(folder), CHROMIUM, *flags, "about:blank"]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        self._commands, self._answers = ways[0].open("wb", buffering=0), ways[1].open("rb")
        self._count = 0
        self._session: str | None = None
        self.exceptions: list[str] = []
        self.complaints: list[str] = []
        """What the browser itself says against the page: refused requests, broken rules of its security policy."""
        self._attach()

    def _attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.addScriptToEvaluateOnNewDocument", source=FASTER)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])

    def close(self) -> None:
        self._session = None
        self.call("Browser.close")
        self._process.wait()
        for stream in (self._commands, self._answers, self._log):
            stream.close()

    def call(self, method: str, **params: Any) -> Any:
        self._count += 1
        command = {"id": self._count, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        self._commands.write(json.dumps(command).encode() + b"\0")
        while (message := self._read()).get("id") != self._count:
            self._note(message)
        assert "error" not in message, message
        return message["result"]

    def _read(self) -> Any:
        text = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "chromium has ended"
            text += byte
        return json.loads(text)

    def _note(self, message: Any) -> None:
        if message.get("sessionId") != self._session:
            return
        if message["method"] == "Runtime.exceptionThrown":
            self.exceptions.append(json.dumps(message["params"]["exceptionDetails"]))
        elif message["method"] == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.complaints.append(message["params"]["entry"]["text"])

    def open(self, address: str, *, width: int = 1280) -> None:
        """Show *address* and forget what was said against the page before it."""
        self.resize(width)
        self.exceptions.clear()
        self.complaints.clear()
        self.go(address)

    def go(self, address: str) -> None:
        assert "errorText" not in self.call("Page.navigate", url=address)

    def resize(self, width: int) -> None:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def rounds(self) -> int:
        """How often the page has asked the server."""
        return int(self.evaluate("Number(document.documentElement?.dataset.polls || 0)"))

    def wait_for(self, expression: str) -> None:
        """Return when *expression* holds; fail when the page asked the server ROUNDS times more without it."""
        last = self.rounds() + ROUNDS
        pause = "await new Promise(go => setTimeout(go, 300));"
        look = (
            f"for (let k = 0; k < 9; k++) {{ if (document.body && ({expression})) return true; {pause} }} return false;"
        )
        while not self.evaluate(f"(async () => {{ {look} }})()"):
            assert not self.exceptions, self.exceptions
            assert self.rounds() <= last, f"{expression} does not hold; the page shows:\n{self.text('body')}"
        assert not self.exceptions, self.exceptions

    def wait_for_rounds(self, count: int) -> None:
        self.wait_for(f"document.documentElement.dataset.polls >= {self.rounds() + count}")

    def wait_for_text(self, selector: str, text: str) -> None:
        self.wait_for(f"document.querySelector({json.dumps(selector)})?.innerText.includes({json.dumps(text)})")

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def texts(self, selector: str) -> list[str]:
        nodes = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return list(self.evaluate(f"{nodes}.map(node => node.innerText.replace(/\\s+/g, ' ').trim())"))

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def choose(self, selector: str, value: str) -> None:
        chosen = f"node.value = {json.dumps(value)}; node.dispatchEvent(new Event('change'));"
        self.evaluate(f"(() => {{ const node = document.querySelector({json.dumps(selector)}); {chosen} }})()")

    def press(self, *keys: str) -> None:
        for key in keys:
            for kind in ("keyDown", "keyUp"):
                self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def point(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path | str) -> None:
        """For people who want to see what a test sees."""
        image = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        Path(path).write_bytes(base64.b64decode(image))


TRIES = 600
"""How often the page is looked at, each time for a seventh of a second, before what a test waits for must be there."""


def wait_until_shown(browser: Browser, expression: str) -> None:
    """Return when *expression* holds; the page asks nobody by itself, so it is not waited for by its rounds."""
    look = f"for (let k = 0; k < 9; k++) {{ if (document.body && ({expression})) return true; await pause(); }}"
    pause = "const pause = () => new Promise(go => setTimeout(go, 300));"
    for _ in range(TRIES):
        if browser.evaluate(f"(async () => {{ {pause} {look} return false; }})()"):
            break
        assert not browser.exceptions, browser.exceptions
    else:
        pytest.fail(f"{expression} does not hold; the page shows:\n{browser.text('body')}")
    assert not browser.exceptions, browser.exceptions
