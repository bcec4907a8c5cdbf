"""A real planner process and an engine on a tiny model: what callers may ask of an answer, against transformers."""

from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_service.engine import Engine
from engine_service.request import (
    GeneratedDelta,
    GenerationEnded,
    GenerationEvent,
    GenerationSpec,
    GuidanceContext,
    PromptComputed,
    StoppingParams,
)
from engine_service.sampling_params import SampledToken, SamplingParams
from engine_service.tokenizer import Tokenizer
from tests.engine_runs import run_engine
from tests.engine_service.tiny_models import VOCAB_SIZE, build_tokenizer, save_tiny_checkpoint
from tests.planner_process import PlannerProcess

pytestmark = pytest.mark.usefixtures("nan_in_new_memory")


class Case(NamedTuple):
    """What one request asks for."""

    bias: dict[int, float]
    min_tokens: int
    penalty: float


PROMPT_LENGTHS = (1, 2, 9, 40, 75, 17)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint."""
    return save_tiny_checkpoint("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    """The same model as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()  # type: ignore[no-untyped-call]  # It has no annotations.


def build_prompts(seed: int = 3) -> list[tuple[int, ...]]:
    """Random prompts."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist()) for n in PROMPT_LENGTHS]


def answer_all(engine: Engine, specs: Sequence[GenerationSpec]) -> list[list[GenerationEvent]]:
    """Runs requests together; returns the events of each."""
    gathered: list[list[GenerationEvent]] = [[] for _ in specs]
    ended = [Event() for _ in specs]

    def take(number: int, event: GenerationEvent) -> None:
        gathered[number].append(event)
        if not isinstance(event, GeneratedDelta | PromptComputed):
            ended[number].set()

    for number, spec in enumerate(specs):
        engine.submit(spec, lambda event, number=number: take(number, event))  # type: ignore[misc]  # mypy cannot infer a default.
    assert all(one.wait(50) for one in ended)
    return gathered


def read_tokens(events: Sequence[GenerationEvent]) -> list[SampledToken]:
    """Returns the tokens of an answer."""
    return [token for event in events if isinstance(event, GeneratedDelta) for token in event.tokens]


def compute_logprobs(reference: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Returns what one dense forward says of what follows each token, float32 [num_tokens, vocab_size]."""
    with torch.inference_mode():
        return torch.log_softmax(reference(torch.tensor([list(tokens)])).logits[0], dim=-1)


def check_logprobs(found: Sequence[SampledToken], expected: torch.Tensor, num_top: int) -> None:
    """Compares log-probabilities with those of a dense forward, row by row."""
    assert len(found) == len(expected)
    for token, row in zip(found, expected, strict=True):
        assert token.logprob == pytest.approx(row[token.token_id].item(), abs=2e-4)
        values = [top.logprob for top in token.top_logprobs]
        assert values == pytest.approx(row.topk(num_top).values.tolist(), abs=2e-4)
        assert [row[top.token_id].item() for top in token.top_logprobs] == pytest.approx(values, abs=2e-4)


