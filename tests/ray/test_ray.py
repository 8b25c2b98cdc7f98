"""weft on Ray, as far as it goes without Ray: its settings, who is where, how many servers are needed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import ROOT
from tests.gates.cases import PAIR, placement
from weft.base.errors import InputError, PlacingError
from weft_cluster.placing.placement import Placement, write_placement
from weft_cluster.ray.local import LocalCluster
from weft_cluster.ray.service_registry import HEARTBEAT_TIMEOUT_S, REFUSED_S, SETTLED_S, ServiceRegistry
from weft_cluster.ray.settings import (
    BANDWIDTH,
    COMPUTE,
    ServerLoad,
    UtilisationPolicy,
    needed,
    parse_settings,
    predicted,
    sources_of,
)

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="pip install 'weft[ray]' brings Ray")


def written(folder: Path, what: Placement = PAIR) -> str:
    write_placement(what, folder / "placement.json")
    return str(folder)


# Settings


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"plasement": "x"}, "plasement"),
        ({"router": "slak"}, "did you mean slack"),
        ({"server": {"lane": 1}}, "did you mean lanes"),
        ({"gates": "0"}, "gates"),
    ],
)
def test_a_setting_that_cannot_be_is_named(wrong, said):
    with pytest.raises(InputError, match=said) as caught:
        parse_settings({"placement": "p", **wrong})
    assert "\n" not in str(caught.value)


def test_numbers_may_come_as_text_as_serve_run_passes_them():
    assert parse_settings({"placement": "p", "gates": "2", "port": "0"}).gates == 2


def test_a_machine_serves_its_plan_or_the_files_of_its_models_or_models_by_name(tmp_path):
    settings = parse_settings({"placement": written(tmp_path)})
    left, right = PAIR.machines
    assert sources_of(left, settings) == ["net"]
    (tmp_path / "net.onnx").touch()
    assert sources_of(left, settings) == [str(tmp_path / "net.onnx")]
    (tmp_path / "left").mkdir()
    (tmp_path / "left/plan.json").touch()
    assert sources_of(left, settings) == [str(tmp_path / "left")]
    assert sources_of(right, settings) == [str(tmp_path / "net.onnx")]
    elsewhere = parse_settings({"placement": str(tmp_path / "placement.json"), "models": "/models"})
    assert sources_of(left, elsewhere) == ["/models/net.onnx"]
    (strange,) = placement(left={"../net": 1.0}).machines
    with pytest.raises(PlacingError, match="not a name"):
        sources_of(strange, elsewhere)


def test_without_ray_one_is_told_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr("weft_cluster.ray.local.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'weft\[ray\]'"):
        LocalCluster(3, placement=written(tmp_path))


def test_the_room_imports_nothing_of_ray_before_the_application_is_asked_for():
    modules = "weft_cluster.ray, weft_cluster.ray.local, weft_cluster.ray.settings, weft_cluster.gates.gate"
    code = f"import sys, {modules}; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    with pytest.raises(AttributeError, match="nothing"):
        __import__("weft_cluster.ray").ray.nothing  # noqa: B018


def test_weft_alone_brings_no_ray():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs_it = [each for each in project["dependencies"] if each.startswith("ray")]
    assert not needs_it and project["optional-dependencies"]["ray"][0].startswith("ray[")


# Who is where


class Place:
    """A directory whose time the test has, and which is told that some models shall be there."""

    def __init__(self, *models: str) -> None:
        self.now = 100.0
        self.registry = ServiceRegistry(lambda: self.now)
        self.registry.reconfigure({"models": list(models)})

    def later(self, seconds: float, **there: Placement) -> None:
        """Time passes, and whoever is still there says so: name -> a placement of one machine."""
        self.now += seconds
        for url, where in there.items():
            self.registry.heartbeat(url, where.machines[0])


LEFT, RIGHT = placement(left={"net": 0.5}), placement(right={"net": 0.5})


def test_what_was_on_its_way_does_not_bring_back_who_has_left():
    place = Place()
    place.later(0, a=LEFT)
    assert place.registry.leave("a")
    assert place.registry.heartbeat("a", LEFT.machines[0]) == {} and place.registry.snapshot().servers == {}
    place.later(HEARTBEAT_TIMEOUT_S + 0.1)
    place.registry.snapshot()
    place.later(0, a=RIGHT)
    assert place.registry.snapshot().servers == {"a": RIGHT.machines[0]}, "another one may have its address later"


def test_who_says_nothing_is_forgotten_and_who_leaves_at_once():
    place = Place()
    place.later(0, a=LEFT, b=LEFT)
    place.registry.heartbeat("g", None, {})
    assert place.registry.snapshot() == ((), {"a": LEFT.machines[0], "b": LEFT.machines[0]}, ["g"], [])
    assert place.registry.leave("a") and place.registry.leave("a")
    place.later(HEARTBEAT_TIMEOUT_S)
    place.registry.heartbeat("g", None, {})
    assert place.registry.snapshot() == ((), {"b": LEFT.machines[0]}, ["g"], ["a"])
    place.later(0.1)
    assert place.registry.snapshot() == ((), {}, ["g"], [])


def test_servers_that_shall_all_end_leave_one_after_another():
    place = Place("net")
    place.later(0, a=LEFT, b=RIGHT)
    assert not place.registry.leave("a")  # gates may not know the other yet
    place.later(SETTLED_S, a=LEFT, b=RIGHT)
    assert place.registry.leave("a") and not place.registry.leave("b")
    place.later(1, b=RIGHT, c=LEFT)
    assert not place.registry.leave("b")
    place.later(SETTLED_S, b=RIGHT, c=LEFT)
    assert place.registry.leave("b") and not place.registry.leave("c")
    assert not Place("net").registry.leave("c")  # a directory that was started anew has not heard of it


def test_models_that_change_places_are_there_before_they_leave():
    place = Place("camera", "sound")
    one, two = placement(one={"camera": 1.0}), placement(two={"sound": 1.0})
    place.later(0, a=one, b=two)
    place.later(SETTLED_S, a=one, b=two, c=placement(one={"sound": 1.0}))
    assert not place.registry.leave("a") and not place.registry.leave("b")
    place.later(SETTLED_S, a=one, b=two, c=placement(one={"sound": 1.0}))
    assert not place.registry.leave("a") and place.registry.leave("b")
    place.registry.reconfigure({"models": ["sound"]})
    assert place.registry.leave("a")  # nobody shall have the camera any more


def test_what_gates_refuse_is_asked_of_all_servers_that_have_the_model():
    place = Place("net", "other")
    both, net = placement(left={"net": 0.5, "other": 1.0}).machines[0], RIGHT.machines[0]
    assert place.registry.heartbeat("a", both) == {}
    place.registry.heartbeat("b", net)
    for gate, counts in {"g": {"net": 40}, "h": {}}.items():
        place.registry.heartbeat(gate, None, counts)
    assert place.registry.heartbeat("a", both) == {}  # that was before
    place.later(REFUSED_S / 4)
    place.registry.heartbeat("g", None, {"net": 60})
    place.registry.heartbeat("h", None, {"net": 20, "other": 10})
    assert place.registry.heartbeat("a", both) == {"net": 40 / REFUSED_S / 2, "other": 10 / REFUSED_S}
    assert place.registry.heartbeat("b", net) == {"net": 40 / REFUSED_S / 2}
    for _ in range(4):
        place.later(REFUSED_S / 3)
        for gate, counts in {"g": {"net": 60}, "h": {"net": 20, "other": 10}}.items():
            place.registry.heartbeat(gate, None, counts)
    assert place.registry.heartbeat("a", both) == {}


# How many servers


def test_loads_follow_the_rates_of_both_resources():
    (machine,) = placement(left={"net": 1.0}).machines  # at 10 per second a tenth computed, 4 % of the channel
    assert predicted(machine, {}, {}) == (0, 0)
    assert predicted(machine, {"net": 50.0, "other": 9.0}, {}) == pytest.approx((0.5, 0.2))
    assert predicted(machine, {"net": 50.0}, {"net": 25.0, "other": 9.0}) == pytest.approx((0.75, 0.3))
    apart = machine.model_copy(update={"overlap": 0.0})
    assert predicted(apart, {"net": 50.0}, {}) == pytest.approx((0.7, 0.7))


@pytest.mark.parametrize(
    ("loads", "count"),
    [
        ([], 1),
        ([(0.0, 0.0)], 1),
        ([(0.8, 0.1)], 1),
        ([(0.81, 0.1)], 2),
        ([(0.1, 2.5)], 4),  # the channel is what is short
        ([(0.5, 0.5), (0.5, 0.5)], 2),
        ([(0.36, 0), (0.36, 0)], 2),  # one could do it, and would be too near to the cap
        ([(0.34, 0), (0.34, 0)], 1),
        ([(0.0, 0.0)] * 5, 1),
    ],
)
def test_as_many_servers_as_keep_the_fuller_resource_below_the_cap(loads, count):
    assert needed([ServerLoad(*load) for load in loads], cap=0.8) == count


def test_a_number_that_is_kept_is_kept():
    for share in range(1, 80):
        for servers in range(1, 6):
            loads = [ServerLoad(share / 100, 0.0)] * servers
            count = needed(loads, 0.8)
            spread = [ServerLoad(share / 100 * servers / count, 0.0)] * count
            assert needed(spread, 0.8) == count


class Context:
    """What Ray shows a policy, as far as ours looks."""

    def __init__(self, compute: dict[str, float], running: int) -> None:
        told = {replica: [SimpleNamespace(value=9.0), SimpleNamespace(value=load)] for replica, load in compute.items()}
        self.raw_metrics = {COMPUTE: told, BANDWIDTH: {replica: [] for replica in compute}}
        self.current_num_replicas = self.target_num_replicas = running
        self.capacity_adjusted_min_replicas, self.capacity_adjusted_max_replicas = 1, 3


def test_ray_is_told_a_number_within_its_bounds_once_all_have_spoken():
    policy = UtilisationPolicy(busy_cap=0.5)
    assert policy(Context({"a": 0.9}, 1)) == (2, {})
    assert policy(Context({"a": 9.0}, 1)) == (3, {})
    assert policy(Context({"a": 0.9}, 2)) == (2, {})
    assert policy(Context({}, 1)) == (1, {})


@needs_ray
def test_the_application_is_one_that_serve_takes(tmp_path):
    where = {"placement": written(tmp_path), "copies": "2", "actors": {"host": {"num_cpus": 2}}}
    code = (
        "from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as built\n"
        "from ray.serve._private.build_app import build_app\n"
        "import weft_cluster.ray\n"
        f"app = build_app(built(weft_cluster.ray.app, {where!r}), name='weft')\n"
        "found = {each.name: each for each in app.deployments}\n"
        "print(sorted(found), app.ingress_deployment_name)\n"
        "left = found['weft-left']\n"
        "print(left.ray_actor_options['num_cpus'], left._deployment_config.autoscaling_config.max_replicas)\n"
        "print({each.logging_config['enable_access_log'] for each in app.deployments})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    names, left = done.stdout.splitlines()[-3:], done.stderr
    assert done.returncode == 0, left
    assert names == ["['weft-directory', 'weft-gate', 'weft-left', 'weft-right'] weft-gate", "2 2", "{False}"]


def test_a_cluster_that_does_not_start_says_why_in_a_line(tmp_path, monkeypatch):
    def fail(cluster: LocalCluster) -> None:
        raise RuntimeError("the head node is not there\nand more of it")

    monkeypatch.setattr("weft_cluster.ray.local.find_spec", lambda name: True)
    monkeypatch.setattr(LocalCluster, "_start", fail)
    with pytest.raises(InputError, match=r"^Ray did not start: RuntimeError: the head node is not there$"):
        LocalCluster(3, placement=written(tmp_path)).__enter__()
