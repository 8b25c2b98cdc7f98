"""The documentation: pages are in the site's order and lead to each other, and what the tutorial shows runs."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.serving import live
from tests.settings_tables import with_tables
from tests.support.commands import LEAVES, run
from weft.serving.config import GROUP_OF

yaml = pytest.importorskip("yaml", reason="reads mkdocs.yml; openapi-spec-validator of .[dev] brings it")

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
LONGEST_README = 180
BLOCK = re.compile(r"^<!-- run -->\n```(console|python)\n(.*?)^```$", re.M | re.S)
"""A block that is marked to be run."""
FENCED = re.compile(r"^( *)```.*?^\1```$", re.M | re.S)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(path: Path) -> str:
    """A page without its blocks of code."""
    return FENCED.sub("", path.read_text("utf-8"))


def in_order(nav: list[Any]) -> Iterator[str]:
    """The pages of the site, one after another."""
    for each in nav:
        for value in each.values():
            yield from in_order(value) if isinstance(value, list) else [value]


def anchors(path: Path) -> set[str]:
    """What the headings of a page are called, as forges and the site name them."""
    named = set()
    for heading in re.findall(r"^#+ (.*)$", prose(path), re.M):
        kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
        named.add(kept.replace(" ", "-"))
    return named


# The site


def test_the_site_has_every_page_once() -> None:
    nav = [f"docs/{page}" for page in in_order(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])]
    assert len(nav) == len(set(nav))
    assert set(nav) == {name_of(page) for page in ROOT.glob("docs/*.md")}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    lost = []
    for link in LINK.findall(prose(page)):
        target, _, heading = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if "://" in link:
            continue
        if not path.exists() or (heading and path.suffix == ".md" and heading not in anchors(path)):
            lost.append(link)
    assert lost == []


def test_a_heading_is_named_as_forges_name_it(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# Load (`weft bench --json`)\n```\n# none\n```\n## Two words, one\n")
    assert anchors(tmp_path / "a.md") == {"load-weft-bench---json", "two-words-one"}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= LONGEST_README


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site; a warning fails the build."""
    build = pytest.importorskip("mkdocs.commands.build", reason="pip install -e .[docs] brings it; make docs does it")
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    build.build(pytest.importorskip("mkdocs.config").load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder)))
    return folder


def test_the_site_loads_nothing_from_the_network(site: Path) -> None:
    loading = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>")
    assert {page.name: loading.findall(page.read_text()) for page in site.glob("*.html")} == {
        page.name: [] for page in site.glob("*.html")
    }


def test_the_site_can_be_searched_from_a_folder(site: Path) -> None:
    """Browsers fetch no JSON and start no worker from file://, so the index and the worker are plain scripts."""
    assert (site / "search/search_index.js").read_text().startswith("var __index = {")
    assert '<script src="iframe-worker.js">' in (site / "index.html").read_text()


def test_the_glossary_names_modules_that_are_there() -> None:
    named = set(re.findall(r"`(weft(?:_\w+)?(?:\.\w+)*)`", (ROOT / "docs/glossary.md").read_text()))
    paths = {name: ROOT / "src" / name.replace(".", "/") for name in named}
    missing = [name for name, path in paths.items() if not (path.is_dir() or path.with_suffix(".py").exists())]
    assert len(named) > 40 and missing == []


def test_the_page_on_production_names_metrics_that_there_are() -> None:
    from weft.serving.metrics import FAMILIES

    known = {f"{each.name}{end}" for each in FAMILIES for end in ("", "_bucket")}
    shown = set(re.findall(r"\b(?:weft|nv)_\w*[a-z]\b", (ROOT / "docs/production.md").read_text()))
    assert shown and shown <= known


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tables_of_settings_are_those_of_the_classes(page: Path) -> None:
    """``python -m tests.settings_tables`` writes them anew."""
    text = page.read_text("utf-8")
    assert with_tables(text) == text


def test_the_page_on_serving_has_every_setting() -> None:
    page = (ROOT / "docs/serving.md").read_text("utf-8")
    assert [key for key in GROUP_OF if f"\n| `{key}` | " not in page] == []


# Commands


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every ``weft ...`` in the blocks of a page that are not of another language."""
    for _, language, block in re.findall(r"^( *)```(.*?)\n(.*?)^\1```$", page.read_text("utf-8"), re.M | re.S):
        if language not in ("", "console", "bash", "sh"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            with contextlib.suppress(ValueError):  # a line of output has a single quote
                words = shlex.split(line.removeprefix("$ "), comments=True)
                for _, simple in groupby(words, lambda word: word in ("&&", "|", "&", ";", ">")):
                    if (said := list(simple))[0] == "weft" and re.match("[a-z]", " ".join(said[1:])):
                        yield said[1:]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_that_are_shown_have_the_options_they_are_shown_with(page: Path) -> None:
    wrong = []
    for words in commands(page):
        leaf = LEAVES.get(" ".join(words[:2])) or LEAVES.get(words[0])
        if leaf is None:
            wrong += [words[:1]]
            continue
        known = {option for param in leaf.params for option in (*param.opts, *param.secondary_opts)} | {"--help"}
        given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        wrong += [[words[0], option] for option in sorted(given - known)]
    assert wrong == []


def test_the_readme_begins_with_plan_serve_and_bench() -> None:
    assert [words[0] for words in commands(ROOT / "README.md")][:3] == ["plan", "serve", "bench"]


# The tutorial


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tutorial")


def blocks() -> list[tuple[str, str]]:
    return BLOCK.findall((ROOT / "docs/tutorial.md").read_text())


def test_the_tutorial_has_blocks_to_run() -> None:
    text = (ROOT / "docs/tutorial.md").read_text()
    assert len(blocks()) == text.count("<!-- run -->") >= 5


@pytest.mark.parametrize(("kind", "text"), blocks(), ids=[f"{n}-{kind}" for n, (kind, _) in enumerate(blocks())])
def test_the_tutorial_runs(
    kind: str, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    if kind == "console":
        run_commands(text, capsys)
    elif "127.0.0.1:8000" in text:
        run_asking(text, monkeypatch, capsys)
    else:
        exec(compile(text, "docs/tutorial.md", "exec"), {})


def run_commands(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run each command; what is shown below it is printed."""
    for part in re.split(r"^\$ weft ", text.replace("\\\n", " "), flags=re.M)[1:]:
        command, *shown = part.strip().splitlines()
        code, printed, error = run(capsys, *shlex.split(command))
        assert code == 0, error
        lines = [line.rstrip() for line in printed.splitlines()]
        assert [line for line in shown if line not in lines] == []


def run_asking(text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ask a real server, which on a slow machine may take its time."""
    monkeypatch.setenv("no_proxy", "*")
    with live.running("models/lenet.onnx", grpc_port=None, learn_s=0.0) as server:
        asked = text.replace("127.0.0.1:8000", server.address).replace("5_000_000", str(int(live.PATIENCE_S * 1e6)))
        assert asked.count(server.address) == 1
        exec(compile(asked, "docs/tutorial.md", "exec"), {})
    assert re.fullmatch(r"it is a (\d); the label says \1\n", capsys.readouterr().out)