@pytest.mark.parametrize(
    ("max_step_tokens", "num_pages"),
    [pytest.param(512, 101, id="whole"), pytest.param(7, 101, id="chunks"), pytest.param(16, 24, id="preempted")],
)
def test_logprobs_of_prompt_and_answer_are_those_of_a_dense_forward(
    planner_process: PlannerProcess, folder: Path, reference: Any, max_step_tokens: int, num_pages: int
) -> None:
    """However the prompt is cut into chunks, and where it is computed twice, each of its tokens is told of once."""
    num_top = 4
    specs = [
        GenerationSpec(
            str(number),
            prompt,
            stopping=StoppingParams(max_tokens=12, ignore_eos=True),
            num_logprobs=num_top,
            num_prompt_logprobs=num_top if number != 2 else None,
        )
        for number, prompt in enumerate(build_prompts())
    ]
    with run_engine(
        planner_process,
        folder,
        f"logprobs-{max_step_tokens}-{num_pages}",
        page_size=4,
        num_pages=num_pages,
        max_running_requests=6,
        max_step_tokens=max_step_tokens,
    ) as running:
        answers = answer_all(running.engine, specs)
        preemptions = running.registry.get_sample_value("ringplan_preemptions_total")
    assert bool(preemptions) == (num_pages == 24)
    for spec, events in zip(specs, answers, strict=True):
        prompt, tokens = spec.prompt_token_ids, read_tokens(events)
        expected = compute_logprobs(reference, [*prompt, *[token.token_id for token in tokens]])
        check_logprobs(tokens, expected[len(prompt) - 1 : -1], num_top)
        told = [event for event in events if isinstance(event, PromptComputed)]
        if spec.num_prompt_logprobs is None:
            assert not told
            continue
        assert told == [events[0]]
        assert [token.token_id for token in told[0].logprobs] == list(prompt[1:])
        check_logprobs(told[0].logprobs, expected[: len(prompt) - 1], num_top)


def test_biases_penalty_and_fewest_tokens_give_the_tokens_of_transformers(
    planner_process: PlannerProcess, folder: Path, reference: Any
) -> None:
    """Together, in one batch: `sequence_bias`, `repetition_penalty` and `min_new_tokens` of its `generate`."""
    eos = 0
    # An end that nearly always comes at once, unless it must not.
    cases = [
        Case({eos: 100.0}, min_tokens=0, penalty=1.0),
        Case({eos: 100.0}, min_tokens=5, penalty=1.0),
        Case({eos: 100.0, 7: 50.0}, min_tokens=3, penalty=1.0),
        Case({7: 8.0, 9: 8.0, 11: -100.0}, min_tokens=0, penalty=3.0),
        Case({}, min_tokens=12, penalty=1.3),
        Case({100: 6.5, 200: 6.0, 300: 5.5}, min_tokens=2, penalty=1.1),
    ]
    specs = [
        GenerationSpec(
            str(number),
            prompt,
            sampling=SamplingParams(repetition_penalty=case.penalty, logit_bias=tuple(case.bias.items())),
            stopping=StoppingParams(max_tokens=12, min_tokens=case.min_tokens),
        )
        for number, (prompt, case) in enumerate(zip(build_prompts(), cases, strict=True))
    ]
    with run_engine(planner_process, folder, "biases", num_pages=101) as running:
        answers = answer_all(running.engine, specs)
    for spec, case, events in zip(specs, cases, answers, strict=True):
        prompt = torch.tensor([spec.prompt_token_ids])
        expected = reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
            sequence_bias={(token_id,): bias for token_id, bias in case.bias.items()} or None,
            min_new_tokens=case.min_tokens,
            repetition_penalty=case.penalty,
        )[0, prompt.shape[1] :].tolist()
        assert [token.token_id for token in read_tokens(events)] == expected
    lengths = [len(read_tokens(events)) for events in answers[:3]]
    assert lengths == [1, 6, 4]


