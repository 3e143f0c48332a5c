"""Engines that answer the same offline work: the interface that measurements call, Minisgl's own, and their start.

No engine's packages are imported before it is asked for: several engines may need different versions of them.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from measuring.report import environment
from measuring.shapes import read_vocab_size
from measuring.workload import OfflineBatch
from minisgl.config.engine import DEFAULT_PAGE_SIZE, Dtype, KVCacheDtype, ModelImplementation, QuantizationMethod
from minisgl.config.scheduler import BatchPolicyName, SchedulePolicy
from minisgl.sampling_params import SamplingParams

ENGINES = {
    "minisgl": "measuring.engines:MinisglEngine",
    "transformers": "measuring.peers:TransformersEngine",
    "vllm": "measuring.peers:VllmEngine",
    "sglang": "measuring.peers:SglangEngine",
}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of loading a model. None: the engine's own choice."""

    model: str  # a local folder
    dummy: bool = False  # random weights
    dtype: Dtype = "auto"
    device: str = "auto"  # minisgl and transformers: auto, cpu or cuda
    max_seq_len: int | None = None
    max_running_requests: int = 256
    memory_ratio: float = 0.9
    tp_size: int = 1  # not transformers
    expert_parallel: bool = False  # minisgl
    custom_all_reduce: bool = True  # minisgl
    model_impl: ModelImplementation = "auto"  # minisgl
    page_size: int = DEFAULT_PAGE_SIZE  # minisgl
    num_pages: int | None = None  # minisgl
    quantization: QuantizationMethod = "auto"  # minisgl
    fp8_activations: bool = False  # minisgl
    attention: str = "auto"  # minisgl
    kv_cache_dtype: KVCacheDtype = "auto"  # minisgl
    graph_max_bs: int | None = None  # minisgl
    overlap: bool = True  # minisgl
    batch_policy: BatchPolicyName = "prefill-first"  # minisgl
    schedule_policy: SchedulePolicy = "fcfs"  # minisgl
    max_prefill_tokens: int = 8192  # minisgl: of one step
    static_batches: tuple[int, ...] = (8, 32)  # transformers: batch sizes to try
    more: Mapping[str, Any] = field(default_factory=dict)  # vLLM and SGLang: options of their own, before ours


class OfflineEngine(Protocol):
    """A loaded model."""

    phases: dict[str, float]  # seconds of the parts of its start, as far as it says

    def prepare(self, work: OfflineBatch, *, whole: bool) -> str | None:
        """Tune to this work before it is measured; say how, if there was anything to choose.

        `whole`: all of it is to run as one batch.
        """
        ...

    def generate(self, work: OfflineBatch, temperature: float, *, progress: bool) -> int:
        """Answer everything in full, whatever end-of-text tokens come; return the number of tokens made."""
        ...

    def close(self) -> None: ...


class MinisglEngine:
    """Minisgl, by its offline interface `LLM`."""

    def __init__(self, options: EngineOptions) -> None:
        from minisgl.llm import LLM  # imports torch

        self.llm = LLM(
            options.model,
            options.dtype,
            use_dummy_weight=options.dummy,
            max_seq_len_override=options.max_seq_len,
            max_running_req=options.max_running_requests,
            memory_ratio=options.memory_ratio,
            model_impl=options.model_impl,
            quantization=options.quantization,
            fp8_activations=options.fp8_activations,
            kv_cache_dtype=options.kv_cache_dtype,
            page_size=options.page_size,
            num_page_override=options.num_pages,
            cuda_graph_max_bs=options.graph_max_bs,
            overlap=options.overlap,
            tp_size=options.tp_size,
            enable_expert_parallel=options.expert_parallel,
            custom_all_reduce=options.custom_all_reduce,
            batch_policy=options.batch_policy,
            schedule_policy=options.schedule_policy,
            max_extend_tokens=options.max_prefill_tokens,
            device=options.device,
            attention_backend=options.attention,
        )
        self.phases = self.llm.phases
        self.loop = self.llm.loop

    def prepare(self, _work: OfflineBatch, *, whole: bool) -> None:  # noqa: ARG002
        return None

    def generate(self, work: OfflineBatch, temperature: float, *, progress: bool) -> int:
        params = [
            SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=count) for count in work.max_tokens
        ]
        answers = self.llm.generate(work.prompts, params, use_tqdm=progress)
        return sum(len(answer["token_ids"]) for answer in answers)

    def close(self) -> None:
        self.llm.close()


@contextmanager
def started(name: str, options: EngineOptions) -> Iterator[tuple[OfflineEngine, int, dict[str, Any]]]:
    """Load the model in an engine and yield it, its vocabulary's size, and the beginning of its results.

    ImportError names the package that is missing.
    """
    module, _, kind = ENGINES[name].partition(":")
    begin = time.perf_counter()
    engine: OfflineEngine = getattr(importlib.import_module(module), kind)(options)
    result: dict[str, Any] = {
        "start_seconds": time.perf_counter() - begin,
        "phases": engine.phases,
        "environment": environment(),
    }
    try:
        yield engine, read_vocab_size(Path(options.model)), result
    finally:
        engine.close()
