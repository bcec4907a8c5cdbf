"""What `ringplan bench serve` can be told about the load: the only source of its flags and defaults."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ringplan_cli.load.lengths import SYNTAX, FixedLengths, Lengths, UniformLengths, parse_lengths

DEFAULT_REQUESTS = 100


def _parse(value: object) -> object:
    return parse_lengths(value) if isinstance(value, str) else value


GivenLengths = Annotated[Lengths, BeforeValidator(_parse)]


class LoadOptions(BaseModel):
    """A load to draw by chance. The same options and seed give the same requests at the same times."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    rate: float = Field(1.0, gt=0, description="Requests that arrive a second, on average; 'inf' sends all at once.")
    burstiness: float = Field(
        1.0,
        ge=0,
        le=100,
        description="How unevenly they arrive: 1 is Poisson, 0 like a clock, above 1 in bursts (gamma-distributed "
        "gaps; this is their standard deviation over their mean).",
    )
    requests: int | None = Field(
        None, ge=1, description=f"How many; {DEFAULT_REQUESTS} if no duration is given either."
    )
    duration_seconds: float | None = Field(
        None, gt=0, le=1e6, description="Let requests arrive for so long; with --requests, whichever ends first."
    )
    prompt_tokens: GivenLengths = Field(UniformLengths(16, 128), description=f"Lengths of the prompts: {SYNTAX}.")
    answer_tokens: GivenLengths = Field(FixedLengths(64), description="Lengths of the answers, likewise.")
    guided_share: float = Field(0.0, ge=0, le=1, description="Share of requests with guidance.")
    guidance_contexts: int = Field(1, ge=1, le=2, description="Further contexts of those, each as long as the prompt.")
    guidance_scale: float = Field(1.5, ge=0, le=100, description="How far to go from each context.")
    samples_share: float = Field(0.0, ge=0, le=1, description="Share of requests for several samples.")
    samples: int = Field(4, ge=1, le=65_536, description="How many samples those ask for.")
    temperature: float = Field(0.0, ge=0, le=100, description="0 takes the likeliest token each time.")
    ignore_eos: bool = Field(True, description="Let every answer have its full length, whatever the model says.")
    seed: int = Field(0, ge=0, lt=1 << 63, description="Fixes arrivals, lengths and prompts.")

    @model_validator(mode="after")
    def _check_end(self) -> "LoadOptions":
        if self.rate == float("inf") and self.requests is None:
            raise ValueError("rate 'inf' needs --requests: nothing else ends it")
        return self


class LatencyTargets(BaseModel):
    """What a request has to keep to count as goodput. None: no matter."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_target_seconds: float | None = Field(None, gt=0, description="Time to first token, at most.")
    inter_token_target_seconds: float | None = Field(
        None, gt=0, description="Time a token after the first, at most, on average over the answer."
    )
    end_to_end_target_seconds: float | None = Field(None, gt=0, description="Time to the end of the answer, at most.")

    @property
    def is_set(self) -> bool:
        """Whether there is any."""
        return any(value is not None for value in dict(self).values())
