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
        self.size = -(-vocab_size // tp.size)
        self.start = min(tp.rank * self.size, vocab_size)
        self.stop = min(self.start + self.size, vocab_size)


class VocabEmbedding(nn.Module):
    """[T] int64 token ids -> [T, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int, *, tp: TPGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.tp = tp
        self.vocab_size = vocab_size
        self.shard = VocabShard(vocab_size, tp)
        self.weight = vocab_weight(self.shard, hidden_size, dtype)

    def forward(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        if self.tp.size == 1:
            return ctx.ops.embed(ids, self.weight)
        return self.tp.all_reduce(ctx.ops.embed(ids, self.weight, self.shard.start))

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        yield vocab_slice(name, self.weight, self.vocab_size, self.shard, tied=False)


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
        self.vocab_size = vocab_size
        self.shard = VocabShard(vocab_size, tp)
        self.tied = tied_to is not None
        self.weight = tied_to.weight if tied_to else vocab_weight(self.shard, hidden_size, dtype)

    def forward(self, x: Tensor, norm: RMSNorm, ctx: ForwardContext) -> Tensor:
        if self.tp.size == 1 or ctx.sharded_logits:
            return self.product.norm_linear(x, norm.params, out=ctx.logits)
        return self.tp.all_gather(self.product.norm_linear(x, norm.params), self.vocab_size, ctx.logits)

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        yield vocab_slice(name, self.weight, self.vocab_size, self.shard, tied=self.tied)


def vocab_weight(shard: VocabShard, hidden_size: int, dtype: torch.dtype) -> nn.Parameter:
    weight = empty(shard.size, hidden_size, dtype=dtype)
    weight[shard.stop - shard.start :].zero_()
    return weight


def vocab_slice(name: str, weight: Tensor, vocab_size: int, shard: VocabShard, *, tied: bool) -> WeightSlice:
    target = weight[: shard.stop - shard.start]
    source = (slice(shard.start, shard.stop), slice(None))
    return WeightSlice(f"{name}.weight", (vocab_size, weight.shape[1]), source, target, tied)
