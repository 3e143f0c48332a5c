"""Modules in the place of transformers', whose numeric probe found that they compute the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minisgl.distributed import TPGroup
from minisgl.kernel.base import Norm
from minisgl.models.generic.linears import MergedLinear, ReplacementLinear
from minisgl.models.generic.numeric_probe import GatedForm, NormForm
from minisgl.models.generic.sharding import Form, share
from minisgl.models.generic.step import Step


class ReplacementNorm(nn.Module):
    """RMSNorm of the last axis of any tensor."""

    def __init__(self, module: nn.Module, form: NormForm, step: Step) -> None:
        super().__init__()
        norm = form.params(module.get_parameter("weight").detach())
        self.weight = nn.Parameter(norm.weight, requires_grad=False)
        self.eps = norm.eps
        self._step = step

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._step.ctx.ops.rms_norm(rows, Norm(self.weight, self.eps)).view(x.shape)


class ReplacementGatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), with gate and up in one product."""

    def __init__(self, module: nn.Module, form: GatedForm, forms: tuple[Form, Form], tp: TPGroup) -> None:
        """Take over a block's layers; `forms`: how gate and up, and how down are divided."""
        super().__init__()
        begin, end = forms
        self.gate_up_proj = MergedLinear([module.get_submodule(name) for name in form.first], begin, tp)
        self.gate_up_proj.gated = True
        self.down_proj = ReplacementLinear(module.get_submodule(form.down), end, tp)
        self.activation = form.activation

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if not len(rows):  # an expert that no token chose
            return x.clone()
        first = self.gate_up_proj
        hidden = first.product.norm_gated_linear(rows, None, first.bias, activation=self.activation)
        y: Tensor = self.down_proj(hidden)
        return y.view(x.shape)


class ReplacementExperts(nn.Module):
    """Experts of which each token's are chosen: x [T, H], ids and weights [T, top_k] -> [T, H].

    A rank has a share of each expert's intermediate size, if they are divided.
    """

    def __init__(self, module: nn.Module, tp: TPGroup, step: Step, *, divided: bool) -> None:
        super().__init__()
        w13, w2 = module.get_parameter("gate_up_proj"), module.get_parameter("down_proj")
        self._tp = tp if divided and tp.size > 1 else None
        self._step = step
        if self._tp is not None:
            shares = [share(half, 1, tp) for half in w13.chunk(2, dim=1)]
            w13 = nn.Parameter(torch.cat(shares, dim=1), requires_grad=False)
            w2 = nn.Parameter(share(w2, 2, tp).contiguous(), requires_grad=False)
        self.w13, self.w2 = w13, w2

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        y = self._step.ctx.ops.moe_chosen(hidden_states, top_k_weights, top_k_index, self.w13, self.w2)
        return y if self._tp is None else self._tp.all_reduce(y)
