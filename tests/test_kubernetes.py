"""What is deployed on Kubernetes: manifests agree with each other, with the image and with what the server takes."""

from __future__ import annotations

import json
import os
import re
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import ROOT
from tests.serving import live
from tests.support.containers import KNOWN_VARIABLES, instructions, last_stage
from weft.serving.config import ServerConfig, is_loopback
from weft.serving.endpoints import PROBES
from weft.serving.environment import settings_in
from weft.serving.process import GRACE_S
from weft_cluster.plan_across import KIND
from weft_cluster.ray.settings import KEY_VARIABLE, parse_settings

yaml = pytest.importorskip("yaml", reason="reads manifests; openapi-spec-validator of .[dev] brings it")

FOLDER = ROOT / "deploy" / "kubernetes"
USUAL_GRACE_S = 30
"""How long Kubernetes lets a pod take to end where nobody says."""
KSERVE_CRD = os.environ.get("KSERVE_CRD", "")
"""KServe's config/crd/full/serving.kserve.io_clusterservingruntimes.yaml, where one is at hand."""


@cache
def manifests() -> dict[str, dict[str, Any]]:
    """KIND/NAME -> manifest; a patch is none."""
    parts = [part for file in sorted(FOLDER.glob("*.yaml")) for part in yaml.safe_load_all(file.read_text())]
    whole = [part for part in parts if "kind" in part]
    found = {f"{part['kind']}/{part['metadata']['name']}": part for part in whole}
    assert len(found) == len(whole)
    return found


def spec_of(which: str) -> dict[str, Any]:
    spec: dict[str, Any] = manifests()[which]["spec"]
    return spec


class ServingPod(NamedTuple):
    """What runs a server: the pod and the container in it, as the cluster puts them together."""

    pod: dict[str, Any]
    container: dict[str, Any]

    @property
    def config(self) -> ServerConfig:
        """The settings that the server comes to have, of the image and over it of the manifest."""
        inside = dict(each.split("=", 1) for each in dict(last_stage())["ENV"].split())
        given = {each["name"]: each["value"] for each in self.container["env"] if "value" in each}
        return ServerConfig(models=("m",), **settings_in(inside | given))


def serving_pods() -> dict[str, ServingPod]:
    deployed, runtime = spec_of("Deployment/weft")["template"]["spec"], spec_of("ClusterServingRuntime/weft")
    predictor = spec_of("InferenceService/models")["predictor"]
    (container,), (of_runtime,) = deployed["containers"], runtime["containers"]
    return {
        "deployment": ServingPod(deployed, container),
        "runtime": ServingPod(runtime, of_runtime),
        "service": ServingPod({**runtime, **predictor}, {**of_runtime, **predictor["model"]}),
    }


PODS = sorted(serving_pods())


@pytest.fixture(params=PODS)
def served(request: pytest.FixtureRequest) -> ServingPod:
    return serving_pods()[request.param]


# The server


def test_the_server_understands_its_variables_and_can_be_reached(served: ServingPod) -> None:
    assert {each["name"] for each in served.container["env"]} <= KNOWN_VARIABLES
    assert not is_loopback(served.config.network.host)
    assert served.container["args"][0] == "serve" and len(served.container["args"]) == 2


def test_ports_are_those_the_server_listens_on(served: ServingPod) -> None:
    config = served.config
    for port in served.container.get("ports", []):
        assert (
            port["containerPort"] == {"http": config.network.http_port, "grpc": config.network.grpc_port}[port["name"]]
        )
    named = {port["name"]: port["containerPort"] for port in served.container.get("ports", [])}
    for probe in probes(served).values():
        assert named.get(probe["port"], probe["port"]) == config.network.http_port


def test_on_kserve_it_listens_where_kserve_looks() -> None:
    pods = serving_pods()
    assert (pods["runtime"].config.network.http_port, pods["runtime"].config.network.grpc_port) == (8080, 9000)
    assert "ports" not in pods["runtime"].container and len(pods["service"].container["ports"]) == 2
    told = spec_of("ClusterServingRuntime/weft")["annotations"]
    assert told == {"prometheus.kserve.io/port": "8080", "prometheus.kserve.io/path": "/metrics"}


def probes(served: ServingPod) -> dict[str, dict[str, Any]]:
    return {name: served.container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}


def test_probes_ask_for_what_they_decide(served: ServingPod) -> None:
    asked = {name: probe["path"].rpartition("/")[2] for name, probe in probes(served).items()}
    assert asked == {"startup": "live", "readiness": "ready", "liveness": "live"}
    for name in asked:
        assert set(served.container[f"{name}Probe"]) <= {
            "httpGet",
            "periodSeconds",
            "timeoutSeconds",
            "failureThreshold",
        }


