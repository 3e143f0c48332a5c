"""The sampler on the CUDA kernels of csrc/sample.cu: two launches, and one before them where logits are processed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.core import MAX_BAD_WORD_TOKENS, SamplingFlags
from minisgl.engine.sampler import TorchSampler
from minisgl.engine.state import SlotState
from minisgl.kernel.compile import SCALAR_NAMES, Compiler, Kernel, address

# As in sample.cu.
_GROUP = 512  # logits
_MAX_GROUPS = 2048
_PARTIAL_WARPS = 8
_PARTIAL_BYTES = 16
_THREADS = 512  # of a block that chooses,
_THREADS_OF_FEW_ROWS = 1024  # and where each has a multiprocessor to itself
# As in process.cu.
_PROCESS_CHUNK = 4096  # ids
_PROCESS_THREADS = 256


class CudaSampler:
    """Implements engine.sampler.Sampler. Rows without filters read their logits once, greedy ones too."""

    graph_flags = (SamplingFlags.SAMPLED | SamplingFlags.FILTERED,)

    def __init__(self, device: torch.device) -> None:
        self._compiler = Compiler(device)
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._sampling: dict[tuple[torch.dtype, int], list[Kernel]] = {}
        self._processing: dict[torch.dtype, Kernel] = {}
        self._torch = TorchSampler()

    def begin_compiling(self, dtype: torch.dtype) -> None:
        """In threads, the kernels for logits of this dtype, and for processed ones, which are float32.

        Otherwise they are compiled when such logits come first, which every stream would wait for.
        """
        dtypes = dict.fromkeys((dtype, torch.float32))  # each once, the model's first
        threads = _THREADS_OF_FEW_ROWS, _THREADS
        self._compiler.begin("sample.cu", [_macros(logits, count) for logits in dtypes for count in threads])
        self._compiler.begin("process.cu", [_processing_macros(dtype)])

    def sample(
        self, logits: Tensor, slots: Tensor, state: SlotState, flags: SamplingFlags, bitmask: Tensor | None = None
    ) -> Tensor:
        rows, vocab = logits.shape
        groups = -(-vocab // _GROUP)
        if logits.stride(1) != 1 or groups > _MAX_GROUPS:
            return self._torch.sample(logits, slots, state, flags, bitmask)
        if bitmask is not None:
            bitmask = bitmask.contiguous()
        if SamplingFlags.PROCESSED in flags:
            logits, bitmask = self.process(logits, slots, state, bitmask), None
        partials = torch.empty(rows * groups * _PARTIAL_BYTES, dtype=torch.uint8, device=logits.device)
        sampled = torch.empty(rows, dtype=torch.int32, device=logits.device)
        # Twice as many rows fit on the device at a time with half the threads each.
        choose_threads = _THREADS_OF_FEW_ROWS if rows <= self._multiprocessors else _THREADS
        sample_partials, sample_choose = self._sampling_kernels(logits.dtype, choose_threads)
        shared = (
            logits.data_ptr(),
            np.int64(logits.stride(0)),
            address(bitmask),
            slots.data_ptr(),
            state.temperature.data_ptr(),
        )
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
            choose_threads,
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

    def process(self, logits: Tensor, slots: Tensor, state: SlotState, bitmask: Tensor | None) -> Tensor:
        """engine.processing.process_logits of logits whose rows are contiguous."""
        rows, vocab = logits.shape
        asked = state.processing
        processed = torch.empty((rows, vocab), dtype=torch.float32, device=logits.device)
        self._processing_kernel(logits.dtype)(
            (-(-vocab // _PROCESS_CHUNK), rows),
            _PROCESS_THREADS,
            logits.data_ptr(),
            np.int64(logits.stride(0)),
            address(bitmask),
            slots.data_ptr(),
            state.tokens.data_ptr(),
            np.int64(state.tokens.stride(0)),
            state.lengths.data_ptr(),
            asked.prompt_lens.data_ptr(),
            asked.presence_penalty.data_ptr(),
            asked.frequency_penalty.data_ptr(),
            asked.repetition_penalty.data_ptr(),
            asked.min_tokens.data_ptr(),
            asked.stop_ids.data_ptr(),
            np.int32(asked.stop_ids.shape[1]),
            asked.bias_ids.data_ptr(),
            asked.biases.data_ptr(),
            np.int32(asked.bias_ids.shape[1]),
            asked.bad_words.data_ptr(),
            np.int32(asked.bad_words.shape[1]),
            asked.is_restricted.data_ptr(),
            asked.allowed.data_ptr(),
            np.int32(asked.allowed.shape[1]),
            processed.data_ptr(),
            np.int32(vocab),
        )
        return processed

    def _sampling_kernels(self, dtype: torch.dtype, choose_threads: int) -> list[Kernel]:
        key = dtype, choose_threads
        if key not in self._sampling:
            self._sampling[key] = self._compiler.compile(
                "sample.cu",
                ("sample_partials", "sample_choose"),
                begins_early=True,
                **_macros(*key),
            )
        return self._sampling[key]

    def _processing_kernel(self, dtype: torch.dtype) -> Kernel:
        if dtype not in self._processing:
            (self._processing[dtype],) = self._compiler.compile(
                "process.cu",
                ("process_logits",),
                begins_early=True,
                **_processing_macros(dtype),
            )
        return self._processing[dtype]


def _macros(dtype: torch.dtype, choose_threads: int) -> dict[str, Any]:
    return {"SCALAR": SCALAR_NAMES[dtype], "THREADS": choose_threads}


def _processing_macros(dtype: torch.dtype) -> dict[str, Any]:
    return {"SCALAR": SCALAR_NAMES[dtype], "WORD": MAX_BAD_WORD_TOKENS}
