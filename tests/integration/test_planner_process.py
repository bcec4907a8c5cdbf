"""The planner as a real process: how it starts, what it takes, and how it and its engines end."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from planner_service.health import HealthCheckError, check
from planner_service.rpc import REASON_KEY, SERVICE_NAME
from ringplan.planner.v1 import planner_pb2 as pb
from tests.planner_process import PlannerProcess, run_planner
from tests.planner_service.planner_thread import OPEN, PlanCall, build_layout, open_channel

ENGINE_PROGRAM = """
import sys, time
from planner_service.client import PlannerClient, Segment
session = PlannerClient(sys.argv[1]).open_session(page_size=4, num_pages=64, max_streams=8, engine_name="doomed")
session.submit(session.build_layout([Segment("r", "main", 9)]))
session.next_plan()
print(session.name, flush=True)
time.sleep(60)
"""
MODULE_COMMAND = [sys.executable, "-m", "planner_service"]
MAX_RESIDENT_BYTES = 120 << 20


def _build_environment(folder: Path) -> dict[str, str]:
    """Returns an environment for a planner in a folder, with the modules that this process finds."""
    return {
        "PYTHONPATH": ":".join(path for path in sys.path if path),
        "RINGPLAN_PLANNER_SOCKET": str(folder / "planner.sock"),
        "RINGPLAN_PLANNER_RING_DIR": str(folder / "ring"),
        "RINGPLAN_PLANNER_METRICS_PORT": "0",
    }


def _read_metrics(planner: PlannerProcess) -> str:
    match = re.search(r"metrics at (http://\S+)", planner.read_log())
    assert match is not None
    with urllib.request.urlopen(match[1], timeout=30) as response:
        text: str = response.read().decode()
    return text


def _read_resident_bytes(planner: PlannerProcess) -> int:
    """Returns the most memory the process ever had."""
    assert planner.process is not None
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{planner.process.pid}/status").read_text())
    assert match is not None
    return 1024 * int(match[1])


def _watch_health(channel: grpc.Channel) -> "grpc.CallIterator[health_pb2.HealthCheckResponse]":
    request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
    return health_pb2_grpc.HealthStub(channel).Watch(request, timeout=30)


def _expect_failure(call: PlanCall) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        list(call.call)
    return caught.value.code(), str(dict(caught.value.trailing_metadata())[REASON_KEY])


def test_a_ready_planner_says_so_and_serves(own_planner: PlannerProcess) -> None:
    """One line in the log tells where; health, by name too, and reflection answer."""
    assert own_planner.read_log().count("ready") == 1
    assert own_planner.target in own_planner.read_log()
    assert check(own_planner.target, 10)
    assert check(own_planner.target, 10, service=SERVICE_NAME)
    with own_planner.open_channel() as channel:
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=30)
        names = {service.name for service in answer.list_services_response.service}
        file_request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE_NAME)
        (file_answer,) = stub.ServerReflectionInfo(iter([file_request]), timeout=30)
    assert names == {SERVICE_NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    assert b"DumpSession" in file_answer.file_descriptor_response.file_descriptor_proto[0]


def test_the_log_can_be_json(short_folder: Path) -> None:
    """Every line is an object; the ready one tells socket and metrics address to programs."""
    with run_planner(short_folder, log_json=True) as planner:
        assert planner.stop() == 0
        records = [json.loads(line) for line in planner.read_log().splitlines()]
    (ready,) = [record for record in records if record.get("event") == "ready"]
    assert ready["socket"] == str(planner.socket)
    assert ready["metrics_url"].startswith("http://127.0.0.1:")


def test_the_module_takes_no_arguments() -> None:
    """A flag that would be silently ignored is refused."""
    result = subprocess.run([*MODULE_COMMAND, "--help"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: settings come from the environment")


def test_a_planner_imports_neither_torch_nor_transformers() -> None:
    """Starting it takes what planning needs, and no model code."""
    program = "import sys, planner_service.server, planner_service.__main__; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert {"torch", "transformers", "gguf", "safetensors"}.isdisjoint(modules)


def test_a_first_session_imports_nothing() -> None:
    """What its plans need is there when the planner is ready: numpy imports some of itself late, in 50 ms and 3 MB."""
    program = """if True:
        import sys
        import planner_service.server
        import numpy as np
        from planner_service.core.layout import Fork, PlanLabelRows, StepLayout
        from planner_service.core.plan import CacheMode
        from planner_service.core.planner import Planner
        from planner_service.core.ring import BufferSet
        before = set(sys.modules)
        planner = Planner(page_size=4, num_pages=64, max_streams=4, cache_mode=CacheMode.VERIFY)
        streams = np.arange(2, dtype="<i4").tobytes()
        for step_id in range(1, 40):
            spans = np.array([7, 5], dtype="<i4").tobytes() if step_id == 1 else b""
            forks = (Fork(0, 2),) if step_id == 9 else ()
            layout = StepLayout(step_id, (PlanLabelRows("main", streams, spans),), forks_after=forks)
            buffer_set = BufferSet(1, 0, np.zeros(1024, dtype=np.int32))
            planner.plan(planner.read(layout), step_id, lambda _: buffer_set)
            planner.commit_through(step_id)
        print(planner.cache.tally.num_hits, *set(sys.modules) - before)
    """
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    num_hits, *imported = result.stdout.split()
    assert int(num_hits) > 30
    assert imported == []


def test_a_session_of_65536_pages_fits_120_megabytes(own_planner: PlannerProcess) -> None:
    """Nearly all pages handed out to 128 streams, then a decode step: the process never had more."""
    with own_planner.open_channel() as channel:
        call = PlanCall(channel)
        call.open(pb.PlanRequest(open=pb.SessionOptions(page_size=16, num_pages=65_536, max_streams=128)))
        streams = np.arange(128, dtype="<i4").tobytes()
        for step_id in range(1, 17):
            # In the end 511 pages a stream, the last with one slot free: 512 would be one page more than there are.
            spans = np.full(128, 512 - 17 * (step_id == 16), dtype="<i4").tobytes()
            labels = [pb.PlanLabel(name="main", streams=streams, spans=spans)]
            layout = pb.StepLayout(step_id=step_id, commit=True, plan_labels=labels)
            call.send(pb.PlanRequest(released_through=step_id - 1, committed_through=step_id - 1, layouts=[layout]))
            assert len(call.receive().plans) == 1
        call.send(pb.PlanRequest(released_through=16, committed_through=16, layouts=[build_layout(17, range(128))]))
        assert len(call.receive().plans) == 1
        (summary,) = own_planner.list_sessions()
        assert summary.num_free_pages == 65_535 - 128 * 511
        assert _read_resident_bytes(own_planner) < MAX_RESIDENT_BYTES


def test_a_message_of_many_megabytes_passes(own_planner: PlannerProcess) -> None:
    """GRPC's usual limit of 4 MiB does not bound a layout."""
    num_rows = 2_000_000
    with own_planner.open_channel() as channel:
        call = PlanCall(channel)
        call.open()
        call.send(pb.PlanRequest(layouts=[build_layout(1, [-1] * num_rows)]))
        response = call.receive()
    assert response.plans[0].plan_labels[0].num_rows == num_rows
    assert response.regions[0].num_bytes > response.plans[0].num_bytes


