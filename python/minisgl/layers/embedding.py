"""The vocabulary's two matrices, sharded by tokens among ranks; the last ranks' shards are padded with zeros."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.distributed import TPGroup
from minisgl.layers.linear import Linear, empty
from minisgl.layers.norm import RMSNorm
from minisgl.layers.weight_slice import WeightSlice


class VocabShard:
    """The token ids [start, stop) of one rank, padded to `size` rows."""

    def __init__(self, vocab_size: int, tp: TPGroup) -> None:
        self.tp, self.vocab_size = tp, vocab_size
        self.size = -(-vocab_size // tp.size)
        self.start = min(tp.rank * self.size, vocab_size)
        self.stop = min(self.start + self.size, vocab_size)

    def make_weight(self, width: int, dtype: torch.dtype) -> nn.Parameter:
        """Return a matrix [size, width] whose padding is zero."""
        weight = empty(self.size, width, dtype=dtype)
        weight[self.stop - self.start :].zero_()
        return weight

    def embed(self, ids: Tensor, weight: Tensor, ctx: ForwardContext) -> Tensor:
        """[T] int64 token ids of all ranks -> [T, width]."""
        if self.tp.size == 1:
            return ctx.ops.embed(ids, weight)
        return self.tp.all_reduce(ctx.ops.embed(ids, weight, self.start))

    def weight_slice(self, name: str, weight: Tensor, *, tied: bool = False) -> WeightSlice:
        """Return this rank's part of the matrix [vocab_size, width] of this name."""
        source = (slice(self.start, self.stop), slice(None))
        target = weight[: self.stop - self.start]
        return WeightSlice(f"{name}.weight", (self.vocab_size, weight.shape[1]), source, target, tied)


class VocabEmbedding(nn.Module):
    """[T] int64 token ids -> [T, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int, *, tp: TPGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.shard = VocabShard(vocab_size, tp)
        self.weight = self.shard.make_weight(hidden_size, dtype)

    def forward(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        return self.shard.embed(ids, self.weight, ctx)

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        yield self.shard.weight_slice(name, self.weight)


class LMHead(Linear):
    """norm(x) of [S, hidden_size] -> logits [S, vocab_size] on every rank. A tied head uses the embedding's weight.

    `ctx.sharded_logits`: logits of the rank's shard alone, with its padding.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied_to: VocabEmbedding | None,
        tp: TPGroup,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.shard = VocabShard(vocab_size, tp)
        self.tied = tied_to is not None
        self.weight = tied_to.weight if tied_to else self.shard.make_weight(hidden_size, dtype)

    def forward(self, x: Tensor, norm: RMSNorm, ctx: ForwardContext) -> Tensor:
        if self.tp.size == 1 or ctx.sharded_logits:
            return self.product.norm_linear(x, norm.params, out=ctx.logits)
        return self.tp.all_gather(self.product.norm_linear(x, norm.params), self.shard.vocab_size, ctx.logits)

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        yield self.shard.weight_slice(name, self.weight, tied=self.tied)
