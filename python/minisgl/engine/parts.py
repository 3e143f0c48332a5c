"""Parts of a rank's step runner, as they are chosen and loaded before the size of its KV pool is known."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from minisgl.attention.base import AttentionSpec, LayerSpec, RecurrentSpec
from minisgl.attention.model_attention import ModelAttention
from minisgl.config import ConfigError, EngineConfig
from minisgl.distributed import TPGroup
from minisgl.engine.device import GIB
from minisgl.engine.forward import StepRunner
from minisgl.engine.pooling import PoolingRunner
from minisgl.engine.sampler import Sampler, TorchSampler
from minisgl.engine.state import SlotState
from minisgl.kernel.availability import has_kernels
from minisgl.kernel.base import Ops
from minisgl.kvcache.pool import KVPool
from minisgl.layers.layer_config import AttentionConfig
from minisgl.models.base import Model
from minisgl.models.config.model_config import ModelConfig
from minisgl.models.loading import build_model, load_model
from minisgl.models.pooling_model import PoolingModel

if TYPE_CHECKING:  # needs CUDA's packages
    from minisgl.engine.divided_logits import DividedLogits


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """Parts of a runner, whatever the size of its pool."""

    model: Model
    num_slots: int
    num_snapshots: int  # of recurrent states
    attention: ModelAttention
    ops: Ops
    sampler: Sampler
    device: torch.device
    divided: DividedLogits | None = None

    def runner(self, num_pages: int, num_window_pages: int, max_seq_len: int) -> StepRunner:
        """Return a runner with a pool of so many pages, and state of `max_seq_len` tokens a slot."""
        layout = self.attention.kv_layout
        kv = KVPool(
            layout,
            num_pages,
            self.device,
            num_slots=self.num_slots,
            num_snapshots=self.num_snapshots,
            num_window_pages=num_window_pages,
        )
        state = SlotState(
            num_slots=self.num_slots,
            max_seq_len=max_seq_len,
            page_size=kv.page_size,
            scratch_page=kv.scratch_page,
            device=self.device,
            scratch_window_page=None if layout.window is None else kv.scratch_window_page,
        )
        if isinstance(self.model, PoolingModel):
            return PoolingRunner(self.model, kv, state, self.attention, self.ops, self.sampler)
        return StepRunner(self.model, kv, state, self.attention, self.ops, self.sampler, self.divided)


def layer_specs(config: EngineConfig, model: ModelConfig, tp: TPGroup, dtype: torch.dtype) -> list[LayerSpec]:
    """Return each layer's attention on a rank, or the state that it keeps in the place of it."""
    return [
        AttentionSpec.of(
            layer.attention,
            tp_size=tp.size,
            page_size=config.page_size,
            dtype=dtype,
            norm_dtype=torch.float32 if model.norm.float32 else None,
            fp8_kv=config.kv_cache_dtype == "fp8_e4m3",
        )
        if isinstance(layer.attention, AttentionConfig)
        else RecurrentSpec.of(layer.attention, tp_size=tp.size, dtype=dtype)
        for layer in model.layers
    ]


def load_weights(
    config: EngineConfig,
    model: ModelConfig,
    tp: TPGroup,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    *,
    progress: bool,
) -> Model:
    """Return the rank's part of the model; ConfigError if the device has too little memory for its weights."""
    try:
        return load_model(
            model,
            Path(config.model_path),
            tp=tp,
            dtype=dtype,
            device=device,
            keeps=ops.keeps,
            keeps_experts=ops.keeps_experts,
            load_format=config.load_format,
            quantization=config.quantization,
            fp8_activations=config.fp8_activations,
            fp8_kv=config.kv_cache_dtype == "fp8_e4m3",
            progress=progress,
        )
    except torch.OutOfMemoryError as error:
        on_paper = build_model(model, tp=tp, dtype=dtype, device=torch.device("meta"))
        needed = sum(weight.nbytes for weight in on_paper.parameters())
        total = torch.cuda.get_device_properties(device).total_memory
        raise ConfigError(
            f"the weights of {needed / GIB:.1f} GiB do not fit into {device} of {total / GIB:.1f} GiB: "
            f"use --tp {tp.size * 2 ** math.ceil(math.log2(max(2.0, needed / (config.memory_ratio * total))))}"
        ) from error


def make_sampler(device: torch.device, dtype: torch.dtype) -> Sampler:
    """Return the device's sampler; its kernels are compiled meanwhile, for logits of `dtype`."""
    if has_kernels(device):
        from minisgl.engine.cuda_sampler import CudaSampler

        sampler = CudaSampler(device)
        sampler.begin_compiling(dtype)
        return sampler
    return TorchSampler()


def divide_logits(
    tp: TPGroup, sampler: Sampler, rows: int, model: ModelConfig, dtype: torch.dtype
) -> DividedLogits | None:
    """Return memory for the logits of captured decodes of up to `rows` rows, divided; None where that cannot be."""
    if isinstance(sampler, TorchSampler):
        return None
    from minisgl.engine.cuda_sampler import CudaSampler
    from minisgl.engine.divided_logits import DividedLogits

    if not isinstance(sampler, CudaSampler):
        return None
    return DividedLogits.make(tp, sampler, rows=rows, vocab_size=model.vocab_size, dtype=dtype)
