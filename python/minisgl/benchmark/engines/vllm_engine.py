"""vLLM, set up for throughput: a graph for every eight rows, no tokenizer, no detokenizing."""

from __future__ import annotations

import importlib
from typing import Any

from minisgl.benchmark.engines.base import EngineOptions
from minisgl.benchmark.workload import OfflineBatch


class VllmEngine:
    def __init__(self, options: EngineOptions) -> None:
        self._vllm: Any = importlib.import_module("vllm")
        rows = options.max_running_requests
        self._llm = self._vllm.LLM(
            model=options.model,
            load_format="dummy" if options.dummy else "auto",
            dtype=options.dtype,
            max_model_len=options.max_seq_len,
            gpu_memory_utilization=options.memory_ratio,
            tensor_parallel_size=options.tp_size,
            max_num_seqs=rows,
            max_num_batched_tokens=16384,
            skip_tokenizer_init=True,
            compilation_config={"cudagraph_capture_sizes": [1, 2, 4, *range(8, rows + 1, 8)]},
        )
        self.phases: dict[str, float] = {}

    def prepare(self, _work: OfflineBatch, *, whole: bool) -> None:  # noqa: ARG002
        return None

    def generate(self, work: OfflineBatch, temperature: float, *, progress: bool) -> int:
        params = [
            self._vllm.SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=count, detokenize=False)
            for count in work.max_tokens
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts]
        answers = self._llm.generate(prompts, params, use_tqdm=progress)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)

    def close(self) -> None:
        del self._llm
