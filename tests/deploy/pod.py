"""A pod's containers as processes under one supervisor, which does the kubelet's work: order, probes, restarts, end."""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from planner_service.health import HealthCheckError, check
from tests.deploy import sandbox
from tests.deploy.manifests import Document, read_environment

_RINGPLAN = [sys.executable, "-P", "-m", "ringplan_cli"]
_POLL_SECONDS = 0.05
_START_SECONDS = 120.0
# What a container of ours has beside its manifest's environment; the threads are for machines with few cores.
_BASE_ENVIRONMENT = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


@dataclass
class ContainerProcess:
    """A container.

    Args:
        name: its name in the manifest.
        spec: its part of the manifest.
        command: what it runs, with the paths and ports of this machine.
        environment: all of its environment.
        log: takes what it prints.
    """

    name: str
    spec: Document
    command: list[str]
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    num_starts: int = 0
    statuses: list[int] = field(default_factory=list)

    def start(self) -> None:
        """Starts its process."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, env=self.environment, stdout=log, stderr=log)
        self.num_starts += 1

    def send(self, number: signal.Signals) -> None:
        """Sends a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def has_ended(self) -> bool:
        """Whether it has no process; its exit status is noted once."""
        if self.process is None:
            return True
        status = self.process.poll()
        if status is None:
            return False
        self.statuses.append(status)
        self.process = None
        return True


