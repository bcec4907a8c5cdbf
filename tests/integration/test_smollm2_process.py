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
        short_folder, model=DEFAULT_MODEL, planner=own_planner.target, num_pages=200, max_step_tokens=48
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
