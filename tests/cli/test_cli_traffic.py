"""``weft traffic``: from a recorded file to one that makes more of the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.cli.main import main
from weft_cluster.routing.traffic import read_traffic


def test_fit_prints_writes_and_says_what_it_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "code.csv"
    lines = [f"2023-11-16 18:{second // 60:02}:{second % 60:02},100,10" for second in range(0, 600, 3)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    out, told = tmp_path / "traffic.toml", tmp_path / "fit.json"
    with pytest.raises(SystemExit) as ended:
        main(["traffic", "fit", str(trace), "-o", str(out), "--json", str(told)])
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert "200 requests of 1 caller in 0.166 h" in shown and "not known: the wave of a day" in shown
    traffic = read_traffic(out)
    assert traffic.rate == pytest.approx(200 / 597) and traffic.cv == pytest.approx(0.001)
    result = json.loads(told.read_text())
    assert result["format"] == 1 and result["traffic"] == traffic.model_dump(mode="json")
    assert {"what", "trace", "traffic"} == set(result["likeness"][0])


def test_a_file_that_is_no_trace_is_refused_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit) as ended:
        main(["traffic", "fit", str(file)])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
