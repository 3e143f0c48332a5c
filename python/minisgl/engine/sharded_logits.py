"""Logits of a decode that stay where they are computed: each GPU has those of its shard of the vocabulary.

Without it every rank gathers [rows, vocab_size] in every step, 9.7 MB from each of two for 64 rows of Qwen3. Sampling
needs little of that: the largest logit and the sum of each 512, and then the few groups that can matter, which
csrc/sample.cu reads from the GPU that has them. All ranks compute the same from the same bits, so they agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.distributed import TPGroup
from minisgl.distributed.group import SharedRows
from minisgl.engine.cuda_sampler import CudaSampler
from minisgl.engine.state import SlotState


@dataclass(frozen=True, slots=True)
class ShardedLogits:
    """This rank's logits [rows, ids] of a step, in memory that all ranks read, and the sampling from all of them.

    A rank may overwrite its own in the next step: it gets so far only when the others, behind their sampling, come to
    that step's first all-reduce.
    """

    tp: TPGroup
    sampler: CudaSampler
    shared: SharedRows
    vocab_size: int

    @classmethod
    def make(
        cls, tp: TPGroup, sampler: CudaSampler, *, rows: int, vocab_size: int, dtype: torch.dtype
    ) -> ShardedLogits | None:
        """Return logits of up to `rows` rows; None where ranks cannot read one another's memory."""
        if not sampler.samples_sharded(-(-vocab_size // tp.size), tp.size):
            return None
        shared = tp.share_rows(rows, -(-vocab_size // tp.size), dtype)
        if shared is None:
            return None
        sampler.begin_compiling_sharded(dtype, tp.size)
        return cls(tp, sampler, shared, vocab_size)

    @property
    def own(self) -> Tensor:
        """This rank's part."""
        return self.shared.own

    def sample(self, own: Tensor, slots: Tensor, state: SlotState) -> Tensor:
        """Return tokens [n] int32 of rows that are not processed, as `Sampler.sample` does."""
        return self.sampler.sample_sharded(own, slots, state, self.tp, self.shared.addresses, self.vocab_size)

    def whole(self, own: Tensor) -> Tensor:
        """Gather the logits [n, vocab_size]."""
        return self.tp.all_gather(own, self.vocab_size)