def test_metrics_follow_a_session_from_its_first_plan_to_its_end(own_planner: PlannerProcess) -> None:
    """Counters and gauges carry the session's name while it is open, and are gone afterwards."""
    with own_planner.open_channel() as channel:
        call = PlanCall(channel)
        name = call.open().opened.session
        call.send(pb.PlanRequest(layouts=[build_layout(1, [0, 1])]))
        call.receive()
        text = _read_metrics(own_planner)
        assert f'ringplan_pages_free{{session="{name}"}} 61.0' in text
        assert f'ringplan_plan_cache_hits_total{{plan_label="main",session="{name}"}} 0.0' in text
        assert 'ringplan_plan_duration_seconds_count{source="full"} 1.0' in text
        assert "_created" not in text
        call.end()
        assert list(call.call) == []
        text = _read_metrics(own_planner)
    assert name not in text
    assert "ringplan_sessions 0.0" in text


def test_an_engine_that_is_killed_leaves_nothing_and_harms_nobody(own_planner: PlannerProcess) -> None:
    """After kill -9 its pages, region and series are gone; another engine's session goes on."""
    with own_planner.open_channel() as channel:
        survivor = PlanCall(channel)
        survivor_name = survivor.open().opened.session
        command = [sys.executable, "-c", ENGINE_PROGRAM, own_planner.target]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
            assert engine.stdout is not None
            name = engine.stdout.readline().strip()
            assert {item.session for item in own_planner.list_sessions()} == {survivor_name, name}
            engine.kill()
        while len(own_planner.list_sessions()) > 1:
            pass  # Each look is a round trip; the test's time-out bounds them.
        assert f'session="{name}"' not in _read_metrics(own_planner)
        assert len(list(own_planner.ring_dir.iterdir())) == 1
        survivor.send(pb.PlanRequest(layouts=[build_layout(1, [0])]))
        assert len(survivor.receive().plans) == 1


