"""A placement as a value, as tables, as a page, and what is told of models that fit nowhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.placing.problems import demand, machines
from weft.base.errors import PlacingError
from weft_cluster.placing.placement import Placement, parse_placement, read_placement
from weft_cluster.placing.placement_shown import check_place, in_words, tables, write_folder
from weft_cluster.placing.problem import PlacingProblem
from weft_cluster.placing.summary import filled
from weft_cluster.routing.placing_run import place

DEMANDS = [demand("camera", 0.6, 0.1), demand("speech", 0.1, 0.6), demand("search", 0.5, 0.5, replicas=2)]


@pytest.fixture(scope="module")
def placement() -> Placement:
    return place(DEMANDS, machines(4), target=None)


def test_it_comes_back_from_its_folder_as_it_was(placement: Placement, tmp_path: Path) -> None:
    write_folder(placement, tmp_path / "placement")
    assert read_placement(tmp_path / "placement") == placement
    assert sorted(path.name for path in (tmp_path / "placement").iterdir()) == ["placement.json", "report.html"]
    write_folder(placement, tmp_path / "placement")  # its own folder is replaced


def test_its_numbers_are_those_of_its_problem(placement: Placement) -> None:
    problem = PlacingProblem.of(machines(4), DEMANDS)
    again = filled(placement, problem)
    for machine in placement.machines:
        number = [each.name for each in problem.machines].index(machine.name)
        assert machine.busy == pytest.approx(again.loads[number].max())
        assert (machine.compute_load, machine.bandwidth_load) == pytest.approx(tuple(again.loads[number]))
        assert machine.memory_bytes == again.bytes[number]
    assert len(placement.where("search")) >= 2


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_text("")
    with pytest.raises(PlacingError, match="holds something that is no placement"):
        check_place(tmp_path / "photos")
    with pytest.raises(PlacingError, match="there is no folder"):
        check_place(tmp_path / "none" / "placement")


def test_who_limits_a_machine_is_named() -> None:
    one = place([demand("a", 0.6, 0.1), demand("b", 0.05, 0.1)], machines(1), target=None).machines[0]
    assert (one.limit, one.limited_by) == ("compute", "a")
    full = place([demand("a", 0.1, 0.1, gib=8), demand("b", gib=1)], machines(1), target=None).machines[0]
    assert (full.limit, full.limited_by) == ("memory", "a")
    host = place([demand("a", 0.0, 0.0, other=0.3)], machines(1), target=None).machines[0]
    assert (host.limit, host.limited_by) == ("other", "a")
    waits = [demand("tight", 0.1, deadline_s=0.02), demand("long", 0.1, segment_s=0.0095)]
    tight = place(waits, machines(1), target=None).machines[0]
    assert (tight.limit, tight.limited_by) == ("deadline", "tight")


def test_where_no_machine_was_judged_alone_none_is_called_the_worst() -> None:
    found = place(DEMANDS, machines(4), objective="attainment")
    assert in_words(found)[1].endswith("are predicted to be on time")


def test_what_is_not_served_is_named_with_what_it_needs() -> None:
    found = place([demand("a", 0.7, 0.0), demand("b", 0.7, 0.0)], machines(1), target=None)
    assert sum(each.share for each in found.unserved) == pytest.approx(0.6 / 0.7, abs=1e-4)
    assert "more gpu with 1.00 GiB free" in found.unserved[0].why
    assert "which do not serve all" in in_words(found)[0]
    assert len(tables(found)) == 2


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (demand("m", gib=11), "m needs 11.00 GiB, and any machine has 10.00 at most (gpu)"),
        (demand("m", gib=11, machine="gpu-1"), "m needs 11.00 GiB, and machine gpu-1 has 10.00"),
        (
            demand("m", alone_s=0.3),
            "m is due in 100 ms, and takes 300 ms alone on any machine (gpu); allow more than 300",
        ),
        (demand("m", replicas=5), "m: 5 replicas need as many machines that can run it, there are 2"),
        (demand("m", replicas=2, apart="zone"), "m: 2 replicas need as many zones that can run it, there are 1"),
        (demand("m", zone="mars"), "m is pinned to zone mars, and there is no such machine"),
    ],
)
def test_what_fits_nowhere_is_one_line_with_what_would_be_needed(given: Any, says: str) -> None:
    with pytest.raises(PlacingError) as caught:
        place([given], machines(2), target=None)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bad_file_is_one_line(placement: Placement) -> None:
    raw = json.loads(placement.model_dump_json())
    for change, says in (
        ({"machines": raw["machines"] + raw["machines"][:1]}, "is there twice"),
        ({"valu": 3}, "did you mean 'value'?"),
        ({"objective": "fun"}, "objective = 'fun'"),
    ):
        with pytest.raises(PlacingError, match=r"placement.json: ") as caught:
            parse_placement(raw | change, "placement.json")
        assert says in str(caught.value)


def test_a_placement_of_other_machines_or_models_is_refused(placement: Placement) -> None:
    with pytest.raises(PlacingError, match="unknown machine 'gpu-2'"):
        filled(placement, PlacingProblem.of(machines(1), DEMANDS))
    with pytest.raises(PlacingError, match="unknown model"):
        filled(placement, PlacingProblem.of(machines(4), DEMANDS[:1]))


def test_it_draws_itself(placement: Placement) -> None:
    assert len(placement.plot().axes) == 1
    assert "camera" in placement._repr_html_()
