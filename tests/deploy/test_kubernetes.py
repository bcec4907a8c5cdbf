"""The manifests of deploy/kubernetes: valid for Kubernetes, and right for the two processes."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest

from engine_service.server import LIVENESS_SERVICE
from tests.deploy.custom_resources import SCHEMAS
from tests.deploy.manifests import (
    TARGETS,
    Document,
    find,
    find_container,
    find_pod_spec,
    read_environment,
    render,
)

# The preStop sleep came with 1.30, native sidecars with 1.29; the newest one is what the schemas at hand go up to.
VERSIONS = ("1.30", kubernetes_validate.latest_version())
DEPLOYMENTS = [(target, "ringplan") for target in TARGETS] + [("examples/smg", "gateway")]

every_target = pytest.mark.parametrize("target", TARGETS)
every_deployment = pytest.mark.parametrize(("target", "name"), DEPLOYMENTS)


def list_containers(pod_spec: Document) -> list[Document]:
    """Returns all containers of a pod."""
    return [*pod_spec.get("initContainers", []), *pod_spec["containers"]]


@every_target
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(target: str, version: str) -> None:
    """Strictly, by the schemas of that version of Kubernetes; custom resources by the shape that is published."""
    for document in render(target):
        if document["kind"] in SCHEMAS:
            jsonschema.validate(document, SCHEMAS[document["kind"]])
        else:
            kubernetes_validate.validate(document, version, strict=True)


@every_target
def test_everything_is_in_one_namespace(target: str) -> None:
    """So that it can be deleted with it, and network policies cover it."""
    for document in render(target):
        if document["kind"] != "Namespace":
            assert document["metadata"]["namespace"] == "ringplan", document["metadata"]["name"]


@every_deployment
def test_pods_keep_to_the_restricted_standard(target: str, name: str) -> None:
    """The pod security standard that the namespace enforces, and a read-only root beside it."""
    documents = render(target)
    assert (
        find(documents, "Namespace", "ringplan")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        == "restricted"
    )
    pod_spec = find_pod_spec(documents, name)
    assert pod_spec["securityContext"]["runAsNonRoot"] is True
    assert pod_spec["securityContext"]["runAsUser"] > 0
    assert pod_spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod_spec)
    for volume in pod_spec["volumes"]:
        assert set(volume) <= {"name", "emptyDir", "persistentVolumeClaim"}
    for container in list_containers(pod_spec):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@every_deployment
def test_resources_are_bounded(target: str, name: str) -> None:
    """Processor and memory are asked for, memory is limited, and so is every volume of the pod's own."""
    pod_spec = find_pod_spec(render(target), name)
    for container in list_containers(pod_spec):
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert "memory" in container["resources"]["limits"]
    for volume in pod_spec["volumes"]:
        assert "emptyDir" not in volume or "sizeLimit" in volume["emptyDir"]


@every_target
def test_planner_is_a_native_sidecar_and_starts_last_of_the_init_containers(target: str) -> None:
    """One that is restarted by itself and ends after the engine; it does not run idle while a model is copied."""
    pod_spec = find_pod_spec(render(target))
    planner = pod_spec["initContainers"][-1]
    assert planner["name"] == "planner"
    assert planner["restartPolicy"] == "Always"
    assert "startupProbe" in planner, "without one the engine would not wait for it"
    assert all("restartPolicy" not in container for container in pod_spec["initContainers"][:-1])
    assert [container["name"] for container in pod_spec["containers"]] == ["engine"]


@every_target
def test_probes_ask_what_the_processes_answer(target: str) -> None:
    """The planner's on its socket; the engine's liveness by its own name, its readiness of the whole server."""
    documents = render(target)
    pod_spec = find_pod_spec(documents)
    socket = read_environment(documents, pod_spec, "planner")["RINGPLAN_PLANNER_SOCKET"]
    planner = find_container(pod_spec, "planner")
    for kind in ("startupProbe", "livenessProbe"):
        assert planner[kind]["exec"]["command"] == ["ringplan", "health", f"unix:{socket}"]
        assert planner[kind]["timeoutSeconds"] > 5, "shorter than `ringplan health` waits by itself"
    engine = find_container(pod_spec, "engine")
    assert engine["startupProbe"]["grpc"]["service"] == LIVENESS_SERVICE
    assert engine["livenessProbe"]["grpc"]["service"] == LIVENESS_SERVICE
    assert engine["readinessProbe"]["grpc"].get("service", "") == ""
    listen = read_environment(documents, pod_spec, "engine")["RINGPLAN_ENGINE_LISTEN"]
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert listen == f"0.0.0.0:{engine[kind]['grpc']['port']}"