def test_the_server_answers_every_probe_without_a_key_and_metrics(tmp_path: Path) -> None:
    paths = {probe["path"] for served in serving_pods().values() for probe in probes(served).values()}
    metrics = spec_of("ClusterServingRuntime/weft")["annotations"]["prometheus.kserve.io/path"]
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with live.running(live.mlp(tmp_path / "m.onnx"), grpc_port=None, learn_s=0.0, api_key="secret") as server:
        for path in paths:
            with direct.open(server.url + path) as answer:
                assert answer.status == 200 and json.load(answer)
        asked = urllib.request.Request(server.url + metrics, headers={"Authorization": "Bearer secret"})
        with direct.open(asked) as answer:
            assert b"weft_ready 1" in answer.read()


def test_there_is_time_to_answer_what_was_accepted(served: ServingPod) -> None:
    before = served.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    assert before[0] == "sleep"
    grace_s = served.pod.get("terminationGracePeriodSeconds", USUAL_GRACE_S)
    assert int(before[1]) + served.config.network.drain_s + GRACE_S < grace_s


@pytest.mark.parametrize("name", ["deployment", "service"])
def test_a_pod_leaves_its_service_before_it_drains(name: str) -> None:
    assert int(serving_pods()[name].container["lifecycle"]["preStop"]["exec"]["command"][1]) > 0


# What it may have, and may not


def test_it_is_nobody_in_particular_and_may_do_nothing_more(served: ServingPod) -> None:
    own, shared = served.container["securityContext"], served.pod.get("securityContext", {})
    assert own["allowPrivilegeEscalation"] is False and own["capabilities"] == {"drop": ["ALL"]}
    assert {**shared, **own}["runAsNonRoot"] is True and not own.get("privileged")
    assert {**shared, **own}["seccompProfile"] == {"type": "RuntimeDefault"}
    chosen = {"runAsUser", "runAsGroup", "fsGroup"}  # OpenShift chooses, and refuses who does
    assert not chosen & {*own, *shared}


def test_it_writes_only_to_volumes_that_are_there(served: ServingPod) -> None:
    assert served.container["securityContext"]["readOnlyRootFilesystem"] is True
    mounted = {each["mountPath"]: each["name"] for each in served.container["volumeMounts"]}
    home = re.search(r"\bHOME=(\S+)", dict(last_stage())["ENV"])
    assert home and set(mounted) == {"/tmp", str(served.config.loading.cache)} == {"/tmp", home[1]}
    assert {each["name"] for each in served.pod["volumes"] if "emptyDir" in each} == set(mounted.values())


def test_lanes_and_memory_fit_into_what_the_pod_has(served: ServingPod) -> None:
    resources, config = served.container["resources"], served.config
    assert resources["requests"] == resources["limits"], "cores of its own, if the cluster gives any"
    assert config.execution.lanes == int(resources["limits"]["cpu"]) - 1
    limit = int(resources["limits"]["memory"].removesuffix("Gi")) << 30
    assert (config.loading.memory_budget_bytes or 0) + config.inflight_bytes <= limit * 3 // 4


def test_no_service_sets_the_servers_variables() -> None:
    for name in ("deployment", "service"):
        assert serving_pods()[name].pod["enableServiceLinks"] is False


# What belongs together


def test_all_that_selects_the_pods_of_the_deployment_finds_them() -> None:
    labels = spec_of("Deployment/weft")["template"]["metadata"]["labels"]
    chosen = [spec_of(f"{kind}/weft")["selector"]["matchLabels"] for kind in ("Deployment", "PodDisruptionBudget")]
    chosen += [spec_of("Service/weft")["selector"], spec_of("NetworkPolicy/weft")["podSelector"]["matchLabels"]]
    assert chosen == [labels] * 4
    named = {port["name"] for port in serving_pods()["deployment"].container["ports"]}
    assert {port["targetPort"] for port in spec_of("Service/weft")["ports"]} == named
    (rule,) = spec_of("NetworkPolicy/weft")["ingress"]
    assert {port["port"] for port in rule["ports"]} == named


def test_a_gpu_is_given_to_the_container_that_is_there() -> None:
    (patch,) = yaml.safe_load_all((FOLDER / "gpu.yaml").read_text())
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    assert container["name"] == serving_pods()["deployment"].container["name"]
    assert settings_in({each["name"]: each["value"] for each in container["env"]}) == {"device": "cuda:0"}
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}


