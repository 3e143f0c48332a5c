"""Linear layers of transformers on the products of `Ops`: alone, or those that read one input merged into one product.

They take and return what nn.Linear does: [..., in] -> [..., out].
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn

from minisgl.distributed import TPGroup
from minisgl.layers.linear import Linear
from minisgl.models.generic.sharding import Form, padded_share, share


def _weight_of(module: nn.Module) -> Tensor:
    """Return the weight [out, in] of an nn.Linear, or of GPT-2's Conv1D, which holds it transposed."""
    weight: Tensor = module.get_parameter("weight")
    return weight if isinstance(module, nn.Linear) else weight.t()


def _bias_of(module: nn.Module) -> Tensor | None:
    bias = getattr(module, "bias", None)
    return bias if isinstance(bias, Tensor) else None


@dataclass
class LinearInputs:
    """Records which linear layers of a parent are called with the same tensor, in a model that is probed."""

    module_names: Mapping[nn.Module, str]
    _calls: list[tuple[str, Tensor]] = field(default_factory=list)  # name of a layer, and what it was given

    def watch(self, model: nn.Module) -> None:
        """Begin to record."""
        for module in model.modules():
            if type(module) is nn.Linear:
                module.register_forward_pre_hook(self._note)

    def _note(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._calls.append((self.module_names[module], args[0]))

    def shared(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of those that read one tensor, once each, in the order of their calls."""
        counts = Counter(name for name, _ in self._calls)
        groups: dict[tuple[str, int], list[str]] = defaultdict(list)
        for name, x in self._calls:
            if counts[name] == 1:
                groups[name.rpartition(".")[0], id(x)].append(name)
        return tuple(tuple(names) for names in groups.values() if len(names) > 1)


class ReplacementLinear(Linear):
    """A linear layer, divided among ranks as its form says."""

    def __init__(self, module: nn.Module, form: Form, tp: TPGroup) -> None:
        super().__init__()
        self._form, self._tp = form, tp
        weight, bias = _weight_of(module), _bias_of(module)
        self.out_features = len(weight)
        if form == "column":
            weight, bias = share(weight, 0, tp), None if bias is None else share(bias, 0, tp)
        elif form == "gathered column":
            weight, bias = padded_share(weight, tp), None if bias is None else padded_share(bias, tp)
        elif form != "whole":
            weight = share(weight, 1, tp)
        # An unchanged parameter stays tied to the one that it was tied to.
        own = module.get_parameter("weight")
        self.weight = own if weight is own else nn.Parameter(weight.contiguous(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.contiguous(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self._form in ("row", "split row"):
            y = self._sum(share(rows, 1, self._tp).contiguous() if self._form == "split row" else rows)
        else:
            y = self.product.linear(rows, self.bias)
        if self._form == "gathered column":
            y = self._tp.all_gather(y, self.out_features)
        return y.view(*x.shape[:-1], y.shape[-1])

    def _sum(self, rows: Tensor) -> Tensor:
        if self._tp.size == 1:
            return self.product.linear(rows, self.bias)
        y = self._tp.all_reduce(self.product.linear(rows))
        return y if self.bias is None else y.add_(self.bias)


class MergedLinear(Linear):
    """Linear layers whose weights are one matrix. The first of them that is called multiplies for all.

    The others find their columns if they are called with the very same tensor; with another one they multiply anew.
    """

    def __init__(self, modules: Sequence[nn.Module], form: Form, tp: TPGroup) -> None:
        super().__init__()
        if form not in ("whole", "column"):
            raise ValueError(f"no merged product is divided by {form}")
        weights, found = [_weight_of(module) for module in modules], [_bias_of(module) for module in modules]
        biases = [
            weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in zip(weights, found, strict=True)
        ]
        if form == "column":
            weights = [share(weight, 0, tp) for weight in weights]
            biases = [share(bias, 0, tp) for bias in biases]
        self.widths = [len(weight) for weight in weights]
        self.weight = nn.Parameter(torch.cat(weights), requires_grad=False)
        has_bias = any(bias is not None for bias in found)
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if has_bias else None
        self._input: Tensor | None = None
        self._waiting: dict[int, Tensor] = {}  # results of the last product for layers that have not been called since

    def part(self, index: int, x: Tensor) -> Tensor:
        """Return one layer's part of the product of x."""
        if x is not self._input or index not in self._waiting:
            y = self.product.linear(x.reshape(-1, x.shape[-1]), self.bias).view(*x.shape[:-1], -1)
            self._input, self._waiting = x, dict(enumerate(torch.split(y, self.widths, dim=-1)))
        mine = self._waiting.pop(index)
        if not self._waiting:
            self._input = None
        return mine


class MergedPart(nn.Module):
    """One of the layers of a MergedLinear, which their parent owns."""

    def __init__(self, merged: MergedLinear, index: int) -> None:
        super().__init__()
        self._merged = (merged,)  # in a tuple it is not a submodule of each
        self._index = index
        ends = [sum(merged.widths[:end]) for end in range(len(merged.widths) + 1)]
        self._rows = slice(*list(pairwise(ends))[index])

    @property
    def weight(self) -> Tensor:
        """This layer's rows, for modules that look at their dtype."""
        return self._merged[0].weight[self._rows]

    def forward(self, x: Tensor) -> Tensor:
        return self._merged[0].part(self._index, x)