class Pod:
    """The pod of a Deployment, started by `start` and ended by `stop`; `close` leaves nothing of it behind.

    Args:
        documents: the rendered manifests.
        pod_spec: the pod's part of them.
        folder: takes volumes and logs; short, since socket paths have at most 107 bytes.
        volumes: folders that stand for volumes, by name; the other volumes are made.
        port: stands for the engine's gRPC port.
        settings: environment variables that differ from the manifest's.

    Attributes:
        containers: by name, in the order of the manifest.
        is_restarting: whether containers that end are started again; a test may hold that back for a while.
        ended: names of containers that `stop` has ended, in order.
        killed: names of those that had to be killed.
    """

    def __init__(
        self,
        documents: list[Document],
        pod_spec: Document,
        folder: Path,
        *,
        volumes: dict[str, Path],
        port: int,
        settings: dict[str, str],
    ) -> None:
        self.folder = folder
        self.target = f"127.0.0.1:{port}"
        self.is_restarting = True
        self.ended: list[str] = []
        self.killed: list[str] = []
        self._spec = pod_spec
        self._is_stopping = threading.Event()
        self._volumes = {
            volume["name"]: volumes.get(volume["name"], folder / volume["name"]) for volume in pod_spec["volumes"]
        }
        for name in self._volumes.keys() - volumes.keys():
            self._volumes[name].mkdir()
            # As the kubelet makes them where a pod has an fsGroup.
            self._volumes[name].chmod(0o2777)
        specs = [*pod_spec.get("initContainers", []), *pod_spec["containers"]]
        self.containers = {spec["name"]: self._build(documents, spec, settings) for spec in specs}
        self._supervisor = threading.Thread(target=self._supervise, daemon=True)

    def start(self) -> None:
        """Starts all containers in their order and returns once the pod is ready."""
        main = {spec["name"] for spec in self._spec["containers"]}
        for container in self.containers.values():
            container.start()
            if container.name in main or container.spec.get("restartPolicy") == "Always":
                self._wait_for_start(container)
            else:
                assert container.process is not None
                assert container.process.wait(_START_SECONDS) == 0, container.log.read_text()
        self._supervisor.start()
        self.wait_until_ready(is_ready=True)

    def probe(self, name: str, kind: str) -> bool:
        """Makes one of a container's probes.

        Args:
            name: the container's.
            kind: "startupProbe", "livenessProbe" or "readinessProbe".
        """
        container, probe = self.containers[name], self.containers[name].spec[kind]
        if "exec" in probe:
            command = self._confine(container.spec, self._translate(container.spec, probe["exec"]["command"]))
            return subprocess.run(command, env=container.environment, capture_output=True, check=False).returncode == 0
        try:
            return check(self.target, probe["timeoutSeconds"], probe["grpc"].get("service", ""))
        except HealthCheckError:
            return False

    def is_ready(self) -> bool:
        """Whether every container is ready that has a probe for it."""
        return all(
            self.probe(name, "readinessProbe")
            for name in self.containers
            if "readinessProbe" in self.containers[name].spec
        )

    def wait_until_ready(self, *, is_ready: bool) -> None:
        """Returns once the pod is, or is not, ready; its engine must be alive all the while."""
        deadline = time.monotonic() + _START_SECONDS
        while self.is_ready() != is_ready:
            assert time.monotonic() < deadline, f"the pod never was ready={is_ready}:\n{self.read_logs()}"
            time.sleep(_POLL_SECONDS / 2)

    def kill(self, name: str) -> None:
        """Kills a container, as running out of memory does."""
        self.containers[name].send(signal.SIGKILL)

    def stop(self, during_pre_stop: Callable[[], None]) -> None:
        """Ends the pod: preStop, SIGTERM to the main containers, then to the sidecars in reverse order.

        Args:
            during_pre_stop: what happens in the time of the engine's preStop.
        """
        self._is_stopping.set()
        self._supervisor.join()
        deadline = time.monotonic() + self._spec["terminationGracePeriodSeconds"]
        main = [self.containers[spec["name"]] for spec in self._spec["containers"]]
        assert all("sleep" in container.spec["lifecycle"]["preStop"] for container in main)
        during_pre_stop()
        sidecars = [container for container in self.containers.values() if container not in main]
        self._end(main, deadline)
        for container in reversed(sidecars):
            self._end([container], deadline)

    def close(self) -> None:
        """Leaves nothing behind."""
        self._is_stopping.set()
        if self._supervisor.is_alive():
            self._supervisor.join()
        for container in self.containers.values():
            if not container.has_ended():
                container.send(signal.SIGKILL)
                assert container.process is not None
                container.process.wait()

    def volume(self, name: str) -> Path:
        """Returns the folder that stands for a volume."""
        return self._volumes[name]

    def read_logs(self) -> str:
        """Returns what all containers have printed."""
        return "\n".join(container.log.read_text(errors="replace") for container in self.containers.values())

    def _build(self, documents: list[Document], spec: Document, settings: dict[str, str]) -> ContainerProcess:
        name = spec["name"]
        own = {key: value for key, value in settings.items() if key.startswith(f"RINGPLAN_{name.upper()}_")}
        given = {**read_environment(documents, self._spec, name), **own}
        # What a container writes to /tmp goes to the folder that stands for it.
        given["TMPDIR"] = "/tmp"
        environment = {key: self._replace_paths(spec, value) for key, value in given.items()}
        arguments = ["ringplan", *spec["args"]]
        command = self._confine(spec, self._translate(spec, arguments))
        return ContainerProcess(name, spec, command, {**_BASE_ENVIRONMENT, **environment}, self.folder / f"{name}.log")

    def _translate(self, spec: Document, command: list[str]) -> list[str]:
        assert command[0] == "ringplan", shlex.join(command)
        return [*_RINGPLAN, *(self._replace_paths(spec, argument) for argument in command[1:])]

    def _replace_paths(self, spec: Document, text: str) -> str:
        """Puts this machine's folders in the place of mounted volumes."""
        folders = {mount["mountPath"]: str(self._volumes[mount["name"]]) for mount in spec["volumeMounts"]}
        pattern = rf"(?<![\w/])({'|'.join(map(re.escape, folders))})(?=/|$)"
        return re.sub(pattern, lambda match: folders[match[1]], text)

    def _confine(self, spec: Document, command: list[str]) -> list[str]:
        if sandbox.find_fault() is not None:
            return command
        folders: dict[bool, list[Path]] = {True: [], False: []}
        for mount in spec["volumeMounts"]:
            folders[mount.get("readOnly", False)].append(self._volumes[mount["name"]])
        return sandbox.wrap(command, writable=folders[False], read_only=folders[True])

    def _wait_for_start(self, container: ContainerProcess) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not self.probe(container.name, "startupProbe"):
            failed = container.has_ended() or time.monotonic() > deadline
            assert not failed, f"{container.name} did not start:\n{container.log.read_text()}"
            time.sleep(_POLL_SECONDS)

    def _supervise(self) -> None:
        while not self._is_stopping.wait(_POLL_SECONDS):
            for container in self.containers.values():
                if (
                    container.spec.get("restartPolicy", "Always") == "Always"
                    and container.has_ended()
                    and self.is_restarting
                ):
                    container.start()

    def _end(self, containers: list[ContainerProcess], deadline: float) -> None:
        running = [container for container in containers if not container.has_ended()]
        for container in running:
            container.send(signal.SIGTERM)
        for container in running:
            while not container.has_ended():
                if time.monotonic() > deadline:
                    self.killed.append(container.name)
                    container.send(signal.SIGKILL)
                time.sleep(_POLL_SECONDS)
            self.ended.append(container.name)
