"""The engine of one rank: everything that lives on its device, and `execute`, which runs plans there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from minisgl.attention.base import AttentionShape
from minisgl.attention.select import make_attention
from minisgl.config import ConfigError, EngineConfig
from minisgl.core import Batch, Limits, pages_for
from minisgl.distributed.group import TPGroup
from minisgl.engine.device import resolve_device, resolve_dtype
from minisgl.engine.forward import StepRunner
from minisgl.engine.graph import DecodeGraphs
from minisgl.engine.memory import free_bytes, pool_pages
from minisgl.engine.queue import PendingTokens, StepTensors, make_queue
from minisgl.engine.sampler import Sampler, TorchSampler
from minisgl.engine.state import SlotState
from minisgl.kernel.select import has_kernels, make_ops
from minisgl.kvcache.pool import KVPool
from minisgl.models.build import load_model
from minisgl.models.config import ModelConfig

logger = logging.getLogger(__name__)

Phase = Callable[[str], AbstractContextManager[None]]

DEFAULT_PAGE_SIZE = {"cuda": 64, "cpu": 16}


class Engine:
    """Model, KV pool and slot state on one device. Several may live in one process."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        *,
        tp: TPGroup,
        phase: Phase,
        progress: bool,
    ) -> None:
        self.device = resolve_device(config, tp.rank)
        self.dtype = resolve_dtype(config, model.dtype)
        self.page_size = config.page_size or DEFAULT_PAGE_SIZE[self.device.type]
        self.num_slots = config.max_running_requests
        self._tp = tp
        self._queue = make_queue(self.device)
        with phase("load weights"):
            loaded = self._queue.call(
                lambda: load_model(
                    model,
                    Path(config.model_path),
                    tp=tp,
                    dtype=self.dtype,
                    device=self.device,
                    load_format=config.load_format,
                    progress=progress,
                )
            )
        context_len = _context_len(config, model)
        kv_heads = model.kv_heads_per_rank(tp.size)
        with phase("allocate the KV cache"):
            page_bytes = KVPool.page_bytes(
                num_layers=model.num_layers,
                page_size=self.page_size,
                num_kv_heads=kv_heads,
                head_dim=model.head_dim,
                dtype=self.dtype,
            )
            self.num_pages = pool_pages(
                config,
                page_bytes=page_bytes,
                useful_pages=self.num_slots * pages_for(context_len, self.page_size),
                free=tp.smallest(free_bytes(self.device, config.memory_ratio, tp.size)),
            )
            # On the queue, like all that follows: another stream's fill would race with the first step's reads.
            self._kv = self._queue.call(
                lambda: KVPool(
                    num_layers=model.num_layers,
                    num_pages=self.num_pages,
                    page_size=self.page_size,
                    num_kv_heads=kv_heads,
                    head_dim=model.head_dim,
                    dtype=self.dtype,
                    device=self.device,
                )
            )
        # A sequence must fit into the pool alone.
        self.limits = Limits(max_seq_len=min(context_len, self.num_pages * self.page_size), vocab_size=model.vocab_size)
        state = self._queue.call(
            lambda: SlotState(
                num_slots=self.num_slots,
                max_seq_len=self.limits.max_seq_len,
                page_size=self.page_size,
                scratch_page=self._kv.scratch_page,
                device=self.device,
            )
        )
        attention = make_attention(
            config.attention,
            AttentionShape(
                num_heads=model.heads_per_rank(tp.size),
                num_kv_heads=kv_heads,
                head_dim=model.head_dim,
                page_size=self.page_size,
                dtype=self.dtype,
                windowed=any(window is not None for window in model.windows),
            ),
            self.device,
        )
        self._runner = StepRunner(loaded, self._kv, state, attention, make_ops(self.device), _make_sampler(self.device))
        self._graphs: DecodeGraphs | None = None
        graph_max_bs = self.num_slots if config.cuda_graph_max_bs is None else config.cuda_graph_max_bs
        if self.device.type == "cpu" and config.cuda_graph_max_bs is not None:
            logger.info("--cuda-graph-max-bs is for GPUs and not used on the CPU")
        if self.device.type == "cuda" and graph_max_bs > 0 and loaded.graph_safe(self._runner.ops):
            max_bs = min(graph_max_bs, self.num_slots)
            with phase("capture CUDA graphs"):
                self._graphs = self._queue.call(lambda: DecodeGraphs(self._runner, max_bs, self.limits.max_seq_len))

    def execute(self, batch: Batch) -> PendingTokens:
        """Launch a step behind those launched before, and return at once."""
        return self._queue.submit(lambda: self._run(batch))

    def _run(self, batch: Batch) -> StepTensors:
        runner, graphs = self._runner, self._graphs
        runner.state.apply(batch)
        if graphs is not None and graphs.fits(batch):
            forwarded = graphs.forward(batch)
            sampled = runner.sample(batch, forwarded) if batch.processed else graphs.sample(batch)
        else:
            forwarded = runner.forward(batch)
            sampled = runner.sample(batch, forwarded)
        return StepTensors(sampled, runner.logprobs(batch, forwarded, sampled))

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"{self.device}, {str(self.dtype).removeprefix('torch.')}, {self.num_pages} pages of {self.page_size} "
            f"tokens, up to {self.num_slots} requests of {self.limits.max_seq_len} tokens"
        )

    def close(self) -> None:
        """Wait for the steps under way and let the device go."""
        self._queue.close()
        self._tp.close()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _context_len(config: EngineConfig, model: ModelConfig) -> int:
    longest = model.max_position_embeddings
    if config.max_seq_len is not None and config.max_seq_len > longest:
        raise ConfigError(f"--max-seq-len-override {config.max_seq_len}: the model's positions end at {longest}")
    return config.max_seq_len or longest


def _make_sampler(device: torch.device) -> Sampler:
    if has_kernels(device):
        from minisgl.engine.cuda_sampler import CudaSampler

        return CudaSampler(device)
    return TorchSampler()
