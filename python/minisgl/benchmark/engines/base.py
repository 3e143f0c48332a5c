"""What a measurement asks of an engine, and where the engines are. Each is imported only when it is asked for."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol

from minisgl.benchmark.workload import OfflineBatch
from minisgl.config import DEFAULT_PAGE_SIZE, BatchPolicyName, Dtype, KVCacheDtype, SchedulePolicy

ENGINES = {
    "minisgl": "minisgl.benchmark.engines.minisgl_engine:MinisglEngine",
    "transformers": "minisgl.benchmark.engines.transformers_engine:TransformersEngine",
    "vllm": "minisgl.benchmark.engines.vllm_engine:VllmEngine",
    "sglang": "minisgl.benchmark.engines.sglang_engine:SglangEngine",
}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to load a model. None: the engine's own choice."""

    model: str  # a local folder
    dummy: bool = False  # random weights
    dtype: Dtype = "auto"
    device: str = "auto"  # minisgl and transformers: auto, cpu or cuda
    max_seq_len: int | None = None
    max_running_requests: int = 256
    memory_ratio: float = 0.9
    tp_size: int = 1  # not transformers
    page_size: int = DEFAULT_PAGE_SIZE  # minisgl
    num_pages: int | None = None  # minisgl
    attention: str = "auto"  # minisgl
    kv_cache_dtype: KVCacheDtype = "auto"  # minisgl
    graph_max_bs: int | None = None  # minisgl
    overlap: bool = True  # minisgl
    batch_policy: BatchPolicyName = "prefill-first"  # minisgl
    schedule_policy: SchedulePolicy = "fcfs"  # minisgl
    max_prefill_tokens: int = 8192  # minisgl: of one step
    static_batches: tuple[int, ...] = (8, 32)  # transformers: batch sizes to try


class OfflineEngine(Protocol):
    """A loaded model."""

    phases: dict[str, float]  # seconds of the parts of its start, as far as it says

    def prepare(self, work: OfflineBatch, *, whole: bool) -> str | None:
        """Tune to this work before it is measured; say how, if there was anything to choose.

        `whole`: all of it is to run as one batch.
        """
        ...

    def generate(self, work: OfflineBatch, temperature: float, *, progress: bool) -> int:
        """Answer everything in full, whatever end-of-text tokens come; the number of tokens made."""
        ...

    def close(self) -> None: ...


def make_engine(name: str, options: EngineOptions) -> OfflineEngine:
    """Load the model in this engine. ImportError names the package that is missing."""
    module, _, kind = ENGINES[name].partition(":")
    engine: OfflineEngine = getattr(importlib.import_module(module), kind)(options)
    return engine
