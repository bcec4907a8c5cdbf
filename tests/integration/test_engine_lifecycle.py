"""How a real engine process starts, ends, and lives through the end of its planner."""

import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from ringplan.inference.v1 import inference_pb2 as pb
from tests.engine_process import EngineProcess, read_token_ids, run_engine
from tests.engine_service.tiny_models import save_tiny_checkpoint
from tests.planner_process import PlannerProcess

# An engine imports torch and transformers first, which takes long on a busy machine.
pytestmark = pytest.mark.timeout(180)

# Takes about two seconds on a tiny model.
LONG = pb.GenerateRequest(text="once", stopping=pb.StoppingParams(max_tokens=480, ignore_eos=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    return save_tiny_checkpoint("llama", tmp_path_factory.mktemp("model"))


def start_answer(pool: ThreadPoolExecutor, engine: EngineProcess) -> "Future[list[pb.GenerateResponse]]":
    """Starts a long answer and returns once the engine runs it."""
    answer = pool.submit(engine.generate, LONG)
    while "ringplan_requests_running 1.0" not in engine.read_metrics():
        assert not answer.done(), answer.result()
        time.sleep(0.01)
    return answer


def test_sigterm_lets_running_requests_finish(own_planner: PlannerProcess, short_folder: Path, folder: Path) -> None:
    """Asked to end, an engine turns not-ready, refuses new requests, answers those it has, and exits 0."""
    with run_engine(short_folder, model=folder, planner=own_planner.target, num_pages=100) as engine:
        with ThreadPoolExecutor(1) as pool:
            answer = start_answer(pool, engine)
            engine.terminate()
            engine.wait_until_health(is_serving=False)
            with pytest.raises(grpc.RpcError) as caught:
                engine.generate(LONG)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            responses = answer.result()
        assert len(read_token_ids(responses)) == 480
        assert responses[-1].final.finish_reason == pb.FINISH_REASON_LENGTH
        assert engine.wait() == 0
    assert own_planner.list_sessions() == []


def test_second_signal_aborts_what_runs(own_planner: PlannerProcess, short_folder: Path, folder: Path) -> None:
    """Asked twice, an engine does not wait: callers are told of the abort, and it exits 0."""
    with run_engine(short_folder, model=folder, planner=own_planner.target, num_pages=100) as engine:
        with ThreadPoolExecutor(1) as pool:
            answer = start_answer(pool, engine)
            engine.terminate()
            engine.wait_until_health(is_serving=False)
            engine.terminate()
            final = answer.result()[-1].final
        assert final.finish_reason == pb.FINISH_REASON_ABORT
        assert engine.wait() == 0


def test_planner_killed_and_restarted_costs_a_pause(
    own_planner: PlannerProcess, short_folder: Path, folder: Path
) -> None:
    """The engine turns not-ready, comes back with a new planner, and the caller's tokens stay the same."""
    with run_engine(short_folder, model=folder, planner=own_planner.target, num_pages=100) as engine:
        undisturbed = read_token_ids(engine.generate(LONG))
        with ThreadPoolExecutor(1) as pool:
            answer = start_answer(pool, engine)
            own_planner.kill()
            engine.wait_until_health(is_serving=False)
            own_planner.start()
            engine.wait_until_health(is_serving=True)
            assert read_token_ids(answer.result()) == undisturbed
        assert "ringplan_planner_lost_total 1.0" in engine.read_metrics()
        engine.kill()
    for _ in range(500):
        if not own_planner.list_sessions():
            return
        time.sleep(0.02)
    raise AssertionError("the session of a killed engine is still there")


def test_planner_that_hangs_counts_as_lost(own_planner: PlannerProcess, short_folder: Path, folder: Path) -> None:
    """A planner that does not answer any more does not hang the engine; when it answers again all goes on."""
    with (
        run_engine(
            short_folder, model=folder, planner=own_planner.target, num_pages=100, plan_timeout_seconds=0.5
        ) as engine,
        ThreadPoolExecutor(1) as pool,
    ):
        answer = start_answer(pool, engine)
        own_planner.pause()
        engine.wait_until_health(is_serving=False)
        own_planner.go_on()
        engine.wait_until_health(is_serving=True)
        assert len(read_token_ids(answer.result())) == 480


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "/nowhere"}, "/nowhere"),
        ({"num_pages": 100_000_000}, "fit in memory; change num_pages"),
        ({"listen": "127.0.0.1:{port}"}, "127.0.0.1:{port}: in use"),
        ({"planner": "unix:{folder}/none.sock", "planner_connect_timeout_seconds": 0.1}, "no planner at"),
    ],
)
def test_engine_that_cannot_start_says_why_and_exits_1(
    short_folder: Path, folder: Path, settings: dict[str, object], message: str
) -> None:
    """One clear line, no traceback, exit code 1."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"port": str(taken.getsockname()[1]), "folder": str(short_folder)}
        given = {name: value.format(**names) if isinstance(value, str) else value for name, value in settings.items()}
        engine = EngineProcess(short_folder, {"model": folder, "num_pages": 10, **given})
        engine.launch()
        try:
            assert engine.wait() == 1
        finally:
            engine.kill()
    log = engine.read_log()
    assert "Traceback" not in log
    assert "CRITICAL" in log.splitlines()[-1]
    assert message.format(**names) in log.splitlines()[-1]


def test_signal_while_the_engine_waits_for_its_planner_ends_it(short_folder: Path, folder: Path) -> None:
    """An engine that is still starting can be stopped; it exits 0."""
    engine = EngineProcess(
        short_folder,
        {"model": folder, "num_pages": 10, "planner": f"unix:{short_folder}/none.sock"}
        | {"planner_connect_timeout_seconds": 60},
    )
    engine.launch()
    try:
        while "model: ready" not in engine.read_log():
            assert engine.process is not None
            assert engine.process.poll() is None, engine.read_log()
            time.sleep(0.02)
        engine.terminate()
        assert engine.wait() == 0
    finally:
        engine.kill()
