"""What FlashInfer's kernels can do, so that an engine that they cannot serve does not start with them."""

from collections.abc import Iterable, Iterator

import torch

from engine_service.kv_cache import KvShape

# The head dimensions and types that its wheels of kernels are built for. Smaller heads have no kernels, and others
# compile or not depending on the kernel.
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
# With so many query heads a key head decode is faster on tensor cores, as SGLang has it for half precision. The kernel
# that does without them exists for all smaller numbers, and for some larger ones.
_TENSOR_CORE_GROUP_SIZE = 4

_MIN_CAPABILITY = (7, 5)
_MIN_BFLOAT16_CAPABILITY = (8, 0)

# A GPU's compute capability, such as (9, 0).
Capability = tuple[int, int]


def find_unsupported(shape: KvShape, num_heads: int | None, capability: Capability | None) -> list[str]:
    """Returns what a model on a device needs that FlashInfer does not have, each by name.

    Args:
        shape: what the model's attention keeps of a token.
        num_heads: query heads of every layer; None if that is not known.
        capability: the GPU's compute capability; None where the model does not run on one.

    Source: `DISPATCH_HEAD_DIM` and `DISPATCH_GQA_GROUP_SIZE` in FlashInfer's utils.cuh, `IsInvalid` in its
    attention/prefill.cuh, and what its aot.py builds.
    """
    return list(_find_unsupported(shape, num_heads, capability))


def _find_unsupported(shape: KvShape, num_heads: int | None, capability: Capability | None) -> Iterator[str]:
    if shape.head_dim not in HEAD_DIMS:
        yield f"heads of dimension {shape.head_dim} (it has {_join(HEAD_DIMS)})"
    if num_heads is None:
        yield "a configuration without a number of query heads for all layers"
    elif num_heads % shape.num_kv_heads:
        yield f"{num_heads} query heads over {shape.num_kv_heads} key heads (the one must divide the other)"
    if shape.dtype not in DTYPES:
        yield f"{_name(shape.dtype)} (it has {_join(map(_name, DTYPES))})"
    if capability is None:
        yield "a model that does not run on a CUDA device"
    elif capability < _MIN_CAPABILITY:
        yield f"a GPU of compute capability {_join(capability, '.')} (it needs {_join(_MIN_CAPABILITY, '.')})"
    elif shape.dtype is torch.bfloat16 and capability < _MIN_BFLOAT16_CAPABILITY:
        yield f"bfloat16 on a GPU of compute capability {_join(capability, '.')} (float16 works)"


def wants_tensor_cores(num_heads: int, num_kv_heads: int) -> bool:
    """Whether decode is to run on tensor cores.

    Args:
        num_heads: query heads of a layer.
        num_kv_heads: key heads.
    """
    return num_heads // num_kv_heads >= _TENSOR_CORE_GROUP_SIZE


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _join(values: Iterable[object], separator: str = ", ") -> str:
    return separator.join(map(str, values))
