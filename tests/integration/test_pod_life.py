"""The pod of deploy/kubernetes as real processes: how it starts, outlives either container's end, and ends."""

import socket
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from planner_service.health import check
from ringplan.inference.v1 import inference_pb2 as pb
from ringplan.inference.v1 import inference_pb2_grpc
from ringplan.planner.v1 import planner_pb2, planner_pb2_grpc
from tests.deploy.manifests import find_pod_spec, render
from tests.deploy.pod import Pod
from tests.engine_process import read_token_ids
from tests.engine_service.tiny_models import save_tiny_checkpoint

# An engine imports torch and transformers first, which takes long on a busy machine.
pytestmark = pytest.mark.timeout(240)

MAX_RUNNING_REQUESTS = 4
NUM_PAGES = 301
# As long as the tiny model can.
LONG = pb.GenerateRequest(text="once", stopping=pb.StoppingParams(max_tokens=480, ignore_eos=True))
# Half of them wait for the others.
NUM_REQUESTS = 2 * MAX_RUNNING_REQUESTS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    return save_tiny_checkpoint("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pod(short_module_folder: Path, model: Path) -> Iterator[Pod]:
    """A pod whose model is the tiny one; ports and sizes suit this machine."""
    documents = render("overlays/cpu")
    pod_spec = find_pod_spec(documents)
    # What it would copy is another model.
    pod_spec["initContainers"] = [spec for spec in pod_spec["initContainers"] if spec["name"] != "model"]
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        port, metrics_port = (free.getsockname()[1] for free in (first, second))
    settings = {
        "RINGPLAN_PLANNER_METRICS_HOST": "127.0.0.1",
        "RINGPLAN_PLANNER_METRICS_PORT": "0",
        "RINGPLAN_ENGINE_MODEL": "/model",
        "RINGPLAN_ENGINE_LISTEN": f"127.0.0.1:{port}",
        "RINGPLAN_ENGINE_METRICS_HOST": "127.0.0.1",
        "RINGPLAN_ENGINE_METRICS_PORT": str(metrics_port),
        "RINGPLAN_ENGINE_MAX_RUNNING_REQUESTS": str(MAX_RUNNING_REQUESTS),
        "RINGPLAN_ENGINE_NUM_PAGES": str(NUM_PAGES),
        "RINGPLAN_ENGINE_NUM_THREADS": "1",
    }
    with closing(
        Pod(documents, pod_spec, short_module_folder, volumes={"model": model}, port=port, settings=settings)
    ) as pod:
        pod.start()
        yield pod


@pytest.fixture(scope="module")
def undisturbed(pod: Pod) -> list[int]:
    """The tokens of the long request."""
    return generate(pod)


def generate(pod: Pod, request: pb.GenerateRequest = LONG) -> list[int]:
    """Returns the tokens of an answer; fails unless it came to its end."""
    with grpc.insecure_channel(pod.target, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        responses = list(stub.Generate(request, timeout=120.0))
    assert responses[-1].final.finish_reason == pb.FINISH_REASON_LENGTH
    return read_token_ids(responses)


def list_sessions(pod: Pod) -> list[planner_pb2.SessionSummary]:
    """Asks the planner for its sessions."""
    target = f"unix:{pod.volume('shared')}/planner.sock"
    with grpc.insecure_channel(target, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        stub = planner_pb2_grpc.PlannerServiceStub(channel)
        return list(stub.ListSessions(planner_pb2.ListSessionsRequest(), timeout=10.0).sessions)


def wait_for_streams(pod: Pod, num_streams: int) -> None:
    """Returns once so many sequences hold pages, which is when their requests run."""
    for _ in range(2_000):
        if sum(session.num_streams for session in list_sessions(pod)) == num_streams:
            return
        time.sleep(0.01)
    raise AssertionError(f"never {num_streams} streams: {list_sessions(pod)}")


def count_requests(pod: Pod) -> int:
    """Returns how many requests the engine has taken in: those that ended, run and wait."""
    port = pod.containers["engine"].environment["RINGPLAN_ENGINE_METRICS_PORT"]
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    names = {"ringplan_requests_finished_total", "ringplan_requests_running", "ringplan_requests_waiting"}
    return int(sum(sample.value for family in families for sample in family.samples if sample.name in names))


def wait_for_requests(pod: Pod, num_requests: int) -> None:
    """Returns once the engine has taken in so many; seen twice, since one that ends is counted twice for a moment."""
    num_seen = 0
    for _ in range(1_000):
        num_seen = num_seen + 1 if count_requests(pod) >= num_requests else 0
        if num_seen == 2:
            return
        time.sleep(0.02)
    raise AssertionError(f"never {num_requests} requests")


def read_starts(pod: Pod) -> dict[str, int]:
    """Returns how often each container was started."""
    return {name: container.num_starts for name, container in pod.containers.items()}


def test_pod_starts_its_planner_before_its_engine_and_is_ready(pod: Pod, undisturbed: list[int]) -> None:
    """All probes of both containers say so, the engine has its session under the pod's name, and it answers."""
    assert list(pod.containers) == ["planner", "engine"]
    assert read_starts(pod) == {"planner": 1, "engine": 1}
    assert all(pod.probe("planner", kind) for kind in ("startupProbe", "livenessProbe"))
    assert all(pod.probe("engine", kind) for kind in ("startupProbe", "livenessProbe", "readinessProbe"))
    (session,) = list_sessions(pod)
    assert session.engine_name == "ringplan-0"
    assert len(undisturbed) == 480


def test_planner_that_is_killed_costs_readiness_but_neither_the_engine_nor_a_token(
    pod: Pod, undisturbed: list[int]
) -> None:
    """The engine is alive all the while, not ready until the planner is back, and the answers are the same."""
    before = read_starts(pod)
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = [pool.submit(generate, pod) for _ in range(NUM_REQUESTS)]
        wait_for_streams(pod, MAX_RUNNING_REQUESTS)
        pod.is_restarting = False
        pod.kill("planner")
        pod.wait_until_ready(is_ready=False)
        assert pod.probe("engine", "livenessProbe")
        assert not pod.probe("planner", "livenessProbe")
        assert not all(answer.done() for answer in answers)
        pod.is_restarting = True
        pod.wait_until_ready(is_ready=True)
        assert pod.probe("planner", "livenessProbe")
        assert [answer.result() for answer in answers] == [undisturbed] * NUM_REQUESTS
    assert read_starts(pod) == {"planner": before["planner"] + 1, "engine": before["engine"]}
    assert pod.containers["planner"].statuses[-1] == -9


def test_engine_that_is_killed_leaves_nothing_with_the_planner(pod: Pod) -> None:
    """Its session, with all pages and the shared memory, is gone at once; a new engine finds every page free."""
    before = read_starts(pod)
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = [pool.submit(generate, pod) for _ in range(NUM_REQUESTS)]
        wait_for_streams(pod, MAX_RUNNING_REQUESTS)
        pod.is_restarting = False
        pod.kill("engine")
        errors = [answer.exception() for answer in answers]
        assert any(isinstance(error, grpc.RpcError) for error in errors)
        for _ in range(1_000):
            if not list_sessions(pod):
                break
            time.sleep(0.01)
        assert list_sessions(pod) == []
        assert list((pod.volume("shared") / "ring").iterdir()) == []
        assert not pod.is_ready()
        pod.is_restarting = True
    pod.wait_until_ready(is_ready=True)
    (session,) = list_sessions(pod)
    assert session.num_free_pages == NUM_PAGES - 1
    assert read_starts(pod) == {"planner": before["planner"], "engine": before["engine"] + 1}


def test_pod_that_is_deleted_under_load_loses_no_request(pod: Pod, undisturbed: list[int]) -> None:
    """Running and waiting requests get every token, as does one that comes during preStop; the planner ends last."""
    num_before = count_requests(pod)
    with ThreadPoolExecutor(NUM_REQUESTS + 2) as pool:
        answers = [pool.submit(generate, pod) for _ in range(NUM_REQUESTS)]
        wait_for_streams(pod, MAX_RUNNING_REQUESTS)
        late: list[Future[list[int]]] = []

        def send_one_more() -> None:
            late.append(pool.submit(generate, pod))
            wait_for_requests(pod, num_before + NUM_REQUESTS + 1)

        stopped = pool.submit(pod.stop, send_one_more)
        pod.wait_until_ready(is_ready=False)
        assert check(pod.target, 5.0, "liveness")
        with pytest.raises(grpc.RpcError) as refused:
            generate(pod)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(refused.value.trailing_metadata())["ringplan-reason"] == "SHUTTING_DOWN"
        assert [answer.result() for answer in answers] == [undisturbed] * NUM_REQUESTS
        assert late[0].result() == undisturbed
        stopped.result()
    assert pod.ended == ["engine", "planner"]
    assert pod.killed == []
    assert [pod.containers[name].statuses[-1] for name in pod.ended] == [0, 0]
    assert [path.name for path in pod.volume("shared").iterdir()] == ["ring"]
    assert list((pod.volume("shared") / "ring").iterdir()) == []