def test_deltas_of_arbitrary_bytes_add_up_and_stop_strings_are_found_across_tokens(
    planner_process: PlannerProcess, folder: Path
) -> None:
    """Random weights choose bytes that are no text: deltas cut no character, and any piece of the text stops it."""
    tokenizer = Tokenizer(build_tokenizer(), vocab_size=VOCAB_SIZE)
    sampling = [SamplingParams(temperature=2.0, seed=seed) for seed in range(len(PROMPT_LENGTHS))]
    plain = [
        GenerationSpec(str(number), prompt, sampling, StoppingParams(max_tokens=40, ignore_eos=True))
        for number, (prompt, sampling) in enumerate(zip(build_prompts(), sampling, strict=True))
    ]
    with run_engine(planner_process, folder, "deltas", num_pages=101) as running:
        texts = []
        for spec, events in zip(plain, answer_all(running.engine, plain), strict=True):
            text = "".join(event.text for event in events if isinstance(event, GeneratedDelta))
            token_ids = [token.token_id for token in read_tokens(events)]
            prompt = tokenizer.decode(spec.prompt_token_ids, skip_special_tokens=True)
            whole = tokenizer.decode([*spec.prompt_token_ids, *token_ids], skip_special_tokens=True)
            assert whole.endswith(text[1:])
            assert abs(len(prompt) + len(text) - len(whole)) <= 3, "at most a character cut by the prompt's end differs"
            texts.append(text)
        stopped = [
            GenerationSpec(spec.request_id, spec.prompt_token_ids, spec.sampling, StoppingParams(40, (stop,), (), True))
            for spec, text in zip(plain, texts, strict=True)
            for stop in (text[7:16], text[20:22], text[11:40])
        ]
        for number, events in enumerate(answer_all(running.engine, stopped)):
            text, (stop,) = texts[number // 3], stopped[number].stopping.stop
            ended = events[-1]
            assert isinstance(ended, GenerationEnded)
            assert ended.matched_stop == stop
            assert "".join(e.text for e in events if isinstance(e, GeneratedDelta)) == text[: text.index(stop)]


def test_samples_share_one_prompt_that_is_told_once_and_counted_as_cached(
    planner_process: PlannerProcess, folder: Path, reference: Any
) -> None:
    """The first sample computes the prompt and tells of it; the others got all but its last token by a fork."""
    prompt = build_prompts()[3]
    spec = GenerationSpec(
        "samples",
        prompt,
        sampling=SamplingParams(temperature=1.0, seed=4),
        stopping=StoppingParams(max_tokens=5, ignore_eos=True),
        num_prompt_logprobs=3,
        num_samples=3,
    )
    gathered: list[list[GenerationEvent]] = [[], [], []]
    ended = [Event() for _ in gathered]

    def take(sample: int, event: GenerationEvent) -> None:
        gathered[sample].append(event)
        if isinstance(event, GenerationEnded):
            ended[sample].set()

    with run_engine(
        planner_process, folder, "cached-tokens", page_size=4, num_pages=101, max_step_tokens=32
    ) as running:
        running.engine.submit_samples(spec, take)
        assert all(one.wait(50) for one in ended)
    (told,) = [event for events in gathered for event in events if isinstance(event, PromptComputed)]
    assert gathered[0][0] is told
    assert [token.token_id for token in told.logprobs] == list(prompt[1:])
    check_logprobs(told.logprobs, compute_logprobs(reference, prompt)[:-1], 3)
    ends = [events[-1] for events in gathered]
    assert [end.num_cached_tokens for end in ends if isinstance(end, GenerationEnded)] == [
        0,
        len(prompt) - 1,
        len(prompt) - 1,
    ]


def test_prompt_of_a_guided_request_is_told_of_as_the_model_sees_it(
    planner_process: PlannerProcess, folder: Path, reference: Any
) -> None:
    """The further context does not change what the model says of the prompt, planned by itself or together with it."""
    prompts = build_prompts()
    spec = GenerationSpec(
        "guided",
        prompts[4],
        stopping=StoppingParams(max_tokens=3, ignore_eos=True),
        num_prompt_logprobs=2,
        guidance=(GuidanceContext((*prompts[4][:30], *prompts[5]), 2.0),),
    )
    for plan in ("separate", "combined"):
        with run_engine(
            planner_process,
            folder,
            f"guided-{plan}",
            page_size=4,
            num_pages=101,
            max_step_tokens=32,
            guidance_plan=plan,
        ) as running:
            (events,) = answer_all(running.engine, [spec])
        told = events[0]
        assert isinstance(told, PromptComputed)
        assert [token.token_id for token in told.logprobs] == list(prompts[4][1:])
        check_logprobs(told.logprobs, compute_logprobs(reference, prompts[4])[:-1], 2)
