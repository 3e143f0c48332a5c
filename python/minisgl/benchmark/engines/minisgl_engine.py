"""Minisgl's LLM."""

from __future__ import annotations

from minisgl.benchmark.engines.base import EngineOptions
from minisgl.benchmark.workload import OfflineBatch
from minisgl.core import SamplingParams
from minisgl.llm import LLM


class MinisglEngine:
    def __init__(self, options: EngineOptions) -> None:
        self.llm = LLM(
            options.model,
            options.dtype,
            use_dummy_weight=options.dummy,
            max_seq_len_override=options.max_seq_len,
            max_running_req=options.max_running_requests,
            memory_ratio=options.memory_ratio,
            kv_cache_dtype=options.kv_cache_dtype,
            page_size=options.page_size,
            num_page_override=options.num_pages,
            cuda_graph_max_bs=options.graph_max_bs,
            overlap=options.overlap,
            tp_size=options.tp_size,
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
