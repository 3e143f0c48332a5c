"""Other engines on the same offline work: transformers, vLLM and SGLang; each imports its packages at its start."""

from __future__ import annotations

import importlib
import time
from typing import Any

from tqdm import tqdm

from measuring.engines import EngineOptions
from measuring.workload import OfflineBatch


class TransformersEngine:
    """Hugging Face transformers: static batches, padded on the left, each as long as its longest answer.

    Sequences are sorted by the tokens they get, which wastes the least, and the batch size is the best of those tried.
    """

    def __init__(self, options: EngineOptions) -> None:
        if options.tp_size > 1:
            raise ValueError("transformers is measured on one device: leave it out with --tp")
        torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        self._torch = torch
        device = options.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        config = transformers.AutoConfig.from_pretrained(options.model)
        dtype = getattr(torch, options.dtype) if options.dtype != "auto" else config.dtype or torch.float32
        if options.dummy:
            with torch.device(device):
                model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(device)
        self._model = model.eval()
        # Nothing ends an answer but its length.
        self._model.generation_config.eos_token_id = None
        self._device = device
        self._candidates = options.static_batches
        self._batch_size = self._candidates[0]
        self.phases: dict[str, float] = {}

    def prepare(self, work: OfflineBatch, *, whole: bool) -> str | None:
        """Keep the batch size that answers this work fastest."""
        if whole:
            self._batch_size = len(work.prompts)
            return None
        seconds = {}
        for size in self._candidates:
            if size // 2 < len(work.prompts):  # or else a smaller one did the same
                self._batch_size = size
                begin = time.perf_counter()
                self.generate(work, 0.6, progress=True)
                seconds[size] = time.perf_counter() - begin
        if not seconds:
            return None
        self._batch_size = min(seconds, key=lambda size: seconds[size])
        tried = ", ".join(f"{size}: {work.output_tokens / spent:.1f}" for size, spent in seconds.items())
        return f"static batches of {self._batch_size} (tok/s of each size tried: {tried})"

    def generate(self, work: OfflineBatch, temperature: float, *, progress: bool) -> int:
        order = sorted(range(len(work.prompts)), key=lambda index: work.max_tokens[index])
        with tqdm(total=len(order), desc="Generating", unit="request", disable=not progress) as bar:
            for at in range(0, len(order), self._batch_size):
                chosen = order[at : at + self._batch_size]
                self._run([work.prompts[i] for i in chosen], max(work.max_tokens[i] for i in chosen), temperature)
                bar.update(len(chosen))
        return work.output_tokens

    def _run(self, prompts: list[list[int]], new_tokens: int, temperature: float) -> None:
        torch = self._torch
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=self._device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]).to(self._device)
        sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                pad_token_id=0,
                eos_token_id=None,
                **sampling,
            )
        made = output.shape[1] - width
        if made != new_tokens:
            raise RuntimeError(f"{made} tokens a row came, {new_tokens} were asked for")
        if self._device == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        del self._model


class VllmEngine:
    """vLLM, set up for throughput: a graph for every eight rows, no tokenizer, no detokenizing."""

    def __init__(self, options: EngineOptions) -> None:
        self._vllm: Any = importlib.import_module("vllm")
        rows = options.max_running_requests
        chosen: dict[str, Any] = {
            "load_format": "dummy" if options.dummy else "auto",
            "dtype": options.dtype,
            "max_model_len": options.max_seq_len,
            "gpu_memory_utilization": options.memory_ratio,
            "tensor_parallel_size": options.tp_size,
            "max_num_seqs": rows,
            "max_num_batched_tokens": 16384,
            "skip_tokenizer_init": True,
            "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, *range(8, rows + 1, 8)]},
        }
        self._llm = self._vllm.LLM(model=options.model, **{**chosen, **options.more})
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


class SglangEngine:
    """SGLang, set up for throughput: large prefill chunks, graphs for every batch, no tokenizer."""

    def __init__(self, options: EngineOptions) -> None:
        sglang: Any = importlib.import_module("sglang")
        chosen: dict[str, Any] = {
            "load_format": "dummy" if options.dummy else "auto",
            "dtype": options.dtype,
            "context_length": options.max_seq_len,
            "tp_size": options.tp_size,
            "log_level": "warning",
            "skip_tokenizer_init": True,
            "enable_multimodal": False,  # it would ask for an image processor
            "mem_fraction_static": min(options.memory_ratio, 0.85),  # its graphs come on top
            "max_running_requests": options.max_running_requests,
            "cuda_graph_max_bs_decode": options.max_running_requests,
            "chunked_prefill_size": 16384,
            "max_prefill_tokens": 16384,
            "schedule_conservativeness": 0.3,
        }
        self._engine = sglang.Engine(model_path=options.model, **{**chosen, **options.more})
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
