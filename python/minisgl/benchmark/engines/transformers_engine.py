"""Hugging Face transformers: static batches, padded on the left, each as long as its longest answer.

Sequences are sorted by the tokens they get, which wastes the least, and the batch size is the best of those tried.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from minisgl.benchmark.engines.base import EngineOptions
from minisgl.benchmark.workload import OfflineBatch


class TransformersEngine:
    def __init__(self, options: EngineOptions) -> None:
        if options.tp_size > 1:
            raise ValueError("transformers is measured on one device: leave it out with --tp")
        device = options.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        config = AutoConfig.from_pretrained(options.model)
        dtype = getattr(torch, options.dtype) if options.dtype != "auto" else config.dtype or torch.float32
        if options.dummy:
            with torch.device(device):
                model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(device)
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

    @torch.inference_mode()
    def generate(self, work: OfflineBatch, temperature: float, *, progress: bool) -> int:
        order = sorted(range(len(work.prompts)), key=lambda index: work.max_tokens[index])
        with tqdm(total=len(order), desc="Generating", unit="request", disable=not progress) as bar:
            for at in range(0, len(order), self._batch_size):
                chosen = order[at : at + self._batch_size]
                self._run([work.prompts[i] for i in chosen], max(work.max_tokens[i] for i in chosen), temperature)
                bar.update(len(chosen))
        return work.output_tokens

    def _run(self, prompts: list[list[int]], new_tokens: int, temperature: float) -> None:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=self._device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]).to(self._device)
        sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
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
