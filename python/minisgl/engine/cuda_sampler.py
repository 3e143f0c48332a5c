"""The sampler on the CUDA kernels of csrc/sample.cu; rows with filters (top-k, top-p, min-p) are sampled in torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minisgl.engine.sampler import SampleKind, TorchSampler
from minisgl.engine.state import SlotState
from minisgl.kernel.compile import SCALAR_NAMES, Compiler, Kernel

_CHUNK = 4096  # logits, as in sample.cu
_THREADS = 256
_PARTIAL_BYTES = 16


class CudaSampler:
    """Implements engine.sampler.Sampler in two launches that read the logits once."""

    def __init__(self, device: torch.device) -> None:
        self._compiler = Compiler(device)
        self._kernels: dict[torch.dtype, list[Kernel]] = {}
        self._torch = TorchSampler()

    def sample(self, logits: Tensor, slots: Tensor, state: SlotState, kind: SampleKind) -> Tensor:
        if kind.filtered or logits.stride(1) != 1:
            return self._torch.sample(logits, slots, state, kind)
        rows, vocab = logits.shape
        chunks = -(-vocab // _CHUNK)
        partials = torch.empty(rows * chunks * _PARTIAL_BYTES, dtype=torch.uint8, device=logits.device)
        sampled = torch.empty(rows, dtype=torch.int64, device=logits.device)
        sample_partials, sample_choose = self._kernels_for(logits.dtype)
        shared = (logits.data_ptr(), np.int64(logits.stride(0)), slots.data_ptr(), state.temperature.data_ptr())
        sample_partials((chunks, rows), _THREADS, *shared, partials.data_ptr(), np.int32(vocab))
        sample_choose(
            (rows,),
            _THREADS,
            *shared,
            state.seed.data_ptr(),
            partials.data_ptr(),
            np.int32(chunks),
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
                "sample.cu", ("sample_partials", "sample_choose"), SCALAR=SCALAR_NAMES[dtype]
            )
        return self._kernels[dtype]
