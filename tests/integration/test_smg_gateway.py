"""The real SMG gateway in front of two real engines: OpenAI's API gives the tokens of our own."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ringplan.inference.v1 import inference_pb2 as pb
from tests.engine_process import START_TIMEOUT_SECONDS, EngineProcess, read_token_ids
from tests.engine_service.tiny_models import VOCAB_SIZE, build_tiny_config, save_tiny_model
from tests.planner_process import PlannerProcess, run_planner
from tests.smg_process import SmgProcess, find_free_port, is_smg_installed, run_smg

# Two engines import torch and transformers first, which takes long on a busy machine.
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(not is_smg_installed(), reason="the packages smg and smg-grpc-proto are not installed"),
]

MODEL = "tiny-words"
NUM_PAGES = 201
MAX_CONTEXT_TOKENS = 4096
SPECIAL_WORDS = ("<|end|>", "<|start|>", "[unknown]", "system", "user", "assistant")
TEMPLATE = (
    "{% for message in messages %}<|start|> {{ message['role'] }} {{ message['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|start|> assistant{% endif %}"
)
QUESTION = "w7 w300 w12 w12 w45"
CHAT_PATH = "/v1/chat/completions"
# What every answer that is compared has in common: greedy, 20 tokens, special words as they are.
GREEDY: dict[str, Any] = {
    "model": MODEL,
    "temperature": 0,
    "max_tokens": 20,
    "ignore_eos": True,
    "skip_special_tokens": False,
}
CHAT: dict[str, Any] = {**GREEDY, "messages": [{"role": "user", "content": QUESTION}]}


@dataclass
class TcpEngine(EngineProcess):
    """An engine on a port, which the gateway needs."""

    port: int = field(default_factory=find_free_port)

    @property
    def target(self) -> str:
        """Its address."""
        return f"127.0.0.1:{self.port}"

    def count_finished(self, reason: str) -> float:
        """Returns how many requests of it have ended so."""
        for family in text_string_to_metric_families(self.read_metrics()):
            for sample in family.samples:
                if sample.name == "ringplan_requests_finished_total" and sample.labels["reason"] == reason:
                    return sample.value
        raise AssertionError("the metric is missing")


def list_words() -> list[str]:
    """The vocabulary: every token is a word, so that a text says which tokens it is made of."""
    return [*SPECIAL_WORDS, *[f"w{number}" for number in range(len(SPECIAL_WORDS), VOCAB_SIZE)]]


def read_words(text: str) -> list[int]:
    """Returns the tokens of a text."""
    words = list_words()
    return [words.index(word) for word in text.split()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose tokens are words."""
    config = build_tiny_config("llama")
    config.max_position_embeddings = MAX_CONTEXT_TOKENS
    folder = save_tiny_model(config, tmp_path_factory.mktemp("model") / MODEL)
    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(list_words())}, "[unknown]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|end|>", unk_token="[unknown]")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def planner(short_module_folder: Path) -> Iterator[PlannerProcess]:
    """The planner of both engines."""
    with run_planner(short_module_folder) as planner:
        yield planner


@pytest.fixture(scope="module")
def engines(
    planner: PlannerProcess, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[TcpEngine]]:
    """Two engines with the same model."""
    settings: dict[str, object] = {
        "model": folder,
        "planner": planner.target,
        "num_pages": NUM_PAGES,
        "vllm_api": "on",
        "default_max_tokens": 8,
    }
    engines = [TcpEngine(tmp_path_factory.mktemp("engine"), settings) for _ in range(2)]
    try:
        for engine in engines:
            engine.launch()
        for engine in engines:
            engine.wait_until_health(is_serving=True, timeout_seconds=START_TIMEOUT_SECONDS)
        yield engines
    finally:
        for engine in engines:
            if engine.process is not None and engine.process.poll() is None:
                engine.kill()


