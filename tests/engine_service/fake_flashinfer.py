"""A GPU that runs late, and FlashInfer's wrappers over it: their parameters, their buffers, attention in plain torch.

What the real wrappers leave to the stream is left to a queue here, and done when somebody waits for it. Memory that a
copy reads late, or that a kernel reads late, and that is written too early, shows as a wrong result.
"""

import inspect
import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine_service.attention_backends.flashinfer_library import FlashInferLibrary

WORKSPACE_BYTES = 4096
DECODE, PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
# For each release, wrapper and method, what it takes.
SIGNATURES: dict[str, dict[str, dict[str, str]]] = json.loads(
    Path(__file__).with_name("flashinfer_signatures.json").read_text()
)["releases"]
RELEASES = tuple(SIGNATURES)

Work = Callable[[], object]


def read_signature(release: str, wrapper: str, method: str) -> inspect.Signature:
    """Returns the recorded signature of a wrapper's method, without `self`."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = []
    for word in SIGNATURES[release][wrapper][method].split():
        name = word.strip("*=")
        if word.startswith("**"):
            parameters.append(inspect.Parameter(name, inspect.Parameter.VAR_KEYWORD))
        elif word.startswith("*"):
            kind = inspect.Parameter.KEYWORD_ONLY
            if name:
                parameters.append(inspect.Parameter(name, inspect.Parameter.VAR_POSITIONAL))
        else:
            default = None if word.endswith("=") else inspect.Parameter.empty
            parameters.append(inspect.Parameter(name, kind, default=default))
    return inspect.Signature(parameters)


class LateGpu:
    """A device with one stream, which has done nothing until somebody waits for it.

    Args:
        is_late: if not, it does everything at once.
    """

    def __init__(self, *, is_late: bool = True) -> None:
        self._is_late = is_late
        self.num_waits = 0
        self.wrappers: list[FakeWrapper] = []
        self.graph: list[Work] | None = None
        self._work: deque[Work] = deque()
        self._num_put = 0
        self._num_done = 0
        self._storages: set[int] = set()
        self._kept: list[torch.Tensor] = []

    def put(self, work: Work) -> int:
        """Puts work on the stream, or into the graph that is being captured; returns its place."""
        if self.graph is not None:
            self.graph.append(work)
        else:
            self._work.append(work)
            self._num_put += 1
            if not self._is_late:
                self.finish()
        return self._num_put

    def replay(self, graph: list[Work]) -> None:
        """Puts a captured graph's work on the stream."""
        for work in graph:
            self.put(work)

    def is_done(self, place: int) -> bool:
        """Whether the stream has come to a place."""
        return self._num_done >= place

    @torch.inference_mode()
    def run_to(self, place: int) -> None:
        """Lets the stream come to a place."""
        while self._num_done < place:
            self._work.popleft()()
            self._num_done += 1

    def finish(self) -> None:
        """Lets the stream do all it has to."""
        self.run_to(self._num_put)

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Declares memory to be the device's."""
        self._storages.add(tensor.untyped_storage().data_ptr())
        self._kept.append(tensor)
        return tensor

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor stands in the device's memory."""
        return tensor.untyped_storage().data_ptr() in self._storages

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor on the device, as `tensor.to(device, non_blocking=True)` does from pinned memory: later."""
        if self.has(tensor):
            return tensor
        target = self.adopt(torch.full_like(tensor, -1))
        self.copy(target, tensor)
        return target

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Puts a copy on the stream: what it reads is what stands there when it is made."""
        self.put(lambda: target.copy_(source))

    def make_event(self) -> "LateEvent":
        """Makes an event."""
        return LateEvent(self)

    def build_library(self, release: str = RELEASES[-1]) -> FlashInferLibrary:
        """Returns a release of FlashInfer on this GPU; `wrappers` will list what is made."""

        def make(kind: type[FakeWrapper], name: str) -> Callable[..., FakeWrapper]:
            return lambda *args, **kwargs: kind(self, release, name, args, kwargs)

        return FlashInferLibrary(
            version=release,
            decode_wrapper=make(FakeDecodeWrapper, DECODE),
            prefill_wrapper=make(FakePrefillWrapper, PREFILL),
            make_event=self.make_event,
        )


