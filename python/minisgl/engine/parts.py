"""Start of a rank's engine: its facts, and the parts that are loaded before the size of the KV pool is known."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from minisgl.attention.backend_choice import make_attention
from minisgl.attention.base import AttentionSpec, LayerSpec, RecurrentSpec
from minisgl.attention.model_attention import ModelAttention
from minisgl.config import ConfigError, EngineConfig
from minisgl.distributed import TPGroup
from minisgl.engine.device import GIB, bound_primitive_caches
from minisgl.engine.forward import StepRunner
from minisgl.engine.memory import Needs, describe_states, memory_budget, slots_that_fit, snapshots_that_fit
from minisgl.engine.pooling import PoolingRunner
from minisgl.engine.queue import DeviceQueue, make_queue
from minisgl.engine.sampling.sampler import Sampler, TorchSampler
from minisgl.engine.state import SlotState
from minisgl.kernel.availability import has_kernels, make_ops
from minisgl.kernel.base import Ops
from minisgl.kvcache.kv_pool import KVPool
from minisgl.kvcache.layout import KVLayout
from minisgl.kvcache.window import leaves_pages_behind
from minisgl.layers.attention import Attention
from minisgl.layers.layer_config import AttentionConfig
from minisgl.layers.linear import bind_weights, product_labels
from minisgl.layers.mlp import expert_labels
from minisgl.models.base import Model
from minisgl.models.config.model_config import ModelConfig
from minisgl.models.pooling_model import PoolingModel
from minisgl.models.weights.loading import LoadOptions, build_model, load_model

if TYPE_CHECKING:  # needs CUDA's packages
    from minisgl.engine.sampling.sharded_logits import ShardedLogits

logger = logging.getLogger(__name__)

PhaseTimer = Callable[[str], AbstractContextManager[None]]
"""Makes the context in which a named part of the start runs, and reports its seconds."""


@dataclass(frozen=True, slots=True)
class EngineStart:
    """Facts that are known before a rank's engine loads and measures its parts."""

    config: EngineConfig
    model: ModelConfig
    tp: TPGroup
    device: torch.device
    dtype: torch.dtype
    context_len: int  # most tokens of a sequence, if the pool can hold them
    max_prefill_tokens: int  # of a step
    reuses_prefixes: bool  # prefixes are cached, so that snapshots of recurrent states are worth their memory
    phase: PhaseTimer
    progress: bool  # bars are shown


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """Parts of a runner that do not depend on the size of its pool."""

    start: EngineStart
    queue: DeviceQueue
    model: Model
    num_slots: int
    num_snapshots: int  # snapshots of recurrent states
    attention: ModelAttention
    ops: Ops
    sampler: Sampler
    sharded_logits: ShardedLogits | None = None

    def runner(self, num_pages: int, num_window_pages: int, max_seq_len: int) -> StepRunner:
        """Return a runner with a pool of so many pages, and slots for `max_seq_len` tokens each."""
        layout = self.attention.kv_layout
        kv = KVPool(
            layout,
            num_pages,
            self.start.device,
            num_slots=self.num_slots,
            num_snapshots=self.num_snapshots,
            num_window_pages=num_window_pages,
        )
        state = SlotState(
            num_slots=self.num_slots,
            max_seq_len=max_seq_len,
            page_size=kv.page_size,
            scratch_page=kv.scratch_page,
            device=self.start.device,
            scratch_window_page=None if layout.window is None else kv.scratch_window_page,
        )
        if isinstance(self.model, PoolingModel):
            return PoolingRunner(self.model, kv, state, self.attention, self.ops, self.sampler)
        return StepRunner(self.model, kv, state, self.attention, self.ops, self.sampler, self.sharded_logits)


def load_parts(start: EngineStart) -> RunnerParts:
    """Load a rank's kernels and weights, and compute how many slots and snapshots of recurrent states fit.

    ConfigError if the device cannot compute the model, or has too little memory for it.
    """
    config, model, tp, device, dtype = start.config, start.model, start.tp, start.device, start.dtype
    specs = _layer_specs(start)
    attending = [spec for spec in specs if isinstance(spec, AttentionSpec)]
    quantized = config.quantization != "auto" or model.quantization is not None
    if device.type == "cpu":
        bound_primitive_caches()
    with start.phase("load kernels"):  # first, so that threads compile them while weights are loaded
        queue = make_queue(device, config.max_running_requests)
        ops = make_ops(device)
        sampler = _make_sampler(device, dtype)
        if device.type == "cuda":
            meta_model = build_model(model, tp=tp, dtype=dtype, device=torch.device("meta"))
            kernels = meta_model.kernel_needs(attending[0].kv_dtype)
            if quantized:  # the format of experts is known only after they have been loaded
                kernels = dataclasses.replace(kernels, experts=frozenset())
            ops.begin_compiling(kernels)
        windows = [spec.window for spec in attending if spec.window is not None]
        grouped = leaves_pages_behind(windows, config.page_size, start.context_len)
        attention = queue.call(lambda: make_attention(config.attention, specs, device, window_group=grouped))
        attention.begin_compiling(config.max_running_requests)
    with start.phase("load weights"):
        weights = queue.call(lambda: _load_weights(start, ops))
        queue.call(lambda: bind_weights(weights, ops))
        if quantized and device.type == "cuda":
            ops.begin_compiling(weights.kernel_needs(attending[0].kv_dtype))
            if any(isinstance(module, Attention) and module.may_round for module in weights.modules()):
                attention.begin_compiling(config.max_running_requests, rounded=True)
    if quantized and tp.rank == 0:
        logger.info("products read %s", ", ".join([product_labels(weights), *expert_labels(weights)]))
    num_slots, num_snapshots = _slots_and_snapshots(start, attention.kv_layout)
    return RunnerParts(start, queue, weights, num_slots, num_snapshots, attention, ops, sampler)


