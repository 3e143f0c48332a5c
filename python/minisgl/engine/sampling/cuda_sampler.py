"""The sampler with the CUDA kernels of csrc/sample.cu: two launches, after one of process.cu for processed logits."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.distributed import TPGroup
from minisgl.engine.sampling.sampler import TorchSampler
from minisgl.engine.state import SlotState
from minisgl.kernel.launch.compile import Compiler
from minisgl.kernel.launch.signature import SCALAR_NAMES, KernelSpec
from minisgl.sampling_params import MAX_BAD_WORD_TOKENS, SamplingFlags

# Constants of sample.cu.
_GROUP = 512  # logits in a group
_MAX_GROUPS = 2048  # groups per row
_PARTIAL_WARPS = 8  # warps per block of sample_partials
_PARTIAL_BYTES = 16  # size of struct Partial
_THREADS = 512  # threads per block of sample_choose, two of which fit on a multiprocessor
_THREADS_OF_FEW_ROWS = 1024  # if each row has a multiprocessor to itself
# Constants of process.cu.
_PROCESS_CHUNK = 4096  # ids of a block
_PROCESS_THREADS = 256  # threads per block


class CudaSampler:
    """`engine.sampling.sampler.Sampler` in CUDA. Rows without filters, greedy ones included, read their logits once."""

    graph_flags = (SamplingFlags.SAMPLED | SamplingFlags.FILTERED,)

    def __init__(self, device: torch.device) -> None:
        self._compiler = Compiler(device)
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._torch = TorchSampler()

    def begin_compiling(self, dtype: torch.dtype) -> None:
        """Compile the kernels for logits of this dtype, and for processed logits (float32), in threads.

        Otherwise they would be compiled by the first step that needs them, for which all streams would wait.
        """
        dtypes = dict.fromkeys((dtype, torch.float32))  # each once, the model's first
        threads = _THREADS_OF_FEW_ROWS, _THREADS
        self._compiler.begin(_sample_spec("sample_choose", logits, count) for logits in dtypes for count in threads)
        self._compiler.begin([_process_spec(dtype)])

    def sample(
        self, logits: Tensor, slots: Tensor, state: SlotState, flags: SamplingFlags, bitmask: Tensor | None = None
    ) -> Tensor:
        vocab = logits.shape[1]
        groups = -(-vocab // _GROUP)
        if logits.stride(1) != 1 or groups > _MAX_GROUPS:
            return self._torch.sample(logits, slots, state, flags, bitmask)
        if bitmask is not None:
            bitmask = bitmask.contiguous()
        if SamplingFlags.PROCESSED in flags:
            logits, bitmask = self.process(logits, slots, state, bitmask), None
        partials = self._partials(logits, slots, state, bitmask, groups=groups, vocab=vocab)
        return self._choose(logits, slots, state, bitmask, partials, groups=groups, vocab=vocab)

    def begin_compiling_sharded(self, dtype: torch.dtype, ranks: int) -> None:
        """Compile the kernels of `sample_sharded` in threads."""
        threads = _THREADS_OF_FEW_ROWS, _THREADS
        self._compiler.begin(_sample_spec("sample_choose", dtype, count, ranks) for count in threads)

    def samples_sharded(self, ids: int, ranks: int) -> bool:
        """Return True if `sample_sharded` can handle `ids` logits of each of `ranks` ranks."""
        return ranks * -(-ids // _GROUP) <= _MAX_GROUPS

    def sample_sharded(
        self, logits: Tensor, slots: Tensor, state: SlotState, tp: TPGroup, addresses: Tensor, vocab: int
    ) -> Tensor:
        """Sample as `sample` does, without a mask, if each rank has the logits [rows, ids] of its part of the ids.

        `addresses` [ranks] int64 are those of all ranks' logits, in the order of the ids; the last rank's are padded.
        The partials are all-gathered, after which the logits of all ranks have been written too.
        """
        ids = logits.shape[1]
        groups = -(-ids // _GROUP)
        first_id = tp.rank * ids
        here = min(max(vocab - first_id, 0), ids)
        partials = self._partials(logits, slots, state, None, groups=groups, vocab=here, first_id=first_id)
        return self._choose(
            logits,
            slots,
            state,
            None,
            tp.all_gather(partials),
            groups=tp.size * groups,
            vocab=vocab,
            addresses=addresses,
        )

    def _partials(
        self,
        logits: Tensor,
        slots: Tensor,
        state: SlotState,
        bitmask: Tensor | None,
        *,
        groups: int,
        vocab: int,
        first_id: int = 0,
    ) -> Tensor:
        """Return struct Partial of each group of logits, as [rows, groups * 4] words of float32."""
        rows = len(logits)
        partials = torch.empty((rows, groups * _PARTIAL_BYTES // 4), dtype=torch.float32, device=logits.device)
        sample_partials = self._compiler.kernel(_sample_spec, "sample_partials", logits.dtype, self._threads(rows))
        sample_partials(
            (-(-groups // _PARTIAL_WARPS), rows),
            32 * _PARTIAL_WARPS,
            logits=logits,
            row_stride=logits.stride(0),
            mask=bitmask,
            slots=slots,
            temperature=state.temperature,
            partials=partials,
            groups=groups,
            vocab=vocab,
            first_id=first_id,
        )
        return partials

    def _threads(self, rows: int) -> int:
        # With half the threads, twice as many rows fit on the device at a time.
        return _THREADS_OF_FEW_ROWS if rows <= self._multiprocessors else _THREADS

    def _choose(
        self,
        logits: Tensor,
        slots: Tensor,
        state: SlotState,
        bitmask: Tensor | None,
        partials: Tensor,
        *,
        groups: int,
        vocab: int,
        addresses: Tensor | None = None,
    ) -> Tensor:
        rows, ids = logits.shape
        ranks = 1 if addresses is None else len(addresses)
        sampled = torch.empty(rows, dtype=torch.int32, device=logits.device)
        threads = self._threads(rows)
        sample_choose = self._compiler.kernel(_sample_spec, "sample_choose", logits.dtype, threads, ranks)
        sample_choose(
            (rows,),
            threads,
            logits=logits,
            addresses=addresses,
            ids_of_rank=ids,
            groups_of_rank=groups // ranks,
            row_stride=logits.stride(0),
            mask=bitmask,
            slots=slots,
            temperature=state.temperature,
            partials=partials,
            groups=groups,
            vocab=vocab,
            top_k=state.top_k,
            top_p=state.top_p,
            min_p=state.min_p,
            seeds=state.seed,
            tokens=state.tokens,
            tokens_stride=state.tokens.stride(0),
            lengths=state.lengths,
            scratch_slot=state.scratch_slot,
            sampled=sampled,
        )
        return sampled

    def process(self, logits: Tensor, slots: Tensor, state: SlotState, bitmask: Tensor | None) -> Tensor:
        """Compute `engine.sampling.logits_processing.process_logits` of logits whose rows are contiguous."""
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


def _sample_spec(kernel: str, dtype: torch.dtype, choose_threads: int, ranks: int = 1) -> KernelSpec:
    return KernelSpec("sample.cu", kernel, {"SCALAR": SCALAR_NAMES[dtype], "THREADS": choose_threads, "RANKS": ranks})


def _process_spec(dtype: torch.dtype) -> KernelSpec:
    return KernelSpec("process.cu", "process_logits", {"SCALAR": SCALAR_NAMES[dtype], "WORD": MAX_BAD_WORD_TOKENS})