def test_a_stop_without_sessions_leaves_nothing(own_planner: PlannerProcess) -> None:
    """SIGTERM ends an idle planner with 0, and takes socket and lock away."""
    assert own_planner.stop() == 0
    assert sorted(path.name for path in own_planner.folder.iterdir()) == ["planner.log", "ring"]
    assert list(own_planner.ring_dir.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_open_sessions_end(short_folder: Path, number: signal.Signals) -> None:
    """While a session is open health says no, new sessions are refused, the open one is served; then it ends with 0."""
    with run_planner(short_folder, shutdown_grace_seconds=600) as planner, planner.open_channel() as channel:
        assert planner.process is not None
        call = PlanCall(channel)
        call.open()
        health = _watch_health(channel)
        assert next(health).status == health_pb2.HealthCheckResponse.SERVING
        planner.process.send_signal(number)
        assert next(health).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert check(planner.target, 10) is False
        refused = PlanCall(channel)
        refused.send(OPEN)
        assert _expect_failure(refused) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
        call.send(pb.PlanRequest(layouts=[build_layout(1, [0])]))
        assert len(call.receive().plans) == 1
        call.end()
        assert list(call.call) == []
        assert planner.process.wait(30) == 0


def test_a_stop_ends_sessions_that_outlast_the_grace(short_folder: Path) -> None:
    """An engine that does not end by itself is told why, and the planner ends with 0 and leaves nothing."""
    with run_planner(short_folder, shutdown_grace_seconds=0) as planner, planner.open_channel() as channel:
        call = PlanCall(channel)
        call.open()
        assert planner.stop() == 0
        assert _expect_failure(call) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
        assert list(planner.ring_dir.iterdir()) == []


def test_a_second_signal_does_not_wait(short_folder: Path) -> None:
    """Whoever asks twice is in a hurry: the grace is over."""
    with run_planner(short_folder, shutdown_grace_seconds=600) as planner, planner.open_channel() as channel:
        assert planner.process is not None
        call = PlanCall(channel)
        call.open()
        health = _watch_health(channel)
        assert next(health).status == health_pb2.HealthCheckResponse.SERVING
        planner.process.send_signal(signal.SIGTERM)
        assert next(health).status == health_pb2.HealthCheckResponse.NOT_SERVING
        planner.process.send_signal(signal.SIGTERM)
        assert _expect_failure(call) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
        assert planner.process.wait(30) == 0


def test_a_planner_takes_over_from_one_that_was_killed(own_planner: PlannerProcess) -> None:
    """A stale socket and stale regions are no obstacle, and the regions are swept."""
    with own_planner.open_channel() as channel:
        call = PlanCall(channel)
        call.open()
        own_planner.kill()
    assert own_planner.socket.exists()
    assert len(list(own_planner.ring_dir.iterdir())) == 1
    with pytest.raises(HealthCheckError):
        check(own_planner.target, 10)
    own_planner.start()
    assert list(own_planner.ring_dir.iterdir()) == []
    with open_channel(own_planner.socket) as channel:
        assert PlanCall(channel).open().opened.session


def test_a_second_planner_on_the_socket_is_refused_with_the_owners_pid(own_planner: PlannerProcess) -> None:
    """It ends with 1 and one clear line; the first planner and its sessions notice nothing."""
    assert own_planner.process is not None
    with own_planner.open_channel() as channel:
        call = PlanCall(channel)
        call.open()
        second = subprocess.run(
            MODULE_COMMAND,
            check=False,
            env=_build_environment(own_planner.folder),
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert second.returncode == 1
        (line,) = second.stderr.splitlines()
        assert f"{own_planner.socket} is in use by process {own_planner.process.pid}" in line
        call.send(pb.PlanRequest(layouts=[build_layout(1, [0])]))
        assert len(call.receive().plans) == 1


def test_of_planners_that_start_at_once_exactly_one_serves(short_folder: Path) -> None:
    """However their starts interleave, the others end with 1 and the socket works."""
    environment = _build_environment(short_folder)
    planners = [subprocess.Popen(MODULE_COMMAND, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    first_lines = [planner.stderr.readline() for planner in planners if planner.stderr is not None]
    winners = [planner for planner, line in zip(planners, first_lines, strict=True) if "ready" in line]
    assert len(winners) == 1, first_lines
    assert check(f"unix:{short_folder}/planner.sock", 10)
    winners[0].terminate()
    assert sorted(planner.wait(30) for planner in planners) == [0, 1, 1]
    for planner in planners:
        planner.communicate()


def test_an_unknown_variable_keeps_a_planner_from_starting(short_folder: Path) -> None:
    """A misspelt setting ends the process with 2, naming it."""
    environment = _build_environment(short_folder) | {"RINGPLAN_PLANNER_SOKCET": "/tmp/x"}
    ended = subprocess.run(MODULE_COMMAND, check=False, env=environment, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 2
    assert "RINGPLAN_PLANNER_SOKCET" in ended.stderr
