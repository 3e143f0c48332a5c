"""Feed-forward blocks: a gated one (Shazeer, 2020), and sparse ones of many gated experts (Shazeer et al., 2017).

A rank has an even share of each expert's intermediate size, as it has of a dense block, or some experts whole
(`MoEConfig.whole`). Either way it computes its part of every token's output, and the parts are summed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.distributed import TPGroup
from minisgl.distributed.group import Summed
from minisgl.kernel.base import ExpertBiases, ExpertKind, Mixture, Norm, Ops, SharedExpert
from minisgl.kernel.torch_ops import DenseWeight
from minisgl.layers.layer_config import MLPConfig, MoEConfig
from minisgl.layers.linear import ColumnParallelLinear, Part, RowParallelLinear, empty, unallocated, zeros
from minisgl.layers.norm import RMSNorm, params_of
from minisgl.layers.weight_slice import ExpertSlice, WeightSlice, beside, elsewhere, whole
from minisgl.quantization.expert_layout import PackedExperts


class GatedMLP(nn.Module):
    """down(activation(gate(norm(x))) * up(norm(x))): [T, hidden_size] -> [T, hidden_size]."""

    def __init__(self, config: MLPConfig, hidden_size: int, *, tp: TPGroup, dtype: torch.dtype) -> None:
        super().__init__()
        size, bias = config.intermediate_size, config.bias
        self.activation = config.activation
        parts = [Part.even(name, size, tp) for name in ("gate_proj", "up_proj")]
        self.gate_up_proj = ColumnParallelLinear(hidden_size, parts, bias=bias, dtype=dtype, gated=True)
        self.down_proj = RowParallelLinear(size, hidden_size, bias=bias, tp=tp, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        norm: RMSNorm | None,
        _: ForwardContext,
        residual: Tensor | None = None,
        next_norm: Norm | None = None,
    ) -> Summed:
        """Feed norm(x) forward. The down projection ends as `RowParallelLinear.add` does."""
        return self.down_proj.add(self._hidden(x, norm), residual, next_norm)

    def part(self, x: Tensor, before: Tensor | None = None) -> Tensor:
        """Return the rank's partial sum for x plus `before` [T, hidden_size], which may be overwritten."""
        y: Tensor = self.down_proj(self._hidden(x, None), before)
        return y

    def _hidden(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        gate_up = self.gate_up_proj
        return gate_up.product.norm_gated_linear(x, params_of(norm), gate_up.bias, activation=self.activation)


class SparseMLP(nn.Module):
    """experts(norm(x)) + shared_experts(norm(x)): [T, hidden_size] -> [T, hidden_size]. Every rank has the router.

    A shared expert with a gate (Qwen) is added times sigmoid(gate(norm(x))).
    """

    def __init__(self, config: MoEConfig, hidden_size: int, *, tp: TPGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.tp = tp
        self.router = Router(config, hidden_size, dtype=dtype)
        experts = InterleavedExperts if config.interleaved else Experts
        self.experts = experts(config, hidden_size, tp=tp, dtype=dtype)
        shared: GatedMLP | None = None
        if config.shared_intermediate_size:
            shared = GatedMLP(MLPConfig(config.shared_intermediate_size), hidden_size, tp=tp, dtype=dtype)
        # Named as in the checkpoints.
        self.shared_experts = None if config.shared_gate else shared
        self.shared_expert = shared if config.shared_gate else None
        self.shared_expert_gate = TokenGate(hidden_size, dtype=dtype) if config.shared_gate else None

    def forward(
        self,
        x: Tensor,
        norm: RMSNorm | None,
        ctx: ForwardContext,
        residual: Tensor | None = None,
        next_norm: Norm | None = None,
    ) -> Summed:
        """Send each token of norm(x) to its experts; sum as `RowParallelLinear.add` does."""
        y: Tensor
        router, mixture = self.router, self._mixture(len(x), ctx.ops)
        gate = None if mixture.shared is None or self.shared_expert_gate is None else self.shared_expert_gate.weight
        alone = self.tp.size == 1
        added = residual if alone else None
        normed, y = ctx.ops.norm_moe(x, params_of(norm), router.weight, router.bias, gate, mixture, added)
        if mixture.shared is None and self.shared_experts is not None:
            y = self.shared_experts.part(normed, y)
        if mixture.shared is None and self.shared_expert is not None and self.shared_expert_gate is not None:
            y = y.addcmul_(self.shared_expert.part(normed), self.shared_expert_gate(normed, ctx))
        if alone or residual is None:
            return y, None
        return self.tp.all_reduce_norm(y, residual, next_norm)

    def _mixture(self, tokens: int, ops: Ops) -> Mixture:
        """Return the experts, with the shared expert among them if the kernels merge it."""
        mixture = self.experts.mixture
        biases = mixture.biases._replace(choice=self.router.choice_bias)
        mixture = mixture._replace(biases=biases, shared=self._mergeable)
        return mixture if ops.merges_shared(tokens, mixture) else mixture._replace(shared=None)

    @property
    def _mergeable(self) -> SharedExpert | None:
        """Return the shared expert if the kernels can compute it like the others."""
        block, router, gate = self.shared_expert or self.shared_experts, self.router, self.shared_expert_gate
        if block is None or self.experts.activation != "silu" or not (router.bias is self.experts.w13_bias is None):
            return None
        w13, w2 = block.gate_up_proj.product, block.down_proj.product
        if not isinstance(w13, DenseWeight) or not isinstance(w2, DenseWeight):
            return None
        if gate is not None and (gate.weight.dtype != router.weight.dtype or router.choice_bias is not None):
            return None
        return SharedExpert(w13.tensor, w2.tensor, has_gate=gate is not None)

    @property
    def kernel_experts(self) -> ExpertKind:
        """Return the kind of experts for which kernels are compiled."""
        experts, router, kind = self.experts, self.router, self.experts.kind
        if router.weight.dtype == torch.float32 and experts.routing.plain and router.choice_bias is None:
            kind = kind._replace(logits=torch.float32)
        block = self.shared_expert or self.shared_experts
        if experts.packed or block is None or block.down_proj.weight.shape[1] % experts.share:
            return kind
        parts = block.down_proj.weight.shape[1] // experts.share
        return kind._replace(shared=parts, shared_gate=block is self.shared_expert)


class TokenGate(nn.Module):
    """sigmoid(weight @ x): [T, hidden_size] -> [T, 1], the same on every rank."""

    def __init__(self, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty(1, hidden_size, dtype=dtype)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        return ctx.ops.linear(x, self.weight).sigmoid_()

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        yield whole(f"{name}.weight", self.weight)


class Router(nn.Module):
    """The scores of the experts: weight [experts, hidden_size], by its own name in the checkpoint."""

    def __init__(self, config: MoEConfig, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty(config.num_experts, hidden_size, dtype=torch.float32 if config.float32_router else dtype)
        self.bias = zeros(config.num_experts, dtype=self.weight.dtype) if config.router_bias else None
        self.choice_bias = zeros(config.num_experts, dtype=torch.float32) if config.choice_bias else None
        self.checkpoint_name = config.router_name

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        gate = beside(name, self.checkpoint_name)
        yield whole(f"{gate}.weight", self.weight)
        if self.bias is not None:
            yield whole(f"{gate}.bias", self.bias)
        if self.choice_bias is not None:
            yield whole(f"{gate}.e_score_correction_bias", self.choice_bias)


class Experts(nn.Module):
    """A rank's experts, from the `first` on: w13 [experts, 2 * share, H], gates in front, w2 [experts, H, share].

    The share of the intermediate size is even, or all of whole experts. The matrices have no memory before they are
    filled, and `packed` experts, which stay quantized, never get it.
    """

    packed: tuple[PackedExperts, PackedExperts] | None = None

    def __init__(self, config: MoEConfig, hidden_size: int, *, tp: TPGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.routing, self.activation = config.routing, config.activation
        self.hidden_size = hidden_size
        self.intermediate_size = config.intermediate_size
        self.num_experts, self.whole = config.num_experts, config.whole
        self.adds_bias = config.whole or tp.rank == 0
        self.share = config.intermediate_size // (1 if config.whole else tp.size)
        self.start = 0 if config.whole else tp.rank * self.share
        self.held = config.held_by(tp.rank, tp.size)
        self.first, count = self.held.start, len(self.held)
        self.w13 = unallocated(count, 2 * self.share, hidden_size, dtype=dtype)
        self.w2 = unallocated(count, hidden_size, self.share, dtype=dtype)
        self.w13_bias = zeros(count, 2 * self.share, dtype=dtype) if config.expert_bias else None
        self.w2_bias = zeros(count, hidden_size, dtype=dtype) if config.expert_bias else None

    @property
    def mixture(self) -> Mixture:
        """Return what `Ops.moe` computes. A row-parallel product's bias is added by the first rank alone, a whole
        expert's by the rank that has it.
        """
        w13, w2 = self.packed or (self.w13, self.w2)
        biases = ExpertBiases(None, self.w13_bias, self.w2_bias if self.adds_bias else None)
        return Mixture(w13, w2, self.num_experts, self.routing, biases, self.activation, self.first)

    @property
    def kind(self) -> ExpertKind:
        """Return the kind of experts for which kernels are compiled."""
        form = self.packed[0].format if self.packed else None
        return ExpertKind(self.num_experts, self.routing.top_k, self.activation, form)

    def graph_safe(self, ops: Ops) -> bool:
        """True if the kernels do the same work whatever the data."""
        return ops.moe_graph_safe(self.mixture)

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        """Return three matrices per expert, such as `experts.0.gate_proj.weight`."""
        hidden, size = self.hidden_size, self.intermediate_size
        kept, every = slice(self.start, self.start + self.share), slice(None)
        for expert in range(self.num_experts):
            if expert not in self.held:
                for part, shape in (("gate", (size, hidden)), ("up", (size, hidden)), ("down", (hidden, size))):
                    yield elsewhere(f"{name}.{expert}.{part}_proj.weight", shape, self.w2)
                continue
            own = expert - self.first
            for part, target, rows in zip(("gate", "up"), self.w13[own].chunk(2), self._halves, strict=True):
                matrix, source = f"{name}.{expert}.{part}_proj.weight", (kept, every)
                yield ExpertSlice(matrix, (size, hidden), source, target, gated=True, first=own, rows=rows)
            matrix, source = f"{name}.{expert}.down_proj.weight", (every, kept)
            yield ExpertSlice(matrix, (hidden, size), source, self.w2[own], gated=False, first=own, rows=every)

    def stacked_slices(self, name: str) -> Iterator[WeightSlice]:
        """Return slices of stacked experts, `experts.gate_up_proj`, which transformers 5 has in memory and may save."""
        count, hidden, size = self.num_experts, self.hidden_size, self.intermediate_size
        every, experts = slice(None), self._experts
        for rows, begin in zip(self._halves, (self.start, size + self.start), strict=True):
            source, target = (experts, slice(begin, begin + self.share), every), self.w13[:, rows]
            shape = count, 2 * size, hidden
            yield ExpertSlice(f"{name}.gate_up_proj", shape, source, target, gated=True, first=0, rows=rows)
        source = (experts, every, slice(self.start, self.start + self.share))
        shape = count, hidden, size
        yield ExpertSlice(f"{name}.down_proj", shape, source, self.w2, gated=False, first=0, rows=every)

    @property
    def idle_weights(self) -> int:
        """Mean number of these weights that a token does not read."""
        return int((self.w13.numel() + self.w2.numel()) * (1 - self.routing.top_k / self.num_experts))

    @property
    def _experts(self) -> slice:
        """This rank's experts in a tensor of all."""
        return slice(self.held.start, self.held.stop)

    @property
    def _halves(self) -> tuple[slice, slice]:
        """Rows of the gates and of the ups."""
        return slice(0, self.share), slice(self.share, 2 * self.share)


class InterleavedExperts(Experts):
    """Experts that the checkpoint holds transposed, each gate's column before that of its up, with biases (gpt-oss)."""

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        count, hidden, size = self.num_experts, self.hidden_size, self.intermediate_size
        every, experts, kept = slice(None), self._experts, slice(self.start, self.start + self.share)
        for first, rows in enumerate(self._halves):
            columns = slice(2 * self.start + first, 2 * (self.start + self.share), 2)
            target, shape = self.w13[:, rows].transpose(1, 2), (count, hidden, 2 * size)
            source = experts, every, columns
            yield ExpertSlice(f"{name}.gate_up_proj", shape, source, target, gated=True, first=0, rows=rows)
            if self.w13_bias is not None:
                bias = self.w13_bias[:, rows]
                yield WeightSlice(f"{name}.gate_up_proj_bias", (count, 2 * size), (experts, columns), bias)
        target, shape = self.w2.transpose(1, 2), (count, size, hidden)
        source = experts, kept, every
        yield ExpertSlice(f"{name}.down_proj", shape, source, target, gated=False, first=0, rows=every)
        if self.w2_bias is not None:
            yield WeightSlice(f"{name}.down_proj_bias", (count, hidden), (experts, every), self.w2_bias)

    def stacked_slices(self, name: str) -> Iterator[WeightSlice]:  # noqa: ARG002
        """Nothing: there is one form."""
        return iter(())


def expert_labels(model: nn.Module) -> list[str]:
    """Tell in which formats experts stay quantized, and in how many layers."""
    layers = Counter(
        module.packed[0].label for module in model.modules() if isinstance(module, Experts) and module.packed
    )
    return [f"the experts of {count} layers in {label}" for label, count in layers.items()]