def test_the_inference_service_asks_for_the_runtime_and_what_it_serves() -> None:
    runtime, model = spec_of("ClusterServingRuntime/weft"), spec_of("InferenceService/models")["predictor"]["model"]
    assert model["runtime"] == manifests()["ClusterServingRuntime/weft"]["metadata"]["name"]
    formats = {each["name"]: each["autoSelect"] for each in runtime["supportedModelFormats"]}
    assert formats == {"weft": True, "onnx": False} and model["modelFormat"]["name"] in formats
    assert model["protocolVersion"] in runtime["protocolVersions"] == ["v2", "grpc-v2"]
    (container,) = runtime["containers"]
    assert (container["name"], container["args"][1]) == ("kserve-container", "/mnt/models")


# On Ray


def on_ray() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What Serve runs, the only group of workers, and their container."""
    spec = spec_of("RayService/weft")
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    (group,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    return application, group, container


def test_ray_has_a_server_and_a_gate_on_each_worker() -> None:
    application, group, container = on_ray()
    told, cores = application["args"], int(container["resources"]["limits"]["cpu"])
    assert told["gates"] == group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    assert told["actors"] == {KIND: {"num_cpus": cores - 1}} and told["server"] == {"lanes": cores - 1}
    assert told["gate_actor"] == {"num_cpus": 1} and 2 * (cores - 1) > cores, "no pod has room for two servers"
    assert spec_of("RayService/weft")["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_clients_find_the_gates_of_ray() -> None:
    application, group, container = on_ray()
    (inside, _), (outside, calls) = container["ports"], spec_of("Service/weft-gates")["ports"]
    assert calls["targetPort"] == container["ports"][1]["name"]
    assert inside["containerPort"] == outside["port"] == application["args"]["port"]
    assert inside["name"] == outside["targetPort"] == container["readinessProbe"]["httpGet"]["port"]
    assert container["readinessProbe"]["httpGet"]["path"] in PROBES
    assert spec_of("Service/weft-gates")["selector"] == group["template"]["metadata"]["labels"]
    taken = {
        6379,
        8080,
        8265,
        10001,
        yaml.safe_load(spec_of("RayService/weft")["serveConfigV2"])["http_options"]["port"],
    }
    assert inside["containerPort"] not in taken, "what Ray and KubeRay listen on"


def test_ray_knows_its_own_by_a_token_and_runs_as_nobody_in_particular() -> None:
    cluster = spec_of("RayService/weft")["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    for each in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = each["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] is True and pod["enableServiceLinks"] is False
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    image = instructions("Containerfile.ray")
    assert image[0] == ("ARG", f"RAY={cluster['rayVersion']}-py312") and image[-1] == ("USER", "1000")


def test_weft_on_ray_takes_what_the_manifest_says() -> None:
    application, _, container = on_ray()
    assert application["import_path"] == "weft_cluster.ray:app"
    settings = parse_settings(application["args"])
    assert settings.gates == application["args"]["gates"]
    assert [each["containerPort"] for each in container["ports"]] == [settings.port, settings.grpc_port]
    assert [each["name"] for each in container["env"]] == [KEY_VARIABLE]


# Schemas


def strict(schema: Any) -> Any:
    """The schema with unknown keys refused, which the cluster would drop without a word."""
    if isinstance(schema, dict):
        kept = {key: strict(value) for key, value in schema.items()}
        return {"additionalProperties": False, **kept} if isinstance(kept.get("properties"), dict) else kept
    return [strict(each) for each in schema] if isinstance(schema, list) else schema


@pytest.mark.skipif(not KSERVE_CRD, reason="KSERVE_CRD names no schema of KServe (docs/kubernetes.md)")
def test_the_runtime_is_what_kserve_takes() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    quickly = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    (crd,) = (part for part in yaml.load_all(Path(KSERVE_CRD).read_text(), quickly) if part)
    runtime = manifests()["ClusterServingRuntime/weft"]
    group, version = runtime["apiVersion"].split("/")
    (schema,) = (each["schema"]["openAPIV3Schema"] for each in crd["spec"]["versions"] if each["name"] == version)
    assert (crd["spec"]["group"], crd["spec"]["names"]["kind"]) == (group, runtime["kind"])
    schema["properties"]["metadata"]["x-kubernetes-preserve-unknown-fields"] = True
    jsonschema.validate(runtime, strict(schema))


# The page


def test_the_page_names_files_that_are_there() -> None:
    named = re.findall(r"\bdeploy/[\w./-]*\w", (ROOT / "docs/kubernetes.md").read_text())
    assert {f"deploy/kubernetes/{file.name}" for file in FOLDER.iterdir()} <= set(named)
    assert [name for name in named if not (ROOT / name).exists()] == []
