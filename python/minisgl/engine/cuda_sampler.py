"""The sampler on the CUDA kernels of csrc/sample.cu: two launches, whatever the rows ask for."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minisgl.engine.sampler import SampleKind, TorchSampler
from minisgl.engine.state import SlotState
from minisgl.kernel.compile import SCALAR_NAMES, Compiler, Kernel

# As in sample.cu.
_GROUP = 512  # logits
_MAX_GROUPS = 2048
_PARTIAL_WARPS = 8
_CHOOSE_THREADS = 1024
_PARTIAL_BYTES = 16


class CudaSampler:
    """Implements engine.sampler.Sampler. Rows without filters read their logits once, greedy ones too."""

    def __init__(self, device: torch.device) -> None:
        self._compiler = Compiler(device)
        self._kernels: dict[torch.dtype, list[Kernel]] = {}
        self._torch = TorchSampler()

    def sample(self, logits: Tensor, slots: Tensor, state: SlotState, kind: SampleKind) -> Tensor:
        rows, vocab = logits.shape
        groups = -(-vocab // _GROUP)
        if logits.stride(1) != 1 or groups > _MAX_GROUPS:
            return self._torch.sample(logits, slots, state, kind)
        partials = torch.empty(rows * groups * _PARTIAL_BYTES, dtype=torch.uint8, device=logits.device)
        sampled = torch.empty(rows, dtype=torch.int64, device=logits.device)
        sample_partials, sample_choose = self._kernels_for(logits.dtype)
        shared = (logits.data_ptr(), np.int64(logits.stride(0)), slots.data_ptr(), state.temperature.data_ptr())
        sample_partials(
            (-(-groups // _PARTIAL_WARPS), rows),
            32 * _PARTIAL_WARPS,
            *shared,
            partials.data_ptr(),
            np.int32(groups),
            np.int32(vocab),
        )
        sample_choose(
            (rows,),
            _CHOOSE_THREADS,
            *shared,
            state.top_k.data_ptr(),
            state.top_p.data_ptr(),
            state.min_p.data_ptr(),
            state.seed.data_ptr(),
            partials.data_ptr(),
            np.int32(groups),
            np.int32(vocab),
            state.tokens.data_ptr(),
            np.int64(state.tokens.stride(0)),
            state.lengths.data_ptr(),
            np.int32(state.scratch_slot),
            sampled.data_ptr(),
        )
        return sampled

    def _kernels_for(self, dtype: torch.dtype) -> list[Kernel]:
        if dtype not in self._kernels:
            self._kernels[dtype] = self._compiler.compile(
                "sample.cu", ("sample_partials", "sample_choose"), begins_early=True, SCALAR=SCALAR_NAMES[dtype]
            )
        return self._kernels[dtype]
