"""The examples run, and what the documentation shows is true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_policy_of_ones_own_runs_beside_ours() -> None:
    done = subprocess.run([sys.executable, ROOT / "examples/own_policy.py"], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["fifo", "shortest-fetch", "layerweaver", "weft"]


def test_the_demo_draws_a_timeline_for_each_npu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples/demo.py", "--seconds", "2"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "punctual: p99 of the urgent model" in done.stdout
    assert "unlike alone" in done.stdout
    for name in ("tpuv3-like.html", "nnpi-like.html", "woven.png"):
        assert (tmp_path / "out/demo" / name).stat().st_size > 10_000
        assert name in done.stdout


@pytest.mark.parametrize("page", ["README.md", *(str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("docs/*.md")))])
def test_links_between_the_pages_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{page} links to {target}"


def test_the_formats_page_names_every_key_of_a_device_and_a_report() -> None:
    from weft.devices import Npu
    from weft.reports.report import Report, StreamReport

    page = (ROOT / "docs/formats.md").read_text()
    keys = [
        *Npu.model_fields,
        *Report.__dataclass_fields__,
        *StreamReport.__dataclass_fields__,
    ]
    assert [key for key in keys if f"`{key}`" not in page] == []


def test_the_serving_page_names_every_setting() -> None:
    from weft.serving.config import ModelConfig, ServerConfig

    page = (ROOT / "docs/serving.md").read_text()
    models = [key for key in ModelConfig.model_fields if f"{key} = " not in page and f"[{key}]" not in page]
    assert models == []
    assert [key for key in ServerConfig.__dataclass_fields__ if f"`{key}`" not in page] == []


def test_the_example_of_a_server_file_is_one() -> None:
    from weft.serving.config import read_server_config

    assert read_server_config(ROOT / "examples/serve.toml").policy == "punctual"


def test_every_policy_has_its_place_on_the_policies_page() -> None:
    from weft.policies import POLICIES

    page = (ROOT / "docs/policies.md").read_text()
    assert [name for name in POLICIES if f"`{name}`" not in page] == []
