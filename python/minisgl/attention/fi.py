"""FlashInfer (Ye et al., 2025) on the paged pool: planned decode and prefill, on Ampere and later, bf16 and fp16.

Decode runs on plain CUDA cores where few query heads share a KV head (there it is bound by reading K and V once), else
on tensor cores; prefill and mixed batches on FlashInfer's FA3 kernels where the GPU is a Hopper, else on FA2's.

FlashInfer plans on the host how a step is split over the GPU: 70 to 300 us for a decode. A plan names rows and chunks
of pages and no lengths, so it stays right while every row has as many chunks as when it was made. A captured decode
is planned again only when that changes, and then while the device works on the step before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from flashinfer.jit import env as jit_env
from flashinfer.jit import get_batch_decode_uri, get_batch_prefill_uri
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from minisgl.attention.base import AttentionInputs, AttentionPlan, AttentionShape, window_left
from minisgl.attention.flatten import make_flattener
from minisgl.core import Int32Array
from minisgl.kvcache.pool import KVPool

PLAIN_DECODE_GROUPS = (1, 2, 3)  # beyond, tensor cores are faster
_STAGING_BYTES = 8 << 20  # what FlashInfer's own wrappers take
_GRAPH_INT_BYTES = 256 << 10  # a decode's plan is a few words a row and a multiprocessor


class FlashInfer:
    """Implements attention.base.AttentionBackend. Wrappers, one for each window, keep a plan between layers."""

    graph_safe = True
    prefill_graph_safe = False  # it plans prefills on the host
    widens = False

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self.plain_decode = shape.group in PLAIN_DECODE_GROUPS
        self.flatten = make_flattener(device)
        self.staging = Staging()
        self._prefill_kernels = prefill_kernels(torch.cuda.get_device_capability(device))
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._workspace = torch.zeros(0, dtype=torch.uint8, device=device)
        self._prefill: dict[int | None, Any] = {}
        self._decode: dict[int | None, Any] = {}
        self._tables: PageList | None = None

    def plan(self, inputs: AttentionInputs) -> EagerPlan:
        pages = -(-inputs.kv_lens // self.shape.page_size)
        table = PageList.empty(len(inputs.page_table), inputs.page_table.shape[1], self.device)
        self.flatten(
            inputs.page_table,
            inputs.kv_lens_device,
            self.shape.page_size,
            table.starts,
            table.last_page_lens,
            table.pages,
        )
        return EagerPlan(
            decode=int(inputs.query_lens.max()) == 1,
            query_starts=_starts(inputs.query_lens),
            page_starts=_starts(pages),
            last_page_lens=torch.from_numpy(inputs.kv_lens - (pages - 1) * self.shape.page_size),
            pages=table.pages[: int(pages.sum())],
        )

    def graphed_decode(self, rows: int) -> GraphedFlashInfer:
        return GraphedFlashInfer(self, rows)

    def forward(self, layer: int, q: Tensor, kv: KVPool, plan: AttentionPlan, window: int | None = None) -> Tensor:
        caches = kv.keys(layer), kv.values(layer)
        if isinstance(plan, GraphedPlan):
            wrapper = plan.decode.wrapper(window)
        else:
            assert isinstance(plan, EagerPlan)
            if window not in plan.wrappers:
                plan.wrappers[window] = self._planned(plan, window)
            wrapper = plan.wrappers[window]
        out: Tensor = wrapper.run(q, caches)
        return out

    def _planned(self, plan: EagerPlan, window: int | None) -> Any:
        shape = self.shape
        wrappers = self._decode if plan.decode else self._prefill
        if window not in wrappers:
            wrappers[window] = self._decode_wrapper() if plan.decode else self._prefill_wrapper()
        wrapper = wrappers[window]
        common = {
            "window_left": window_left(window),
            "sm_scale": shape.scale,
            "q_data_type": shape.dtype,
            "kv_data_type": shape.dtype,
        }
        with self.staging.lent_to(wrapper):
            if plan.decode:
                wrapper.plan(
                    plan.page_starts,
                    plan.pages,
                    plan.last_page_lens,
                    shape.num_heads,
                    shape.num_kv_heads,
                    shape.head_dim,
                    shape.page_size,
                    **common,
                )
            else:
                wrapper.plan(
                    plan.query_starts,
                    plan.page_starts,
                    plan.pages,
                    plan.last_page_lens,
                    shape.num_heads,
                    shape.num_kv_heads,
                    shape.head_dim,
                    shape.page_size,
                    causal=True,
                    **common,
                )
        return wrapper

    def _decode_wrapper(self) -> Any:
        return BatchDecodeWithPagedKVCacheWrapper(
            self.workspace(rows=1), "NHD", use_tensor_cores=not self.plain_decode, backend="fa2"
        )

    def _prefill_wrapper(self) -> Any:
        return BatchPrefillWithPagedKVCacheWrapper(self.workspace(rows=1), "NHD", backend=self._prefill_kernels)

    def workspace(self, rows: int) -> Tensor:
        """Room for the partial results of any prefill and of graphed decodes of so many rows, shared by all."""
        shape, tiles = self.shape, 2 * self._multiprocessors // self.shape.num_kv_heads
        tile = 16 if shape.group <= 16 else 128  # query rows of a decode's tiles; of a prefill's at most 128
        graphed_tiles = max(tiles, -(-rows * shape.group // tile) + rows)
        floats = shape.num_heads * max(tiles * 128, graphed_tiles * tile) * (shape.head_dim + 1)
        if self._workspace.numel() < 4 * floats + (1 << 20):
            self._workspace = torch.zeros(4 * floats + (1 << 20), dtype=torch.uint8, device=self.device)
        return self._workspace

    def tables(self, rows: int, width: int) -> PageList:
        """The page list that graphed decodes of up to so many rows share: one step is over before the next begins."""
        if self._tables is None or self._tables.pages.numel() <= rows * width:
            self._tables = PageList.empty(rows, width, self.device)
        return self._tables


@dataclass(frozen=True, slots=True)
class PageList:
    """What `flatten` writes."""

    starts: Tensor  # [rows + 1] int32
    last_page_lens: Tensor  # [rows] int32
    pages: Tensor  # [rows * width + 1] int32

    @classmethod
    def empty(cls, rows: int, width: int, device: torch.device) -> PageList:
        sizes = rows + 1, rows, rows * width + 1
        return cls(*(torch.empty(size, dtype=torch.int32, device=device) for size in sizes))


@dataclass(frozen=True, slots=True)
class EagerPlan:
    """A step launched operation by operation; its wrappers are planned when the first layer of their window asks."""

    decode: bool
    query_starts: Tensor  # [rows + 1] int32, host
    page_starts: Tensor  # [rows + 1] int32, host
    last_page_lens: Tensor  # [rows] int32, host
    pages: Tensor  # [page_starts[-1]] int32
    wrappers: dict[int | None, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GraphedPlan:
    decode: GraphedFlashInfer


class GraphedFlashInfer:
    """Implements attention.base.GraphedDecode: fixed buffers that the graph reads, and plans that go there."""

    def __init__(self, backend: FlashInfer, rows: int) -> None:
        self._backend = backend
        self._rows = rows
        self._pages: Int32Array = np.ones(rows, dtype=np.int32)
        self._list: PageList | None = None
        self._wrappers: dict[int | None, ReplannedDecode] = {}

    def plan(self, inputs: AttentionInputs) -> GraphedPlan:
        rows, width = inputs.page_table.shape
        page_size = self._backend.shape.page_size
        if self._list is None:
            tables = self._backend.tables(rows, width)
            self._list = PageList(tables.starts[: rows + 1], tables.last_page_lens[:rows], tables.pages)
        self._backend.flatten(
            inputs.page_table,
            inputs.kv_lens_device,
            page_size,
            self._list.starts,
            self._list.last_page_lens,
            self._list.pages,
        )
        return GraphedPlan(self)

    def prepare(self, positions: Int32Array) -> None:
        pages = np.ones(self._rows, dtype=np.int32)
        pages[: len(positions)] += positions // self._backend.shape.page_size
        self._pages = pages
        for wrapper in self._wrappers.values():
            wrapper.replan(pages)

    def wrapper(self, window: int | None) -> Any:
        """Made by the run before the capture: planning cannot be captured."""
        if window not in self._wrappers:
            assert self._list is not None
            self._wrappers[window] = ReplannedDecode(self._backend, self._list, window, self._pages)
        return self._wrappers[window].wrapper


class ReplannedDecode:
    """A FlashInfer decode in CUDA graph mode that is planned again when its plan no longer fits."""

    def __init__(self, backend: FlashInfer, table: PageList, window: int | None, pages: Int32Array) -> None:
        rows = len(pages)
        shape = backend.shape
        workspace = backend.workspace(rows)
        self.wrapper = BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=not backend.plain_decode,
            paged_kv_indptr_buffer=table.starts,
            paged_kv_indices_buffer=table.pages,
            paged_kv_last_page_len_buffer=table.last_page_lens,
            backend="fa2",
        )
        self.wrapper.reset_workspace_buffer(
            workspace, torch.zeros(_GRAPH_INT_BYTES, dtype=torch.uint8, device=backend.device)
        )
        self._plain = backend.plain_decode
        self._window = window
        self._staging = backend.staging
        self._ones = torch.ones(rows, dtype=torch.int32)
        self._arguments = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.page_size
        self._options = {
            "window_left": window_left(window),
            "sm_scale": shape.scale,
            "q_data_type": shape.dtype,
            "kv_data_type": shape.dtype,
        }
        self._page_size = shape.page_size
        with self._staging.lent_to(self.wrapper):
            self.wrapper.plan(_starts(pages), table.pages[:0], self._ones, *self._arguments, **self._options)
            self._remember(pages)

    def replan(self, pages: Int32Array) -> None:
        """Make the plan fit rows of so many pages."""
        if not self._split or (self._window is None and np.array_equal(-(-pages // self._chunk), self._chunks)):
            return
        starts = _starts(pages)
        with self._staging.lent_to(self.wrapper):
            # It reads host arrays only, and touches no buffer but the plan's.
            fast_decode_plan(
                self.wrapper,
                starts,
                self.wrapper._paged_kv_indices_buf,
                self._ones,
                *self._arguments,
                **self._options,
                global_override_indptr_cpu=starts,
            )
            self._remember(pages)

    def _remember(self, pages: Int32Array) -> None:
        """Keep what the plan rests on: whether rows are split at all, into chunks of how many pages, and how many."""
        plan = [int(value) for value in self.wrapper._plan_info]
        at, self._split = (plan[7], bool(plan[9])) if self._plain else (plan[9], bool(plan[14]))
        tokens = int(self._staging.current[at : at + 4].view(torch.int32).item())
        self._chunk = max(tokens // self._page_size, 1)
        self._chunks = -(-pages // self._chunk)


class Staging:
    """Pinned memory for plans on their way to the device. A planner writes it and queues its copy, so it must not be
    written again before that copy is done: with the host a step ahead, one buffer would be too few.
    """

    def __init__(self) -> None:
        self._buffers = [torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(3)]
        self._copied = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]
        self._turn = 0

    @property
    def current(self) -> Tensor:
        return self._buffers[self._turn]

    @contextmanager
    def lent_to(self, wrapper: Any) -> Iterator[None]:
        """A context in which the wrapper may plan."""
        self._turn = (self._turn + 1) % len(self._buffers)
        self._copied[self._turn].synchronize()
        wrapper._pin_memory_int_workspace_buffer = self.current
        yield
        self._copied[self._turn].record()


def prefill_kernels(capability: tuple[int, int]) -> str:
    return "fa3" if capability[0] == 9 else "fa2"


def modules(shape: AttentionShape, capability: tuple[int, int], *, decode: bool) -> list[Path]:
    """The compiled modules that decodes, or all other steps, need; those that do not exist would first be compiled."""
    dtype = shape.dtype
    types = dtype, dtype, dtype, torch.int32, shape.head_dim, shape.head_dim, 0
    paths = []
    for windowed in [False, True] if shape.windowed else [False]:
        if decode and shape.group in PLAIN_DECODE_GROUPS:
            name = get_batch_decode_uri(*types, windowed, False)
        else:
            name = get_batch_prefill_uri(
                "fa2" if decode else prefill_kernels(capability), *types, windowed, False, False
            )
        shipped, compiled = (
            folder / name / f"{name}.so" for folder in (jit_env.FLASHINFER_AOT_DIR, jit_env.FLASHINFER_JIT_DIR)
        )
        paths.append(shipped if shipped.exists() else compiled)
    return paths


def _starts(lengths: Int32Array) -> Tensor:
    """[rows] -> [rows + 1] int32: prefix sums, on the host."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    return torch.from_numpy(starts)