class LateEvent:
    """An event of a `LateGpu`; complete before it is recorded, as CUDA's are."""

    def __init__(self, gpu: LateGpu) -> None:
        self._gpu = gpu
        self._place = 0

    def record(self) -> None:
        """Puts it on the stream."""
        self._place = self._gpu.put(lambda: None)

    def query(self) -> bool:
        """Whether the stream has come to it."""
        return self._gpu.is_done(self._place)

    def synchronize(self) -> None:
        """Waits for the stream to come to it."""
        self._gpu.num_waits += not self.query()
        self._gpu.run_to(self._place)


class LateBytes:
    """Memory of a `LateGpu` that the host looks at through a copy, which comes after all that was put on the stream."""

    def __init__(self, gpu: LateGpu, num_bytes: int) -> None:
        self.tensor = torch.zeros(num_bytes, dtype=torch.uint8)
        self._gpu = gpu

    def clone(self) -> torch.Tensor:
        """Returns a copy."""
        self._gpu.finish()
        return self.tensor.clone()


class FakeWrapper:
    """What both wrappers share: workspaces, a schedule on its way to the device, and a kernel that follows it.

    Args:
        gpu: where it runs.
        release: the release whose parameters it has.
        name: the wrapper's name there.
        args: what it is made with.
        kwargs: the same, by name.
    """

    def __init__(self, gpu: LateGpu, release: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name = name
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.calls_as_made: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._gpu = gpu
        self._signatures = {method: read_signature(release, name, method) for method in ("__init__", "plan", "run")}
        given = self.bind("__init__", args, kwargs)
        assert given["kv_layout"] == "NHD"
        assert given["backend"] in {"fa2", "fa3"}
        self.is_graph = given.get("use_cuda_graph", False)
        self._backend = given["backend"]
        self._int_workspace_buffer = LateBytes(gpu, WORKSPACE_BYTES)
        self._pin_memory_int_workspace_buffer = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8)
        self._paged_kv_indptr_buf = given.get("paged_kv_indptr_buffer")
        self._paged_kv_indices_buf = given.get("paged_kv_indices_buffer")
        self._paged_kv_last_page_len_buf = given.get("paged_kv_last_page_len_buffer")
        gpu.wrappers.append(self)

    def bind(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of a call by name; one that the release does not take is an error."""
        arguments = self._signatures[method].bind(*args, **kwargs).arguments
        self.calls.append((method, arguments))
        self.calls_as_made.append((method, args, kwargs))
        return arguments

    def _schedule(
        self, given: dict[str, Any], spans: torch.Tensor, indptr: torch.Tensor, last: torch.Tensor, head_dim: int
    ) -> None:
        """Writes a schedule as FlashInfer does: to pinned memory at once, to the device later."""
        self._num_heads, self._num_kv_heads, self._head_dim = given["num_qo_heads"], given["num_kv_heads"], head_dim
        self._page_size, self._dtype, self._sm_scale = given["page_size"], given["q_data_type"], given["sm_scale"]
        for host in (spans, indptr, last):
            assert not self._gpu.has(host), "FlashInfer would wait for the device"
            assert host.dtype == torch.int32
        counts = indptr.diff()
        columns = [spans, counts]
        if self._backend == "fa3":
            columns.append((counts - 1).clamp(min=0) * self._page_size + last)
        values = torch.cat([torch.tensor([len(spans), len(columns)]), *columns]).to(torch.int32).view(torch.uint8)
        pinned, device = self._pin_memory_int_workspace_buffer, self._int_workspace_buffer.tensor
        pinned[: len(values)] = values
        self._gpu.copy(device[: len(values)], pinned[: len(values)])
        self._plan_info = [len(spans), self.is_graph]

    def _attend(self, q: torch.Tensor, pages: torch.Tensor, scale: float, *, is_causal: bool) -> torch.Tensor:
        assert q.is_contiguous()
        assert q.dtype == pages.dtype == self._dtype
        assert q.shape[1:] == (self._num_heads, self._head_dim)
        assert pages.shape[1:] == (2, self._page_size, self._num_kv_heads, self._head_dim)
        output = torch.full_like(q, torch.nan)
        # Pointers are taken now, what stands there is read when the kernel runs.
        workspace, kernels, page_size = self._int_workspace_buffer.tensor, self._backend, self._page_size
        indptr, indices = self._paged_kv_indptr_buf, self._paged_kv_indices_buf
        last = self._paged_kv_last_page_len_buf

        def run() -> None:
            schedule = workspace.view(torch.int32).tolist()
            num_rows, num_columns = schedule[:2]
            columns = np.array(schedule[2 : 2 + num_rows * num_columns]).reshape(num_columns, num_rows).tolist()
            token = 0
            for row in range(num_rows):
                span, count = columns[0][row], columns[1][row]
                # FA3 goes by the lengths in its schedule, FA2 by those of the last pages.
                length = columns[2][row] if kernels == "fa3" else max(0, count - 1) * page_size + int(last[row])
                row_pages = indices[int(indptr[row]) :][:count].long()
                part = slice(token, token + span)
                output[part] = attend_row(q[part], pages[row_pages], length, scale, is_causal=is_causal)
                token += span

        self._gpu.put(run)
        return output


def attend_row(query: torch.Tensor, pages: torch.Tensor, length: int, scale: float, *, is_causal: bool) -> torch.Tensor:
    """Attention of one row's query tokens over the first `length` tokens of its pages, in float64."""
    key, value = pages.double().transpose(0, 1).flatten(1, 2)[:, :length]
    num_heads_per_kv_head = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(num_heads_per_kv_head, dim=1) for one in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    if is_causal:
        span = query.shape[0]
        scores = scores.masked_fill(torch.ones(span, length).tril(length - span) == 0, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).to(query.dtype)


class FakeDecodeWrapper(FakeWrapper):
    """`BatchDecodeWithPagedKVCacheWrapper`."""

    def plan(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arrays and makes the schedule."""
        given = self.bind("plan", args, kwargs)
        indptr, indices, last = given["indptr"], given["indices"], given["last_page_len"]
        if self.is_graph:
            assert len(last) == len(self._paged_kv_last_page_len_buf)
            self._gpu.copy(self._paged_kv_indptr_buf, indptr)
            self._gpu.copy(self._paged_kv_indices_buf[: len(indices)], indices)
            self._gpu.copy(self._paged_kv_last_page_len_buf, last)
        else:
            self._paged_kv_indptr_buf = self._gpu.send(indptr)
            self._paged_kv_indices_buf = self._gpu.send(indices)
            self._paged_kv_last_page_len_buf = self._gpu.send(last)
        self._schedule(given, torch.ones_like(last), indptr, last, given["head_dim"])

    def run(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Attends."""
        given = self.bind("run", args, kwargs)
        assert len(given["q"]) == len(self._paged_kv_last_page_len_buf)
        return self._attend(given["q"], given["paged_kv_cache"], self._sm_scale * given["q_scale"], is_causal=False)


class FakePrefillWrapper(FakeWrapper):
    """`BatchPrefillWithPagedKVCacheWrapper`."""

    def plan(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arrays and makes the schedule."""
        given = self.bind("plan", args, kwargs)
        qo_indptr, indptr, last = given["qo_indptr"], given["paged_kv_indptr"], given["paged_kv_last_page_len"]
        self._num_tokens, self._causal = int(qo_indptr[-1]), given["causal"]
        self._paged_kv_indptr_buf = self._gpu.send(indptr)
        self._paged_kv_indices_buf = self._gpu.send(given["paged_kv_indices"])
        self._paged_kv_last_page_len_buf = self._gpu.send(last)
        self._schedule(given, qo_indptr.diff(), indptr, last, given["head_dim_qk"])

    def run(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Attends."""
        given = self.bind("run", args, kwargs)
        assert len(given["q"]) == self._num_tokens
        scale = self._sm_scale * given["q_scale"]
        return self._attend(given["q"], given["paged_kv_cache"], scale, is_causal=self._causal)
