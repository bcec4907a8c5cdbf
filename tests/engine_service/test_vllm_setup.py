"""Whether vLLM's engine API is served, and what it recommends."""

import importlib.util
import json

import pytest
from transformers import GenerationConfig

from engine_service.config import VllmApi
from engine_service.errors import MissingPackageError
from engine_service.vllm_setup import PROTO_MODULE, build_default_sampling, is_vllm_api_served


@pytest.fixture(params=[True, False], ids=["installed", "missing"])
def is_installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the package with the messages is there."""
    installed: bool = request.param
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: find("json" if installed else "no_such_module") if name == PROTO_MODULE else 1 // 0,
    )
    return installed


def test_api_is_served_where_its_package_is_installed(is_installed: bool) -> None:
    """Unless it is turned off."""
    assert is_vllm_api_served(VllmApi.AUTO) is is_installed
    assert is_vllm_api_served(VllmApi.OFF) is False


def test_api_that_is_asked_for_and_cannot_be_served_is_an_error(is_installed: bool) -> None:
    """It says what to install."""
    if is_installed:
        assert is_vllm_api_served(VllmApi.ON)
        return
    with pytest.raises(
        MissingPackageError, match=r"vllm_api needs the package smg-grpc-proto; install 'ringplan\[smg\]'"
    ):
        is_vllm_api_served(VllmApi.ON)


def test_sampling_is_recommended_where_the_model_does() -> None:
    """Only what it says, and only where it samples at all; the gateway fills in what a caller leaves out."""
    recommended = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.95, top_k=20)
    assert json.loads(build_default_sampling(recommended)) == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert build_default_sampling(GenerationConfig(do_sample=False, repetition_penalty=1.2)) == ""
    assert build_default_sampling(GenerationConfig(do_sample=True)) == ""
    assert build_default_sampling(None) == ""
