"""SmolLM2 served by two real processes: real questions, answered with the tokens of transformers' own generate."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine_service.model_loading import DEFAULT_MODEL, load_model
from ringplan.inference.v1 import inference_pb2 as pb
from tests.engine_process import read_token_ids, run_engine
from tests.planner_process import PlannerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Question and tokens to generate.
QUESTIONS = (
    ("What is the capital of France?", 12),
    ("Write one sentence about the sea.", 16),
    ("Count from one to ten.", 20),
    ("Hi!", 5),
    ("Why is the sky blue? Explain it to a child.", 16),
    ("Translate 'good morning' into French.", 8),
    ("Name three colours.", 10),
    ("What is 2 + 2?", 8),
)


def test_concurrent_questions_get_the_tokens_of_transformers(own_planner: PlannerProcess, short_folder: Path) -> None:
    """Eight callers at once on the packaged model: every token is that of `generate`, and France's capital is Paris."""
    requests = [
        pb.GenerateRequest(
            messages=[pb.ChatMessage(role="user", content=question)], stopping=pb.StoppingParams(max_tokens=num_tokens)
        )
        for question, num_tokens in QUESTIONS
    ]
    with run_engine(
        short_folder,
        model=DEFAULT_MODEL,
        planner=own_planner.target,
        num_pages=200,
        max_step_tokens=48,
        model_cache=False,
    ) as engine:
        with ThreadPoolExecutor(len(requests)) as pool:
            answers = list(pool.map(lambda request: engine.generate(request, timeout_seconds=120), requests))
        engine.terminate()
        assert engine.wait() == 0
    loaded = load_model()
    loaded.model.set_attn_implementation("sdpa")
    for (question, num_tokens), responses in zip(QUESTIONS, answers, strict=True):
        prompt = loaded.tokenizer.backend.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        output = loaded.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
            max_new_tokens=num_tokens,
            do_sample=False,
        )
        assert read_token_ids(responses) == output[0, len(prompt) :].tolist()
        assert responses[-1].final.usage.prompt_tokens == len(prompt)
    assert "Paris" in "".join(response.delta.text for response in answers[0])


# Question, what the answer is guided away from, scale.
GUIDED = (
    ("What is the capital of France?", "You know nothing about cities.", 1.5),
    ("Name three colours.", "You answer in French.", 2.0),
    ("Why is the sky blue?", "You are a pirate.", 1.3),
)
NUM_GUIDED_TOKENS = 14


def test_guided_questions_get_the_tokens_of_transformers(own_planner: PlannerProcess, short_folder: Path) -> None:
    """Guided, plain and repeated questions at once, contexts combined: every token is that of `generate`."""

    def build_messages(system: str, question: str) -> list[dict[str, str]]:
        return [{"role": "system", "content": system}, {"role": "user", "content": question}]

    system = "You are a helpful assistant."
    requests = [
        pb.GenerateRequest(
            messages=[pb.ChatMessage(**message) for message in build_messages(system, question)],
            guidance=[
                pb.GuidanceContext(
                    messages=[pb.ChatMessage(**message) for message in build_messages(negative, question)], scale=scale
                )
            ],
            stopping=pb.StoppingParams(max_tokens=NUM_GUIDED_TOKENS),
        )
        for question, negative, scale in GUIDED
    ]
    plain = pb.GenerateRequest(text="The sea is", n=3, stopping=pb.StoppingParams(max_tokens=NUM_GUIDED_TOKENS))
    with run_engine(
        short_folder,
        model=DEFAULT_MODEL,
        planner=own_planner.target,
        num_pages=200,
        max_step_tokens=48,
        guidance_plan="combined",
    ) as engine:
        with ThreadPoolExecutor(len(requests) + 1) as pool:
            *answers, samples = pool.map(
                lambda request: engine.generate(request, timeout_seconds=120), [*requests, plain]
            )
        engine.terminate()
        assert engine.wait() == 0
    loaded = load_model()
    loaded.model.set_attn_implementation("sdpa")

    def encode(messages: list[dict[str, str]]) -> torch.Tensor:
        return torch.tensor(
            [loaded.tokenizer.backend.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)]
        )

    for (question, negative, scale), responses in zip(GUIDED, answers, strict=True):
        prompt, context = encode(build_messages(system, question)), encode(build_messages(negative, question))
        output = loaded.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            guidance_scale=scale,
            negative_prompt_ids=context,
            negative_prompt_attention_mask=torch.ones_like(context),
            max_new_tokens=NUM_GUIDED_TOKENS,
            do_sample=False,
        )
        assert read_token_ids(responses) == output[0, prompt.shape[1] :].tolist()
    first, *others = (
        [token for response in samples if response.sample == number for token in response.delta.token_ids]
        for number in range(3)
    )
    assert len(first) == NUM_GUIDED_TOKENS
    assert others == [first, first], "greedy samples are all the same"
