"""The request that `ringplan generate` sends."""

import pytest

from ringplan.inference.v1 import inference_pb2
from ringplan_cli.errors import BadSettingsError
from ringplan_cli.generate_options import GenerateOptions, build_request


def test_prompt_is_a_conversation_if_the_model_has_a_template() -> None:
    """A chat model is asked as a chat model."""
    request = build_request("Hi", GenerateOptions(system="Be brief."), has_chat_template=True)
    assert [(message.role, message.content) for message in request.messages] == [
        ("system", "Be brief."),
        ("user", "Hi"),
    ]
    assert not request.HasField("text")


@pytest.mark.parametrize(("raw", "has_chat_template"), [(True, True), (False, False), (True, False)])
def test_prompt_is_text_if_asked_for_or_without_a_template(raw: bool, has_chat_template: bool) -> None:
    """A base model, or `--raw`, continues the prompt as it is."""
    request = build_request("Hi", GenerateOptions(raw=raw), has_chat_template=has_chat_template)
    assert request.text == "Hi"
    assert not request.messages


def test_what_is_not_given_is_not_sent() -> None:
    """The engine's defaults stay the engine's."""
    request = build_request("Hi", GenerateOptions(), has_chat_template=False)
    assert request == inference_pb2.GenerateRequest(text="Hi", stopping=inference_pb2.StoppingParams(ignore_eos=False))


def test_every_option_reaches_its_field() -> None:
    """Each option stands in the request where the contract has it."""
    options = GenerateOptions(
        max_tokens=5,
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        seed=2**64 - 1,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        min_tokens=2,
        stop=["a", "b"],
        ignore_eos=True,
    )
    request = build_request("Hi", options, has_chat_template=False)
    assert request.sampling == inference_pb2.SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        seed=2**64 - 1,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
    )
    assert request.stopping == inference_pb2.StoppingParams(
        max_tokens=5, stop=["a", "b"], ignore_eos=True, min_tokens=2
    )


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ("Hi", GenerateOptions(seed=-1)),
        ("Hi", GenerateOptions(top_k=2**31)),
        ("\ud800", GenerateOptions()),
        ("Hi", GenerateOptions(stop=["\udfff"])),
    ],
)
def test_what_the_contract_cannot_carry_is_a_usage_error(prompt: str, options: GenerateOptions) -> None:
    """Numbers out of a field's range and text that is no Unicode are refused before anything is sent."""
    with pytest.raises(BadSettingsError):
        build_request(prompt, options, has_chat_template=True)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        (GenerateOptions(seed=-1), "--seed: -1"),
        (GenerateOptions(top_k=2**31), "--top-k"),
        (GenerateOptions(max_tokens=2**40), "--max-tokens"),
        (GenerateOptions(min_tokens=-(2**40)), "--min-tokens"),
    ],
)
def test_number_out_of_its_fields_range_is_told_by_its_flag(options: GenerateOptions, flag: str) -> None:
    """A person learns which of the numbers it is."""
    with pytest.raises(BadSettingsError, match=flag):
        build_request("Hi", options, has_chat_template=True)


def test_system_message_without_a_template_is_refused() -> None:
    """An option that could have no effect is an error, not silence."""
    with pytest.raises(BadSettingsError, match="--system"):
        build_request("Hi", GenerateOptions(system="x"), has_chat_template=False)
