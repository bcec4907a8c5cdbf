"""Real engine processes on a GGUF file: the second start reads what the first one kept, and the log is JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from ringplan.inference.v1 import inference_pb2 as pb
from tests.engine_process import read_token_ids, run_engine
from tests.engine_service.tiny_gguf import save_tiny_gguf
from tests.planner_process import PlannerProcess

pytestmark = pytest.mark.timeout(240)


def test_second_start_reads_what_the_first_one_kept_and_answers_the_same(
    own_planner: PlannerProcess, short_folder: Path, tmp_path: Path
) -> None:
    """With the same tokens as an engine that keeps nothing; each line of the log is an object, requests by their id."""
    path = save_tiny_gguf(tmp_path / "tiny.gguf")
    kept = tmp_path / "kept"
    request = pb.GenerateRequest(
        request_id="order-66",
        text="the page of the engine",
        stopping=pb.StoppingParams(max_tokens=30, min_tokens=30, ignore_eos=True),
        echo=True,
    )
    answers: list[list[pb.GenerateResponse]] = []
    stages: list[list[str]] = []
    records: list[dict[str, Any]] = []
    for is_kept in (True, True, False):
        with run_engine(
            short_folder,
            model=path,
            planner=own_planner.target,
            num_pages=20,
            model_cache=is_kept,
            model_cache_dir=kept,
            log_json=True,
        ) as engine:
            answers.append(engine.generate(request))
            engine.terminate()
            assert engine.wait() == 0
        lines = engine.read_log().splitlines()[len(records) :]
        records += [json.loads(line) for line in lines]
        stages.append([json.loads(line)["message"].removeprefix("model: ") for line in lines if "model: " in line])
        assert len(list(kept.iterdir())) == 1
    assert [read_token_ids(answer) for answer in answers] == [read_token_ids(answers[0])] * 3
    assert len(read_token_ids(answers[0])) == 30
    assert answers[0][0].prompt.text == "the page of the engine"
    assert ["keeping the converted model" in stage for stage in stages] == [True, False, False]
    ended = [record for record in records if record.get("request_id") == "order-66"]
    assert [(one["finish_reason"], one["completion_tokens"], one["level"]) for one in ended] == [
        ("length", 30, "info")
    ] * 3
