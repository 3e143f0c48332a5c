"""SGLang, set up for throughput: large prefill chunks, graphs for every batch, no tokenizer."""

from __future__ import annotations

import importlib
from typing import Any

from minisgl.benchmark.engines.base import EngineOptions
from minisgl.benchmark.workload import OfflineBatch


class SglangEngine:
    def __init__(self, options: EngineOptions) -> None:
        sglang: Any = importlib.import_module("sglang")
        self._engine = sglang.Engine(
            model_path=options.model,
            load_format="dummy" if options.dummy else "auto",
            dtype=options.dtype,
            context_length=options.max_seq_len,
            tp_size=options.tp_size,
            log_level="warning",
            skip_tokenizer_init=True,
            mem_fraction_static=min(options.memory_ratio, 0.85),  # its graphs come on top
            max_running_requests=options.max_running_requests,
            cuda_graph_max_bs_decode=options.max_running_requests,
            chunked_prefill_size=16384,
            max_prefill_tokens=16384,
            schedule_conservativeness=0.3,
        )
        self.phases: dict[str, float] = {}

    def prepare(self, _work: OfflineBatch, *, whole: bool) -> None:  # noqa: ARG002
        return None

    def generate(self, work: OfflineBatch, temperature: float, *, progress: bool) -> int:  # noqa: ARG002
        params = [
            {"temperature": temperature, "ignore_eos": True, "max_new_tokens": count} for count in work.max_tokens
        ]
        answers = self._engine.generate(input_ids=work.prompts, sampling_params=params)
        return sum(answer["meta_info"]["completion_tokens"] for answer in answers)

    def close(self) -> None:
        self._engine.shutdown()
