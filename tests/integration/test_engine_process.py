"""A real engine process on a real planner process, called over gRPC as its users do."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import torch
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM, AutoTokenizer

from ringplan.inference.v1 import inference_pb2 as pb
from ringplan.inference.v1 import inference_pb2_grpc
from tests.engine_process import EngineProcess, read_token_ids, run_engine
from tests.engine_service.tiny_models import CHAT_TEMPLATE, VOCAB_SIZE, save_tiny_checkpoint
from tests.planner_process import PlannerProcess, run_planner

# An engine imports torch and transformers first, which takes long on a busy machine.
pytestmark = pytest.mark.timeout(180)

SERVICE = "ringplan.inference.v1.InferenceService"
NUM_PAGES = 301
MAX_RUNNING_REQUESTS = 4
MAX_QUEUED_REQUESTS = 4
# Longer than any test waits: a request that is still there when the test looks.
LONG = pb.StoppingParams(max_tokens=500, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    return save_tiny_checkpoint("llama", tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture(scope="module")
def planner(short_module_folder: Path) -> Iterator[PlannerProcess]:
    """The planner of the engine below, and of nobody else."""
    with run_planner(short_module_folder, cache_mode="verify") as planner:
        yield planner


@pytest.fixture(scope="module")
def engine(short_module_folder: Path, planner: PlannerProcess, folder: Path) -> Iterator[EngineProcess]:
    """An engine that all tests here share."""
    with run_engine(
        short_module_folder,
        model=folder,
        planner=planner.target,
        page_size=4,
        num_pages=NUM_PAGES,
        max_running_requests=MAX_RUNNING_REQUESTS,
        max_queued_requests=MAX_QUEUED_REQUESTS,
        max_step_tokens=32,
    ) as engine:
        yield engine


def generate_reference(folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """What transformers generates greedily."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


def wait_until_idle(planner: PlannerProcess) -> None:
    """Returns once every page of the engine's session is free."""
    for _ in range(1_000):
        (session,) = planner.list_sessions()
        if session.num_free_pages == NUM_PAGES - 1:
            assert (session.num_streams, session.num_steps_in_flight) == (0, 0)
            return
        time.sleep(0.02)
    raise AssertionError(f"pages are missing: {session}")


def read_sample(engine: EngineProcess, name: str, **labels: str) -> float:
    """Returns a sample of the engine's metrics page."""
    for family in text_string_to_metric_families(engine.read_metrics()):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    raise AssertionError(f"{name} {labels} is missing")


def test_concurrent_calls_get_the_tokens_of_transformers(engine: EngineProcess, folder: Path) -> None:
    """Eight callers at once, prompts and answers of different lengths: every token is transformers'."""
    generator = torch.Generator().manual_seed(5)
    lengths = ((3, 20), (30, 5), (1, 12), (12, 33), (50, 2), (7, 9), (22, 17), (4, 26))
    prompts = [torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist() for length, _ in lengths]
    requests = [
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), stopping=pb.StoppingParams(max_tokens=num_tokens))
        for prompt, (_, num_tokens) in zip(prompts, lengths, strict=True)
    ]
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(engine.generate, requests))
    for prompt, (_, num_tokens), responses in zip(prompts, lengths, answers, strict=True):
        assert read_token_ids(responses) == generate_reference(folder, prompt, num_tokens)
        usage = responses[-1].final.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(read_token_ids(responses)))


