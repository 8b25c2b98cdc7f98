"""Models side by side on a GPU, as ``weft reproduce gpu`` shows them: small runs of every part."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.papers.reproductions import check, check_whole
from weft.base.errors import InputError
from weft.devices.shares import Share
from weft_papers.gpu import LEAST_ROUNDS, deadlines, endless, lab, reproduce, timeline
from weft_papers.gpu.lab import MEASURED, NOW, WARM_S, Records, read, sources

ROOT = Path(__file__).parents[2]
NOTHING = Records({}, {})


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rules, and runs without much before them."""
    monkeypatch.setattr(lab, "WARM_S", 0.01)
    monkeypatch.setattr(lab, "SATURATED", {rule: lab.SATURATED[rule] for rule in ("streams", "split 0", lab.OURS)})
    monkeypatch.setattr(lab, "ONE_FOR_ALL", {rule: {} for rule in ("edf", lab.OURS)})


def quiet(done: int, of: int) -> None:
    assert done < of


def test_endless_work_is_compared_with_the_best_fair_rival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endless, "TOGETHER", lab.TOGETHER[:1])
    part = endless.side_by_side(tmp_path, 0.02, NOTHING, quiet)
    check_whole(part)
    kept, least, *_ = part.rows
    assert kept.ours > 0.8 and least.ours > 0.5
    unfair = {"sum": 2.0, "least of fair": 0.1}
    rivals = {"streams": unfair, "slices": {"sum": 1.0, "least of fair": 1.0}, lab.OURS: {"sum": 1.2}}
    assert endless.best_rival(rivals) == "slices"
    assert endless.best_rival({"streams": unfair, lab.OURS: {"sum": 1.2}}) == "streams"


def test_measured_rows_stand_beside_simulated_ones_and_their_difference_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endless, "BESIDE", lab.BESIDE[:1])
    row = {rule: {"p50": 1.0, "p99": 2.0, "beside": 0.8} for rule in (lab.ALONE, *lab.URGENT)}
    simulated = {rule: {**each, "p99": 2.4} for rule, each in row.items()}
    name = "urgent/bertlarge-b1 beside encoder-b16/0.2"
    file = tmp_path / "measured.json"
    file.write_text(json.dumps({name: row, f"simulated {name}": simulated, "host": {"x": 1}, "machine": "y"}))
    records = Records({}, read(file).measured)
    assert set(records.measured) == {name, f"simulated {name}"}
    part = endless.urgent_beside(tmp_path, 0.03, records, quiet)
    check_whole(part)
    assert [table.title.split(":")[0].split(", ")[1] for table in part.tables] == [NOW, MEASURED]
    assert part.rows[-1].ours == pytest.approx(20) and part.rows[2].ours == 1.0


def test_five_models_and_orions_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "LOADS", (0.95,))
    part = deadlines.five_models(tmp_path, 0.05, NOTHING, quiet)
    check(part)
    assert part.tables and part.pictures
    monkeypatch.setattr(deadlines, "FIRST_OF_ORION", {"resnet50-b8": 0.135})
    monkeypatch.setattr(deadlines, "BESIDE_OF_ORION", {"bertbase-b32": 0.39})
    check_whole(deadlines.against_orion(tmp_path, 0.05, NOTHING, quiet))
    found = {
        rule: {"p99": tail, "beside": done}
        for rule, tail, done in zip(lab.ORION_RULES, (1, 2, 3), (0.5, 1, 1), strict=True)
    }
    assert deadlines.best_orion(found) == "orion 400 us", "the first leaves half undone"


@pytest.mark.long
def test_in_the_fewest_rounds_every_load_has_something_to_compare_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab, "WARM_S", WARM_S)
    assert all(math.isfinite(row.ours) for row in reproduce(tmp_path, queries=LEAST_ROUNDS).rows)


def test_shares_over_time_are_a_picture_and_a_page(tmp_path: Path) -> None:
    part = timeline.shares_over_time(tmp_path)
    check(part)
    page = (tmp_path / timeline.PAGE).read_text()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert [run["rule"] for run in data["runs"]] == list(timeline.RULES)
    used = {piece[5] for run in data["runs"] for piece in run["pieces"]}
    assert "132" in used and used & {"84", "48", "68", "64"}


def test_whoever_shares_the_whole_has_an_equal_part_of_the_picture() -> None:
    whole, side = Share(0, 100), Share(60, 40)
    ran = [
        timeline.SegmentOnShare(0, 0.0, 2.0, whole),
        timeline.SegmentOnShare(1, 1.0, 2.0, whole),
        timeline.SegmentOnShare(2, 2.0, 3.0, side),
    ]
    drawn = [each[:5] for each in timeline.pieces(ran, 100)]
    assert drawn == [
        (0, 0.0, 1.0, 0.0, 100.0),
        (0, 1.0, 2.0, 0.0, 50.0),
        (1, 1.0, 2.0, 50.0, 50.0),
        (2, 2.0, 3.0, 60, 40),
    ]


def test_the_shipped_record_is_the_benchmarks() -> None:
    results = ROOT / "benchmarks" / "results"
    for shipped, file in zip(read(), ("gpu_weaving.json", "gpu_abreast.json"), strict=True):
        if shipped or file == "gpu_weaving.json":
            whole = json.loads((results / file).read_text("utf-8"))
            assert shipped == {row: whole[row] for row in shipped}, "copy the results anew"


def test_what_is_recorded_comes_first_in_pictures_and_bad_settings_are_refused(tmp_path: Path) -> None:
    records = Records({"orion/a": {"x": {"p99": 1.0}}}, {})
    found = sources("orion", ["b"], lambda load: {"y": {"p99": 2.0}}, records, quiet)
    assert [list(source.results) for source in found] == [["b"], ["a"]]
    with pytest.raises(InputError, match="leave seq_len and cost out"):
        reproduce(tmp_path, seq_len=7)
    with pytest.raises(InputError, match="queries = 7 must be from 8"):
        reproduce(tmp_path, queries=7)
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(InputError, match="not rows of a benchmark"):
        read(tmp_path / "list.json")
