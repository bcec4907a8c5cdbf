"""The manifests of deploy/kubernetes, rendered as `kubectl apply -k` would."""

import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
TARGETS = ("overlays/cpu", "overlays/cuda", "examples/full", "examples/smg")

Document = dict[str, Any]


@functools.cache
def _render(target: str) -> str:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: it renders the manifests")
    command = ["kubectl", "kustomize", str(KUBERNETES / target)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def render(target: str) -> list[Document]:
    """Returns the objects that a folder of deploy/kubernetes stands for; without kubectl the test is skipped."""
    return [document for document in yaml.safe_load_all(_render(target)) if document]


def find(documents: list[Document], kind: str, name: str) -> Document:
    """Returns one object. A ConfigMap is found by its name without the hash."""
    for document in documents:
        given = document["metadata"]["name"]
        if document["kind"] == kind and name in (given, given.rpartition("-")[0] if kind == "ConfigMap" else given):
            return document
    raise AssertionError(f"there is no {kind} {name}")


def find_pod_spec(documents: list[Document], name: str = "ringplan") -> Document:
    """Returns what a Deployment's pods are made from."""
    spec: Document = find(documents, "Deployment", name)["spec"]["template"]["spec"]
    return spec


def find_container(pod_spec: Document, name: str) -> Document:
    """Returns a container of a pod, an init container too."""
    containers: list[Document] = pod_spec.get("initContainers", []) + pod_spec["containers"]
    return next(container for container in containers if container["name"] == name)


def read_environment(documents: list[Document], pod_spec: Document, name: str) -> dict[str, str]:
    """Returns a container's environment; what the kubelet fills in stands for a pod "ringplan-0".

    Args:
        documents: all objects, for the ConfigMaps.
        pod_spec: the pod's.
        name: the container's.
    """
    container = find_container(pod_spec, name)
    environment: dict[str, str] = {}
    for source in container.get("envFrom", []):
        config_map = source["configMapRef"]["name"]
        (data,) = [
            document["data"]
            for document in documents
            if document["kind"] == "ConfigMap" and document["metadata"]["name"] == config_map
        ]
        environment |= data
    for variable in container.get("env", []):
        environment[variable["name"]] = variable.get("value") or _fill_in(variable["valueFrom"], container)
    return environment


def _fill_in(source: Document, container: Document) -> str:
    if "fieldRef" in source:
        assert source["fieldRef"]["fieldPath"] == "metadata.name"
        return "ringplan-0"
    kind, _, resource = source["resourceFieldRef"]["resource"].partition(".")
    assert source["resourceFieldRef"]["divisor"] == "1"
    return str(int(container["resources"][kind][resource]))


def parse_quantity(text: str) -> int:
    """Returns a Kubernetes quantity such as "64Mi" in bytes."""
    number, unit = text[:-2], text[-2:]
    return int(number) << {"Ki": 10, "Mi": 20, "Gi": 30}[unit]