def _slots_and_snapshots(start: EngineStart, layout: KVLayout) -> tuple[int, int]:
    """Return how many requests may run at a time, which recurrent states may limit, and how many snapshots fit."""
    config, tp = start.config, start.tp
    wanted, num_snapshots = config.max_running_requests, 0
    if not layout.has_states:
        return wanted, num_snapshots
    budget = tp.smallest(memory_budget(start.device, config.memory_ratio, tp.size, Needs()).pool)
    num_slots = slots_that_fit(wanted, layout, budget)
    if start.reuses_prefixes:
        num_snapshots = snapshots_that_fit(config.state_snapshots, num_slots, layout, budget)
    if tp.rank == 0:
        logger.info(describe_states(layout, num_slots, wanted, num_snapshots))
    return num_slots, num_snapshots


def _layer_specs(start: EngineStart) -> list[LayerSpec]:
    """Return the spec of each layer on a rank: its attention, or its recurrent state."""
    config, model, tp_size, dtype = start.config, start.model, start.tp.size, start.dtype
    return [
        AttentionSpec.of(
            layer.attention,
            tp_size=tp_size,
            page_size=config.page_size,
            dtype=dtype,
            norm_dtype=torch.float32 if model.norm.float32 else None,
            fp8_kv=config.fp8_kv,
        )
        if isinstance(layer.attention, AttentionConfig)
        else RecurrentSpec.of(layer.attention, tp_size=tp_size, dtype=dtype)
        for layer in model.layers
    ]


def _load_weights(start: EngineStart, ops: Ops) -> Model:
    """Return the rank's part of the model; ConfigError if the device has too little memory for its weights."""
    config, model, tp, device, dtype = start.config, start.model, start.tp, start.device, start.dtype
    options = LoadOptions(
        load_format=config.load_format,
        quantization=config.quantization,
        keeps=ops.keeps,
        keeps_experts=ops.keeps_experts,
        fp8_activations=config.fp8_activations,
        fp8_kv=config.fp8_kv,
    )
    folder = Path(config.model_path)
    try:
        return load_model(model, folder, options, tp=tp, dtype=dtype, device=device, progress=start.progress)
    except torch.OutOfMemoryError as error:
        meta_model = build_model(model, tp=tp, dtype=dtype, device=torch.device("meta"))
        needed = sum(weight.nbytes for weight in meta_model.parameters())
        total = torch.cuda.get_device_properties(device).total_memory
        raise ConfigError(
            f"the weights of {needed / GIB:.1f} GiB do not fit into {device} of {total / GIB:.1f} GiB: "
            f"use --tp {tp.size * 2 ** math.ceil(math.log2(max(2.0, needed / (config.memory_ratio * total))))}"
        ) from error


def _make_sampler(device: torch.device, dtype: torch.dtype) -> Sampler:
    """Return the device's sampler, and begin to compile its kernels for logits of `dtype`."""
    if has_kernels(device):
        from minisgl.engine.sampling.cuda_sampler import CudaSampler

        sampler = CudaSampler(device)
        sampler.begin_compiling(dtype)
        return sampler
    return TorchSampler()


def shard_logits(parts: RunnerParts, rows: int) -> ShardedLogits | None:
    """Return memory for the sharded logits of captured decodes of up to `rows` rows; None if they cannot be sharded."""
    start, sampler = parts.start, parts.sampler
    if isinstance(sampler, TorchSampler):
        return None
    from minisgl.engine.sampling.cuda_sampler import CudaSampler
    from minisgl.engine.sampling.sharded_logits import ShardedLogits

    if not isinstance(sampler, CudaSampler):
        return None
    return ShardedLogits.make(start.tp, sampler, rows=rows, vocab_size=start.model.vocab_size, dtype=start.dtype)
