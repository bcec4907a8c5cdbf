"""Rules of what `Generate` tells of the prompt, over a real socket, with a toy model behind it."""

from pathlib import Path

import pytest

from ringplan.inference.v1 import inference_pb2 as pb
from tests.engine_service.test_rpc import TOKENIZER, Service, run_service

ONE_TOKEN = pb.StoppingParams(max_tokens=1)
CHAT = [pb.ChatMessage(role="user", content="hü")]
RENDERED = "<|start|>user\nhü<|end|>\n<|start|>assistant\n"


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (pb.GenerateRequest(text="thé  engine 🙂"), "thé  engine 🙂"),
        (pb.GenerateRequest(messages=CHAT), RENDERED),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=TOKENIZER.encode("the page"))), "the page"),
    ],
)
def test_echo_tells_the_prompt_once_and_first(tmp_path: Path, asked: pb.GenerateRequest, text: str) -> None:
    """Text as it was given, a conversation as it was rendered, tokens as they read; the tokens too; then the answer."""

    async def test(service: Service) -> None:
        asked.echo = True
        asked.stopping.max_tokens = 3
        first, *others = await service.generate(asked)
        assert first.WhichOneof("event") == "prompt"
        assert first.prompt == pb.GeneratePrompt(text=text, token_ids=TOKENIZER.encode(text))
        assert {response.WhichOneof("event") for response in others} == {"delta", "final"}

    run_service(tmp_path, test)


def test_prompt_is_told_only_if_asked_for(tmp_path: Path) -> None:
    """Neither text nor tokens come by themselves; prompt log-probabilities bring the tokens without the text."""

    async def test(service: Service) -> None:
        responses = await service.generate(pb.GenerateRequest(text="the page", stopping=ONE_TOKEN))
        assert not any(response.HasField("prompt") for response in responses)
        asked = pb.GenerateRequest(text="the page", stopping=ONE_TOKEN, prompt_logprobs=0)
        first = (await service.generate(asked))[0]
        # The toy model has no log-probabilities to tell.
        assert first.prompt == pb.GeneratePrompt(token_ids=TOKENIZER.encode("the page"))

    run_service(tmp_path, test)
