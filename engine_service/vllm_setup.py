"""Whether vLLM's engine API is served, and what it tells of the model."""

import importlib.util
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine_service.config import EngineSettings, VllmApi
from engine_service.errors import MissingPackageError
from engine_service.tokenizer_archive import TokenizerArchive

if TYPE_CHECKING:
    from engine_service.assembly import AssembledEngine
    from engine_service.model_loading import LoadedModel
    from engine_service.vllm_rpc import VllmServicer

PROTO_MODULE = "smg_grpc_proto"
PROTO_PACKAGE = "smg-grpc-proto"
PROTO_EXTRA = "smg"

# What a model may recommend for sampling, under the names that both transformers and vLLM use.
_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def is_vllm_api_served(setting: VllmApi) -> bool:
    """Returns whether vLLM's engine API is served.

    Args:
        setting: what the settings say.

    Raises:
        MissingPackageError: it is asked for, and the package that has its messages is not installed.
    """
    if setting is VllmApi.OFF:
        return False
    is_installed = importlib.util.find_spec(PROTO_MODULE) is not None
    if setting is VllmApi.ON and not is_installed:
        raise MissingPackageError("vllm_api", PROTO_PACKAGE, PROTO_EXTRA)
    return is_installed


def build_vllm_servicer(
    assembled: "AssembledEngine", settings: EngineSettings, version: str, is_ready: Callable[[], bool]
) -> "VllmServicer":
    """Returns what serves vLLM's engine API.

    Args:
        assembled: the engine and its model.
        settings: the engine's.
        version: ours.
        is_ready: tells whether the engine takes requests.
    """
    # The package that it needs may be missing.
    from smg_grpc_proto.generated import vllm_engine_pb2 as pb  # noqa: PLC0415

    from engine_service.vllm_rpc import VllmFacts, VllmServicer  # noqa: PLC0415

    loaded = assembled.loaded
    config: Any = loaded.model.config
    model_info = pb.GetModelInfoResponse(
        model_path=settings.model,
        served_model_name=loaded.name,
        is_generation=True,
        max_context_length=loaded.max_context_tokens,
        max_req_input_len=loaded.max_context_tokens,
        vocab_size=loaded.vocab_size,
        model_type=config.model_type,
        architectures=[loaded.architecture],
        eos_token_ids=loaded.eos_token_ids,
        pad_token_id=getattr(config, "pad_token_id", None),
        bos_token_id=getattr(config, "bos_token_id", None),
        default_sampling_params_json=build_default_sampling(loaded.model.generation_config),
    )
    server_info = pb.GetServerInfoResponse(
        block_size=settings.page_size, kv_cache_dtype="auto", model_dtype=str(loaded.dtype)
    )
    facts = VllmFacts(model_info, server_info, version, settings.max_running_requests)
    archive = TokenizerArchive(loaded.tokenizer, _build_configuration(loaded))
    return VllmServicer(assembled.engine, loaded.tokenizer, archive, facts, is_ready)


def build_default_sampling(generation: Any) -> str:
    """Returns what a model recommends for sampling, as a JSON object; empty if it recommends nothing.

    Args:
        generation: the model's generation configuration, as `transformers` has it, or None.
    """
    if not getattr(generation, "do_sample", None):
        return ""
    values = {name: getattr(generation, name, None) for name in _RECOMMENDED}
    given = {name: value for name, value in values.items() if value is not None}
    return json.dumps(given, separators=(",", ":")) if given else ""


def _build_configuration(loaded: "LoadedModel") -> dict[str, str]:
    generation: Any = loaded.model.generation_config
    files = {"config.json": str(loaded.model.config.to_json_string())}
    if generation is not None:
        files["generation_config.json"] = str(generation.to_json_string())
    return files
