"""What `ringplan generate` can be told about an answer, and the request that says it."""

from pydantic import BaseModel, ConfigDict, Field

from ringplan.inference.v1 import inference_pb2
from ringplan_cli.errors import BadSettingsError

SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


class GenerateOptions(BaseModel):
    """Options of one answer. None leaves the choice to the engine, which also checks the ranges."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    system: str | None = Field(None, description="A system message that goes before the prompt.")
    raw: bool = Field(False, description="Continue the prompt as it is, without the model's chat template.")
    max_tokens: int | None = Field(None, description="Tokens to generate, at most.")
    temperature: float | None = Field(None, description="0, the default, takes the likeliest token each time.")
    top_k: int | None = Field(None, description="Choose among so many of the likeliest tokens.")
    top_p: float | None = Field(None, description="Choose among the likeliest tokens that reach this probability.")
    min_p: float | None = Field(None, description="Choose among tokens this fraction as likely as the likeliest.")
    seed: int | None = Field(None, description="Makes sampling repeatable.")
    repetition_penalty: float | None = Field(None, description="Above 1: makes tokens seen before less likely.")
    presence_penalty: float | None = Field(None, description="Above 0: makes tokens of the answer less likely.")
    frequency_penalty: float | None = Field(None, description="The same, the more often the answer has them.")
    min_tokens: int | None = Field(None, description="Tokens to generate before the answer may end.")
    stop: list[str] = Field([], description="End before this text; may be given several times.")
    ignore_eos: bool = Field(False, description="Go on after the model's end-of-sequence token.")


def build_request(prompt: str, options: GenerateOptions, *, has_chat_template: bool) -> inference_pb2.GenerateRequest:
    """Builds the request for one answer.

    Args:
        prompt: what the person asks.
        options: how to answer it.
        has_chat_template: whether the model takes conversations; one without gets the prompt as it is.

    Returns:
        The request.

    Raises:
        BadSettingsError: an option does not fit the request's field, or a system message has no place to go.
    """
    request = inference_pb2.GenerateRequest()
    try:
        if has_chat_template and not options.raw:
            if options.system is not None:
                request.messages.add(role="system", content=options.system)
            request.messages.add(role="user", content=prompt)
        elif options.system is not None:
            raise BadSettingsError("--system needs a model with a chat template, and no --raw")
        else:
            request.text = prompt
        for name in SAMPLING_FIELDS:
            value = getattr(options, name)
            if value is not None:
                _set(request.sampling, name, value)
        for name in ("max_tokens", "min_tokens"):
            value = getattr(options, name)
            if value is not None:
                _set(request.stopping, name, value)
        request.stopping.stop.extend(options.stop)
        request.stopping.ignore_eos = options.ignore_eos
    except ValueError as error:
        raise BadSettingsError(str(error)) from error
    return request


def _set(message: inference_pb2.SamplingParams | inference_pb2.StoppingParams, name: str, value: float) -> None:
    try:
        setattr(message, name, value)
    except ValueError as error:
        raise BadSettingsError(f"--{name.replace('_', '-')}: {value} does not fit the field") from error
