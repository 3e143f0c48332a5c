"""A sparse feed-forward block: a router sends each token to a few of many gated experts (Shazeer et al., 2017).

Every rank has all experts, and of each an even share of its intermediate size, as of a dense block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.distributed.group import TPGroup
from minisgl.kernel.base import Ops
from minisgl.layers.linear import empty
from minisgl.layers.norm import RMSNorm
from minisgl.layers.pieces import Piece, whole
from minisgl.models.config import MoeConfig


class SparseMLP(nn.Module):
    """x + experts(norm(x)): [T, hidden_size] -> [T, hidden_size]. Every rank has the router."""

    def __init__(self, hidden_size: int, moe: MoeConfig, *, tp: TPGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.tp = tp
        self.moe = moe
        self.router = Router(hidden_size, moe.num_experts, dtype=dtype)
        self.experts = Experts(hidden_size, moe, tp=tp, dtype=dtype)

    def forward(self, x: Tensor, norm: RMSNorm, ctx: ForwardContext) -> Tensor:
        normed = norm(x, ctx)
        y = ctx.ops.moe(
            normed,
            ctx.ops.linear(normed, self.router.weight),
            self.experts.w13,
            self.experts.w2,
            top_k=self.moe.experts_per_token,
            renormalize=self.moe.norm_topk_prob,
        )
        return self.tp.all_reduce(y).add_(x)

    @property
    def idle_weights(self) -> int:
        """Of the experts that a token is not sent to."""
        chosen = self.moe.experts_per_token / self.moe.num_experts
        return int((self.experts.w13.numel() + self.experts.w2.numel()) * (1 - chosen))

    def graph_safe(self, ops: Ops) -> bool:
        """Whether its work is the same whatever the data."""
        return ops.moe_graph_safe(self.experts.w13, self.experts.w2, self.moe.experts_per_token)


class Router(nn.Module):
    """The scores of the experts: weight [experts, hidden_size], in the checkpoint `gate` beside this module."""

    def __init__(self, hidden_size: int, num_experts: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty(num_experts, hidden_size, dtype=dtype)

    def pieces(self, name: str) -> Iterator[Piece]:
        yield whole(f"{name.rpartition('.')[0]}.gate.weight", self.weight)


class Experts(nn.Module):
    """All experts' matrices: w13 [experts, 2 * I / size, H] with the gate first, w2 [experts, H, I / size]."""

    def __init__(self, hidden_size: int, moe: MoeConfig, *, tp: TPGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.intermediate_size = moe.intermediate_size
        self.share = moe.intermediate_size // tp.size
        self.start = tp.rank * self.share
        self.w13 = empty(moe.num_experts, 2 * self.share, hidden_size, dtype=dtype)
        self.w2 = empty(moe.num_experts, hidden_size, self.share, dtype=dtype)

    def pieces(self, name: str) -> Iterator[Piece]:
        """Three matrices an expert: `experts.0.gate_proj.weight`."""
        hidden, size = self.hidden_size, self.intermediate_size
        kept, every = slice(self.start, self.start + self.share), slice(None)
        for expert, (w13, w2) in enumerate(zip(self.w13, self.w2, strict=True)):
            gate, up = w13.chunk(2)
            yield Piece(f"{name}.{expert}.gate_proj.weight", (size, hidden), (kept, every), gate)
            yield Piece(f"{name}.{expert}.up_proj.weight", (size, hidden), (kept, every), up)
            yield Piece(f"{name}.{expert}.down_proj.weight", (hidden, size), (every, kept), w2)

    def stacked_pieces(self, name: str) -> Iterator[Piece]:
        """As transformers 5 holds them in memory, and saves them if told so: `experts.gate_up_proj`."""
        count, hidden, size = len(self.w13), self.hidden_size, self.intermediate_size
        every = slice(None)
        for target, begin in zip(self.w13.chunk(2, dim=1), (self.start, size + self.start), strict=True):
            kept = slice(begin, begin + self.share)
            yield Piece(f"{name}.gate_up_proj", (count, 2 * size, hidden), (every, kept, every), target)
        kept = slice(self.start, self.start + self.share)
        yield Piece(f"{name}.down_proj", (count, hidden, size), (every, every, kept), self.w2)
