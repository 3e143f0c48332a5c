"""Sharded logits of decodes: each GPU keeps the logits of its shard of the vocabulary, and sampling reads them there.

Otherwise every rank would gather [rows, vocab_size] in every step, 9.7 MB from each of two ranks for 64 rows of Qwen3.
Sampling needs little of that: the maximum and sum of each 512 logits, then the few groups that can matter, which
csrc/sample.cu reads from the GPU that has them. All ranks compute with the same bits, so they choose the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.distributed import TPGroup
from minisgl.distributed.group import SharedRows
from minisgl.engine.sampling.cuda_sampler import CudaSampler
from minisgl.engine.state import SlotState


@dataclass(frozen=True, slots=True)
class ShardedLogits:
    """This rank's logits [rows, ids] in memory that all ranks can read, and the sampling from all ranks' logits.

    A rank may overwrite its logits in the next step, because that step's first all-reduce waits until all ranks have
    ended their sampling.
    """

    tp: TPGroup
    sampler: CudaSampler
    shared: SharedRows
    vocab_size: int

    @classmethod
    def make(
        cls, tp: TPGroup, sampler: CudaSampler, *, rows: int, vocab_size: int, dtype: torch.dtype
    ) -> ShardedLogits | None:
        """Return memory for up to `rows` rows; None if ranks cannot read one another's memory."""
        if not sampler.samples_sharded(-(-vocab_size // tp.size), tp.size):
            return None
        shared = tp.share_rows(rows, -(-vocab_size // tp.size), dtype)
        if shared is None:
            return None
        sampler.begin_compiling_sharded(dtype, tp.size)
        return cls(tp, sampler, shared, vocab_size)

    @property
    def own(self) -> Tensor:
        """Logits of this rank."""
        return self.shared.own

    def sample(self, own: Tensor, slots: Tensor, state: SlotState) -> Tensor:
        """Return tokens [n] int32 as `Sampler.sample` does; no row may be processed."""
        return self.sampler.sample_sharded(own, slots, state, self.tp, self.shared.addresses, self.vocab_size)

    def whole(self, own: Tensor) -> Tensor:
        """Return the logits [n, vocab_size], gathered from all ranks."""
        return self.tp.all_gather(own, self.vocab_size)