@pytest.fixture(scope="module")
def gateway(engines: list[TcpEngine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmgProcess]:
    """A gateway that knows the engines' addresses and nothing of the model."""
    with run_smg(tmp_path_factory.mktemp("smg"), [engine.target for engine in engines], MODEL) as gateway:
        yield gateway


def ask_engine(engine: EngineProcess, **given: Any) -> list[pb.GenerateResponse]:
    """Returns our own API's answer to the question."""
    request = pb.GenerateRequest(stopping=pb.StoppingParams(max_tokens=20, ignore_eos=True), **given)
    if not given.get("text"):
        request.messages.add(role="user", content=QUESTION)
    return engine.generate(request)


def chat(gateway: SmgProcess, **given: Any) -> dict[str, Any]:
    """Returns the gateway's answer to the question."""
    status, answer = gateway.post(CHAT_PATH, **{**CHAT, **given})
    assert status == 200, answer
    assert isinstance(answer, dict)
    return answer


@contextmanager
def open_stub(engine: EngineProcess) -> Iterator[Any]:
    """A client of vLLM's engine API, as its package brings it."""
    from smg_grpc_proto import vllm_engine_pb2_grpc

    with engine.open_channel() as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


def test_engine_says_of_itself_what_a_gateway_asks(engines: list[TcpEngine], folder: Path) -> None:
    """The model, its limits, and one and the same tokenizer from both engines; health and reflection know the API."""
    from smg_grpc_proto import vllm_engine_pb2
    from smg_grpc_proto.generated import common_pb2

    archives = []
    for engine in engines:
        with open_stub(engine) as stub:
            model = stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest(), timeout=30)
            server = stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest(), timeout=30)
            archives.append(list(stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=30)))
        assert (model.served_model_name, model.model_path) == (MODEL, str(folder))
        assert (list(model.architectures), model.model_type) == (["LlamaForCausalLM"], "llama")
        assert (model.vocab_size, model.max_context_length, list(model.eos_token_ids)) == (
            VOCAB_SIZE,
            MAX_CONTEXT_TOKENS,
            [0],
        )
        assert (server.block_size, server.max_num_seqs, server.model_dtype) == (16, 32, "torch.float32")
    assert archives[0] == archives[1]
    with engines[0].open_channel() as channel:
        service = "vllm.grpc.engine.VllmEngine"
        assert service in ProtoReflectionDescriptorDatabase(channel).get_services()
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_prompt_log_probabilities_are_ours(engines: list[TcpEngine]) -> None:
    """For a client of the engine: token by token what our own API tells."""
    from smg_grpc_proto import vllm_engine_pb2

    (own,) = [one.prompt for one in ask_engine(engines[0], text=QUESTION, prompt_logprobs=2) if one.HasField("prompt")]
    request = vllm_engine_pb2.GenerateRequest(text=QUESTION)
    request.sampling_params.prompt_logprobs = 2
    request.sampling_params.max_tokens = 1
    with open_stub(engines[1]) as stub:
        (response,) = stub.Generate(request, timeout=60)
    told = response.complete.input_logprobs
    assert list(told.token_ids) == read_words(QUESTION)
    assert not told.token_logprobs[0].HasField("value")
    assert [one.value for one in told.token_logprobs[1:]] == pytest.approx(
        [one.chosen.logprob for one in own.logprobs], abs=1e-4
    )
    assert [list(one.token_ids) for one in told.top_logprobs[1:]] == [
        [top.token_id for top in one.top] for one in own.logprobs
    ]


def test_chat_completion_has_the_tokens_of_our_own_api(gateway: SmgProcess, engines: list[TcpEngine]) -> None:
    """Whichever engine answers: same prompt from the same chat template, same tokens, same usage."""
    own = ask_engine(engines[0])
    before = [engine.count_finished("length") for engine in engines]
    for _ in range(4):
        answer = chat(gateway)
        (choice,) = answer["choices"]
        assert read_words(choice["message"]["content"]) == read_token_ids(own)
        assert choice["finish_reason"] == "length"
        usage = own[-1].final.usage
        assert answer["usage"]["prompt_tokens"] == usage.prompt_tokens
        assert answer["usage"]["completion_tokens"] == usage.completion_tokens == 20
    after = [engine.count_finished("length") for engine in engines]
    counts = [late - early for early, late in zip(before, after, strict=True)]
    assert sum(counts) == 4
    assert min(counts) > 0, "both engines get requests"


def test_streamed_chat_completion_has_the_same_tokens(gateway: SmgProcess, engines: list[TcpEngine]) -> None:
    """One event for each token at most, the usage in the last one."""
    events = gateway.stream(CHAT_PATH, **CHAT, stream_options={"include_usage": True})
    deltas = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert len([delta for delta in deltas if delta]) > 1
    own = ask_engine(engines[1])
    assert read_words("".join(deltas)) == read_token_ids(own)
    assert events[-1]["usage"]["completion_tokens"] == 20
    assert events[-1]["usage"]["prompt_tokens"] == own[-1].final.usage.prompt_tokens


def test_text_completion_and_token_ids_are_ours(gateway: SmgProcess, engines: list[TcpEngine]) -> None:
    """The gateway's own endpoint tells token ids: the same as ours, one by one."""
    expected = read_token_ids(ask_engine(engines[0], text=QUESTION))
    params = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    status, (answer,) = gateway.post("/generate", model=MODEL, text=QUESTION, sampling_params=params)
    assert (status, answer["output_ids"]) == (200, expected)
    status, answer = gateway.post("/v1/completions", **GREEDY, prompt=QUESTION)
    assert status == 200, answer
    assert read_words(answer["choices"][0]["text"]) == expected


