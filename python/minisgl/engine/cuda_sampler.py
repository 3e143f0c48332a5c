"""The sampler on the CUDA kernels of csrc/sample.cu: two launches, and one before them where logits are processed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minisgl.core import MAX_BAD_WORD_TOKENS, SamplingFlags
from minisgl.engine.sampler import TorchSampler
from minisgl.engine.state import SlotState
from minisgl.kernel.compile import Compiler
from minisgl.kernel.signature import SCALAR_NAMES, KernelSpec

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
    """`engine.sampler.Sampler` in CUDA. Rows without filters read their logits once, greedy ones too."""

    graph_flags = (SamplingFlags.SAMPLED | SamplingFlags.FILTERED,)

    def __init__(self, device: torch.device) -> None:
        self._compiler = Compiler(device)
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._torch = TorchSampler()

    def begin_compiling(self, dtype: torch.dtype) -> None:
        """Compile in threads the kernels for logits of this dtype, and for processed ones, which are float32.

        Otherwise they are compiled when such logits come first, which every stream would wait for.
        """
        dtypes = dict.fromkeys((dtype, torch.float32))  # each once, the model's first
        threads = _THREADS_OF_FEW_ROWS, _THREADS
        self._compiler.begin(_sample_spec("sample_choose", logits, count) for logits in dtypes for count in threads)
        self._compiler.begin([_process_spec(dtype)])

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
        shared: dict[str, Any] = {
            "logits": logits,
            "row_stride": logits.stride(0),
            "mask": bitmask,
            "slots": slots,
            "temperature": state.temperature,
            "partials": partials,
            "groups": groups,
            "vocab": vocab,
        }
        sample_partials = self._compiler.kernel(_sample_spec, "sample_partials", logits.dtype, choose_threads)
        sample_partials((-(-groups // _PARTIAL_WARPS), rows), 32 * _PARTIAL_WARPS, **shared)
        sample_choose = self._compiler.kernel(_sample_spec, "sample_choose", logits.dtype, choose_threads)
        sample_choose(
            (rows,),
            choose_threads,
            top_k=state.top_k,
            top_p=state.top_p,
            min_p=state.min_p,
            seeds=state.seed,
            tokens=state.tokens,
            tokens_stride=state.tokens.stride(0),
            lengths=state.lengths,
            scratch_slot=state.scratch_slot,
            sampled=sampled,
            **shared,
        )
        return sampled

    def process(self, logits: Tensor, slots: Tensor, state: SlotState, bitmask: Tensor | None) -> Tensor:
        """Compute `engine.processing.process_logits` of logits whose rows are contiguous."""
        rows, vocab = logits.shape
        tables = state.processing
        processed = torch.empty((rows, vocab), dtype=torch.float32, device=logits.device)
        process_logits = self._compiler.kernel(_process_spec, logits.dtype)
        process_logits(
            (-(-vocab // _PROCESS_CHUNK), rows),
            _PROCESS_THREADS,
            logits=logits,
            row_stride=logits.stride(0),
            mask=bitmask,
            slots=slots,
            tokens=state.tokens,
            tokens_stride=state.tokens.stride(0),
            lengths=state.lengths,
            prompt_lens=tables.prompt_lens,
            presence_penalty=tables.presence_penalty,
            frequency_penalty=tables.frequency_penalty,
            repetition_penalty=tables.repetition_penalty,
            min_tokens=tables.min_tokens,
            stop_ids=tables.stop_ids,
            n_stop_ids=tables.stop_ids.shape[1],
            bias_ids=tables.bias_ids,
            biases=tables.biases,
            n_biases=tables.bias_ids.shape[1],
            bad_words=tables.bad_words,
            n_bad_words=tables.bad_words.shape[1],
            is_restricted=tables.is_restricted,
            allowed=tables.allowed,
            n_allowed=tables.allowed.shape[1],
            out=processed,
            vocab=vocab,
        )
        return processed


def _sample_spec(kernel: str, dtype: torch.dtype, choose_threads: int) -> KernelSpec:
    return KernelSpec("sample.cu", kernel, {"SCALAR": SCALAR_NAMES[dtype], "THREADS": choose_threads})


def _process_spec(dtype: torch.dtype) -> KernelSpec:
    return KernelSpec("process.cu", "process_logits", {"SCALAR": SCALAR_NAMES[dtype], "WORD": MAX_BAD_WORD_TOKENS})