@every_target
def test_ports_are_those_of_the_settings_and_found_by_name(target: str) -> None:
    """Services, network policy and pod monitor name ports that a container has; each is one that its process serves."""
    documents = render(target)
    pod_spec = find_pod_spec(documents)
    engine = read_environment(documents, pod_spec, "engine")
    planner = read_environment(documents, pod_spec, "planner")
    served = {
        "grpc": int(engine["RINGPLAN_ENGINE_LISTEN"].rpartition(":")[2]),
        "engine-metrics": int(engine["RINGPLAN_ENGINE_METRICS_PORT"]),
        "planner-metrics": int(planner["RINGPLAN_PLANNER_METRICS_PORT"]),
    }
    containers = list_containers(pod_spec)
    assert {port["name"]: port["containerPort"] for c in containers for port in c.get("ports", [])} == served
    for service in ("ringplan", "ringplan-headless"):
        (port,) = find(documents, "Service", service)["spec"]["ports"]
        assert port["targetPort"] in served
    allowed = [
        port["port"]
        for rule in find(documents, "NetworkPolicy", "ringplan")["spec"]["ingress"]
        for port in rule["ports"]
    ]
    # A sidecar's ports go by number: some network plugins look for names among the main containers' ports alone.
    assert allowed == ["grpc", "engine-metrics", served["planner-metrics"]]
    for document in documents:
        if document["kind"] == "PodMonitor":
            ports = {endpoint["port"] for endpoint in document["spec"]["podMetricsEndpoints"]}
            assert ports == {name for name in served if name.endswith("-metrics")}


@every_target
def test_selectors_choose_the_pods_and_no_others(target: str) -> None:
    """Services, budget, policy and monitor go by the label of the pods, which is also the job that Prometheus names."""
    documents = render(target)
    labels = find(documents, "Deployment", "ringplan")["spec"]["template"]["metadata"]["labels"]
    assert labels == {"app.kubernetes.io/name": "ringplan"}
    selectors = [find(documents, "Service", name)["spec"]["selector"] for name in ("ringplan", "ringplan-headless")]
    selectors.append(find(documents, "Deployment", "ringplan")["spec"]["selector"]["matchLabels"])
    selectors.append(find(documents, "PodDisruptionBudget", "ringplan")["spec"]["selector"]["matchLabels"])
    selectors.append(find(documents, "NetworkPolicy", "ringplan")["spec"]["podSelector"]["matchLabels"])
    for document in documents:
        if document["kind"] == "PodMonitor":
            selectors.append(document["spec"]["selector"]["matchLabels"])
            assert labels[document["spec"]["jobLabel"]] == "ringplan"
    assert selectors == [labels] * len(selectors)
    for document in documents:
        if document["kind"] == "Deployment" and document["metadata"]["name"] != "ringplan":
            assert document["spec"]["template"]["metadata"]["labels"] != labels


def test_headless_service_gives_the_pods_addresses() -> None:
    """For clients that balance by themselves; the other service has an address of its own."""
    documents = render("overlays/cpu")
    assert find(documents, "Service", "ringplan-headless")["spec"]["clusterIP"] == "None"
    assert "clusterIP" not in find(documents, "Service", "ringplan")["spec"]


def test_replicas_belong_to_the_scaler() -> None:
    """With KEDA the Deployment names no number, which every `kubectl apply` would set again."""
    documents = render("examples/full")
    assert "replicas" not in find(documents, "Deployment", "ringplan")["spec"]
    assert find(render("overlays/cpu"), "Deployment", "ringplan")["spec"]["replicas"] == 2
    scaler = find(documents, "ScaledObject", "ringplan")
    assert scaler["spec"]["scaleTargetRef"]["name"] == "ringplan"
    assert (
        scaler["spec"]["minReplicaCount"] <= scaler["spec"]["fallback"]["replicas"] <= scaler["spec"]["maxReplicaCount"]
    )
    query = scaler["spec"]["triggers"][0]["metadata"]["query"]
    assert f'namespace="{scaler["metadata"]["namespace"]}"' in query
    assert re.findall(r"ringplan_\w+", query) == ["ringplan_requests_waiting"]


def test_gateway_takes_its_flags_and_finds_the_replicas() -> None:
    """Each flag is one of the gateway's, its selector is the pods' label, and its port is the engine's."""
    documents = render("examples/smg")
    (container,) = find_pod_spec(documents, "gateway")["containers"]
    command, *flags = container["args"]
    labels = find(documents, "Deployment", "ringplan")["spec"]["template"]["metadata"]["labels"]
    ((label, value),) = labels.items()
    assert f"--selector={label}={value}" in flags
    engine = find_container(find_pod_spec(documents), "engine")
    (port,) = [port["containerPort"] for port in engine["ports"] if port["name"] == "grpc"]
    assert f"--service-discovery-port={port}" in flags
    assert find(documents, "Role", "gateway")["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    ]
    smg = Path(sys.executable).parent / "smg"
    if not smg.exists() and shutil.which("smg") is None:
        pytest.skip("the gateway is not installed: its flags were not compared")
    help_text = subprocess.run(
        [str(smg) if smg.exists() else "smg", command, "--help"], capture_output=True, text=True, check=True
    )
    known = set(re.findall(r"(?<![\w-])--[a-z][-a-z0-9]+", help_text.stdout))
    assert {flag.partition("=")[0] for flag in flags} <= known
