"""Pages that open from a file, in a real browser: they draw without complaint, and scroll, drag and keys are alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reports.examples import NASTY, REPORT, alternating, parallel_outcome, policy_report, serial_outcome
from tests.support.browser import Browser, needs_chromium, wait_until_shown
from weft.reports.trace_exports import write_html
from weft.simulation.comparison_page import write_comparison_page
from weft_map.pages.page import write_mapping_page

pytestmark = needs_chromium

PICTURE = "section canvas[role=application]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One page of each kind, with names that would hurt a careless one."""
    made = tmp_path_factory.mktemp("pages")
    write_html(alternating(40, models=("conv", NASTY)), made / "timeline.html", report=REPORT)
    write_mapping_page(made / "mapping.html", [parallel_outcome(NASTY)])
    runs = [(policy_report("fifo", 1.0), alternating(2)), (policy_report("weft", 1.5), alternating(3))]
    write_comparison_page(made / "comparison.html", runs, title=NASTY)
    return made


def drawn(browser: Browser) -> str:
    browser.evaluate("new Promise(go => requestAnimationFrame(() => requestAnimationFrame(go)))")
    return str(browser.evaluate(f"document.querySelector('{PICTURE}').toDataURL()"))


def wheel(browser: Browser, delta: int) -> None:
    place = f"document.querySelector('{PICTURE}').getBoundingClientRect()"
    x, y = browser.evaluate(f"(({{left, top, width}}) => [left + width / 2, top + 40])({place})")
    browser.point(x, y)
    browser.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=delta)
    browser.point(1, 1)


@pytest.mark.parametrize("kind", ["timeline", "mapping", "comparison"])
def test_scroll_zooms_and_a_key_shows_all_again(browser: Browser, folder: Path, kind: str) -> None:
    browser.open("about:blank")
    browser.open((folder / f"{kind}.html").as_uri())
    wait_until_shown(browser, f"document.querySelector('{PICTURE}')?.width > 300")
    assert browser.texts("header nav a") and "Scroll zooms, drag pans" in browser.text(".hint")
    browser.press("0")
    browser.point(1, 1)
    whole = drawn(browser)
    wheel(browser, -120)
    assert drawn(browser) != whole
    browser.press("0")
    browser.point(1, 1)
    assert drawn(browser) == whole
    assert browser.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    assert browser.exceptions == [] and browser.complaints == []


def test_a_comparison_shows_the_timeline_of_the_policy_that_is_pressed(browser: Browser, folder: Path) -> None:
    browser.open("about:blank")
    browser.open((folder / "comparison.html").as_uri(), width=500)
    wait_until_shown(browser, "document.querySelector('#chips [aria-pressed=true]')?.innerText === 'weft'")
    assert [row.split()[0] for row in browser.texts("#table tbody tr")] == ["fifo", "weft"]
    browser.click("#chips button")
    wait_until_shown(browser, "document.querySelector('#below summary').innerText.endsWith('of fifo')")
    shown = "[...document.querySelectorAll('#pictures section')].filter(panel => !panel.hidden).length"
    assert browser.evaluate(shown) == 1
    assert browser.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    assert browser.exceptions == []


def test_a_map_of_several_schedules_draws(browser: Browser, folder: Path, tmp_path: Path) -> None:
    write_mapping_page(tmp_path / "two.html", [parallel_outcome(), serial_outcome()])
    browser.open("about:blank")
    browser.open((tmp_path / "two.html").as_uri())
    wait_until_shown(browser, "document.querySelectorAll('#chips button').length === 2")
    browser.press("n")
    wait_until_shown(browser, "document.querySelector('#tip').innerText.includes('one layer')")
    assert browser.exceptions == []