def test_seeded_sampling_gives_the_same_tokens_on_both_engines(gateway: SmgProcess, engines: list[TcpEngine]) -> None:
    """Temperature, top_k and seed arrive: the gateway's answers, one from each engine, are ours."""
    sampling = pb.SamplingParams(temperature=1.5, seed=77, top_k=40)
    expected = read_token_ids(ask_engine(engines[0], sampling=sampling))
    assert expected != read_token_ids(ask_engine(engines[0]))
    for _ in range(2):
        answer = chat(gateway, temperature=1.5, seed=77, top_k=40)
        assert read_words(answer["choices"][0]["message"]["content"]) == expected


def test_log_probabilities_are_ours(gateway: SmgProcess, engines: list[TcpEngine]) -> None:
    """Of the tokens and of the likeliest two at each place, for both samples."""
    own = [one for response in ask_engine(engines[0], logprobs=2) for one in response.delta.logprobs]
    answer = chat(gateway, n=2, logprobs=True, top_logprobs=2)
    words = list_words()
    assert len(answer["choices"]) == 2
    for choice in answer["choices"]:
        told = choice["logprobs"]["content"]
        assert [words.index(one["token"].strip()) for one in told] == [one.chosen.token_id for one in own]
        assert [one["logprob"] for one in told] == pytest.approx([one.chosen.logprob for one in own], abs=1e-4)
        assert [[words.index(top["token"].strip()) for top in one["top_logprobs"]] for one in told] == [
            [top.token_id for top in one.top] for one in own
        ]


def test_stop_string_ends_the_answer(gateway: SmgProcess, engines: list[TcpEngine]) -> None:
    """The engine stops there, so that no more tokens are paid for; the gateway takes the stop string off."""
    words = list_words()
    tokens = read_token_ids(ask_engine(engines[0]))
    stop = words[tokens[5]]
    first = next(place for place, token in enumerate(tokens) if stop in words[token])
    answer = chat(gateway, stop=[stop])
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert read_words(choice["message"]["content"]) == tokens[:first]
    assert answer["usage"]["completion_tokens"] == first + 1


def test_what_the_engine_does_not_do_is_refused_by_name(gateway: SmgProcess) -> None:
    """Status 400 and the field: no answer that ignores what was asked for."""
    status, answer = gateway.post(CHAT_PATH, **CHAT, response_format={"type": "json_object"})
    assert status == 400
    assert "sampling_params.json" in answer["error"]["message"]
    assert "not supported" in answer["error"]["message"]


def test_client_that_hangs_up_frees_its_pages(
    gateway: SmgProcess, engines: list[TcpEngine], planner: PlannerProcess
) -> None:
    """The gateway drops the call, and the engine its request."""
    before = sum(engine.count_finished("abort") for engine in engines)
    body = json.dumps({**CHAT, "stream": True, "max_tokens": 3_000}).encode()
    head = (
        f"POST {CHAT_PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as client:
        client.sendall(head.encode() + body)
        assert client.recv(1_000).startswith(b"HTTP/1.1 200")
    wait_until(lambda: sum(engine.count_finished("abort") for engine in engines) == before + 1)
    wait_until(lambda: all(session.num_free_pages == NUM_PAGES - 1 for session in planner.list_sessions()))


def test_engines_without_a_planner_get_no_requests_until_it_is_back(
    gateway: SmgProcess, planner: PlannerProcess
) -> None:
    """The gateway's health checks see what the engines say of themselves."""
    planner.kill()
    gateway.wait_for_workers(0, timeout_seconds=60)
    planner.start()
    gateway.wait_for_workers(2, timeout_seconds=60)
    assert chat(gateway)["choices"]


def test_killed_engine_is_routed_around(gateway: SmgProcess, engines: list[TcpEngine]) -> None:
    """No caller sees it: a request that finds it gone is sent to the other one."""
    expected = read_token_ids(ask_engine(engines[0]))
    engines[1].kill()
    for _ in range(4):
        answer = chat(gateway)
        assert read_words(answer["choices"][0]["message"]["content"]) == expected
    gateway.wait_for_workers(1, timeout_seconds=60)


def wait_until(is_so: Any, timeout_seconds: float = 60.0) -> None:
    """Returns once something is so."""
    deadline = time.monotonic() + timeout_seconds
    while not is_so():
        assert time.monotonic() < deadline, "it never was so"
        time.sleep(0.05)
