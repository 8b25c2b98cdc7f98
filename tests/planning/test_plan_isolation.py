"""Plans whose models run in worker processes: measured so, planned so, served so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.planning.machines import arrangement, asked, brief, host
from tests.planning.plans import scaling
from tests.planning.questions import Surveyor
from tests.support.commands import refused, run
from weft.devices.host import write_host
from weft.planning.candidates import arrangements
from weft.planning.folder import plan_settings
from weft.planning.measured import LaneShape, measured_hosts, measurement_key
from weft.planning.plan import read_plan
from weft.planning.planning_run import memory_of
from weft.planning.survey.measure import _Survey

__all__ = ["brief"]

STREAM = ("-s", "camera.onnx:rate=20,deadline=50")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, and a machine that was measured with it in threads and in workers."""
    scaling(tmp_path / "camera.onnx", 2.0)
    inside = host(camera=[4.0], memory_bytes=2**27)
    write_host(inside, tmp_path / "threads.json")
    write_host(inside.model_copy(update={"isolation": "process"}), tmp_path / "workers.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("weft.planning.plan_request.usable_cores", lambda: 2)
    return tmp_path


def test_models_are_measured_where_they_will_run(tmp_path, question):
    class Noting(Surveyor):
        where: tuple[str, ...] = ()

        def __call__(self, subjects: Any, *, isolation: str, **how: Any) -> Any:
            self.where += (isolation,)
            return super().__call__(subjects, **how)

    survey = Noting()
    apart = replace(question, isolation="process")
    for each in (question, apart, apart):
        measured_hosts(each, tmp_path / "cache", survey=survey, progress=lambda *said: None)
    assert survey.where == ("threads",) * 2 + ("process",) * 2  # the third time nothing is left to measure
    keys = {
        measurement_key(question.models, LaneShape(1, 1), 1.5, where) for where in ("threads", "process", "group:all")
    }
    assert len(keys) == 3 and measurement_key(question.models, LaneShape(1, 1), 1.5) in keys


def test_the_server_that_is_measured_has_workers_and_their_memory_counts(monkeypatch):
    started: list[tuple[str, ...]] = []

    class Process:
        pid = 7

        def __init__(self, *arguments: str) -> None:
            started.append(arguments)

        def __enter__(self) -> Process:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr("weft.planning.survey.measure.ServerProcess", Process)
    monkeypatch.setattr("weft.planning.survey.measure.held_bytes", lambda pid, workers: 1000 + pid + workers)
    survey = _Survey((), (1,), 1, 1.0, Path("cut"), Path("staged"), None, isolation="process")
    with survey._server(2) as server:
        assert survey._held_bytes(server) == 1008
    assert "--isolation process" in " ".join(started[0])
    with _Survey((), (1,), 1, 1.0, Path("cut"), Path("staged"), None)._server(2):
        assert "--isolation" not in started[1]


def test_every_option_runs_models_where_it_was_asked():
    apart = replace(asked(("camera", 1.0, 50.0)), isolation="group:all")
    assert {each.settings.isolation for each in arrangements(apart, [host(camera=[1.0])])} == {"group:all"}


def test_workers_hold_models_twice_where_memory_was_not_measured(tmp_path, question):
    once = question.models[0].bytes
    way = arrangement(host(camera=[1.0]))
    assert [memory_of(each, way) for each in (question, replace(question, isolation="process"))] == [once, 2 * once]


def test_a_plan_is_served_where_it_was_measured(brief, capsys, place):
    code, shown, _ = run(
        capsys, "plan", *STREAM, "--isolation", "process", "-d", "workers.json", "--cache", "kept", "-o", "plan"
    )
    assert code == 0 and "--isolation process" not in shown
    assert read_plan("plan").settings.isolation == plan_settings("plan").workers.isolation == "process"


def test_a_plan_without_workers_says_how_to_get_one_with_them(brief, capsys, place):
    shown = run(capsys, "plan", *STREAM, "-d", "threads.json", "--cache", "kept")[1]
    assert "--isolation process measures and serves them in workers of their own" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--isolation", "glass"), "isolation"),
        (("--isolation", "process", "-d", "threads.json"), "was measured with models in threads"),
        (("-d", "workers.json"), "was measured with models in process"),
    ],
)
def test_what_was_measured_elsewhere_is_refused_in_one_line(capsys, place, arguments, said):
    assert said in refused(capsys, "plan", *STREAM, *arguments, "--cache", "kept")