def test_conversation_is_rendered_with_the_models_template(engine: EngineProcess, folder: Path) -> None:
    """Messages become the tokens that transformers' template gives, and the text is the tokens' text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "say something"}], add_generation_prompt=True, return_dict=False
    )
    messages = [pb.ChatMessage(role="user", content="say something")]
    responses = engine.generate(pb.GenerateRequest(messages=messages, stopping=pb.StoppingParams(max_tokens=24)))
    token_ids = read_token_ids(responses)
    assert token_ids == generate_reference(folder, prompt, 24)
    text = "".join(response.delta.text for response in responses)
    assert text == tokenizer.decode(token_ids, skip_special_tokens=True)


def test_seeded_sampling_does_not_depend_on_the_batch(engine: EngineProcess) -> None:
    """The same seed gives the same tokens alone and among others; another seed gives others."""

    def ask(seed: int) -> list[int]:
        sampling = pb.SamplingParams(temperature=2.0, seed=seed)
        stopping = pb.StoppingParams(max_tokens=20, ignore_eos=True)
        return read_token_ids(engine.generate(pb.GenerateRequest(text="once", sampling=sampling, stopping=stopping)))

    alone = ask(7)
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(ask, [7, 8, 7, 9]))
    assert together[0] == together[2] == alone
    assert together[1] != alone


def test_stop_string_ends_an_answer_before_it(engine: EngineProcess, planner: PlannerProcess) -> None:
    """Text from within the answer, used as stop string, is where the next answer ends."""
    request = pb.GenerateRequest(text="once upon", stopping=pb.StoppingParams(max_tokens=40, ignore_eos=True))
    text = "".join(response.delta.text for response in engine.generate(request))
    stop = text[9:14]
    request.stopping.stop.append(stop)
    responses = engine.generate(request)
    assert "".join(response.delta.text for response in responses) == text[: text.index(stop)]
    assert responses[-1].final.finish_reason == pb.FINISH_REASON_STOP
    assert responses[-1].final.matched_stop == stop
    wait_until_idle(planner)


def test_dropped_call_frees_its_pages(engine: EngineProcess, planner: PlannerProcess) -> None:
    """A caller that goes away in the middle of its answer leaves nothing behind in the planner."""
    with engine.open_channel() as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(pb.GenerateRequest(text="a", stopping=LONG))
        next(iter(call))
        (session,) = planner.list_sessions()
        assert session.num_free_pages < NUM_PAGES - 1
        call.cancel()
    wait_until_idle(planner)


def test_deadline_is_honoured_and_frees_pages(engine: EngineProcess, planner: PlannerProcess) -> None:
    """An answer that takes too long ends with DEADLINE_EXCEEDED, and its request with it."""
    with pytest.raises(grpc.RpcError) as caught:
        engine.generate(pb.GenerateRequest(text="a", stopping=LONG), timeout_seconds=0.1)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until_idle(planner)


def test_more_requests_than_the_queue_holds_are_refused_at_once(engine: EngineProcess, planner: PlannerProcess) -> None:
    """RESOURCE_EXHAUSTED for the one too many, while the others wait and are answered in the end."""
    num_places = MAX_RUNNING_REQUESTS + MAX_QUEUED_REQUESTS
    with engine.open_channel() as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        calls = [stub.Generate(pb.GenerateRequest(text="a", stopping=LONG)) for _ in range(num_places + 3)]
        statuses: list[grpc.StatusCode] = []

        def finish(call: grpc.Call) -> None:
            try:
                for _ in call:
                    pass
            except grpc.RpcError as error:
                statuses.append(error.code())

        threads = [threading.Thread(target=finish, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        while len(statuses) < 3:
            time.sleep(0.01)
        assert statuses == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 3
        for call in calls:
            call.cancel()
        for thread in threads:
            thread.join()
    wait_until_idle(planner)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(text=""), "text"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=list(range(1, 380)) * 2)), "token_ids"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(temperature=-1)), "sampling.temperature"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[VOCAB_SIZE])), "token_ids"),
        (pb.GenerateRequest(text="a", token_ids=pb.TokenIds(ids=[1])), "token_ids"),
        (pb.GenerateRequest(text="a", stopping=pb.StoppingParams(max_tokens=0)), "stopping.max_tokens"),
        (pb.GenerateRequest(text="a", stopping=pb.StoppingParams(stop=["x"] * 17)), "stopping.stop"),
    ],
)
def test_bad_input_harms_nobody_else(engine: EngineProcess, request_: pb.GenerateRequest, field: str) -> None:
    """INVALID_ARGUMENT names the field, while another request runs on to its end."""
    good = pb.GenerateRequest(text="the page", stopping=pb.StoppingParams(max_tokens=30, ignore_eos=True))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, good)
        with pytest.raises(grpc.RpcError) as caught:
            engine.generate(request_)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert dict(caught.value.trailing_metadata())["ringplan-field"] == field
        assert len(read_token_ids(running.result())) == 30


def test_text_that_is_not_utf8_is_bad_input(engine: EngineProcess) -> None:
    """A lone surrogate, which a broken client may send as bytes, is refused by its field."""
    data = pb.GenerateRequest(text="QQQ").SerializeToString().replace(b"QQQ", b"\xed\xa0\x80")
    with engine.open_channel() as channel, pytest.raises(grpc.RpcError) as caught:
        list(channel.unary_stream(f"/{SERVICE}/Generate")(data))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "text: must be valid UTF-8"


def test_model_info_tells_the_limits(engine: EngineProcess) -> None:
    """What a client needs to know before it asks."""
    with engine.open_channel() as channel:
        info = inference_pb2_grpc.InferenceServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest())
    assert info.model == "tiny-llama"
    assert info.architecture == "LlamaForCausalLM"
    assert (info.max_context_tokens, info.vocab_size, info.page_size, info.num_pages) == (512, VOCAB_SIZE, 4, NUM_PAGES)
    assert list(info.eos_token_ids) == [0]
    assert info.has_chat_template


@pytest.mark.parametrize("service", ["", SERVICE])
def test_health_is_served_for_the_server_and_by_service(engine: EngineProcess, service: str) -> None:
    """Probes may ask about either."""
    with engine.open_channel() as channel:
        response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    assert response.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_describes_the_service(engine: EngineProcess) -> None:
    """A tool such as grpcurl finds the service and its methods without the proto files."""
    with engine.open_channel() as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert SERVICE in database.get_services()
        service = DescriptorPool(database).FindServiceByName(SERVICE)
    assert {method.name for method in service.methods} == {"Generate", "GetModelInfo", "Tokenize", "Detokenize"}


def test_metrics_count_what_was_generated(engine: EngineProcess) -> None:
    """Each generated token is on the metrics page, beside the process's own figures."""
    before = read_sample(engine, "ringplan_generation_tokens_total")
    request = pb.GenerateRequest(text="a", stopping=pb.StoppingParams(max_tokens=6, ignore_eos=True))
    engine.generate(request)
    assert read_sample(engine, "ringplan_generation_tokens_total") == before + 6
    assert read_sample(engine, "ringplan_requests_finished_total", reason="length") > 0
    assert read_sample(engine, "ringplan_planner_connected") == 1
    assert read_sample(engine, "process_resident_memory_bytes") > 0
