"""Numeric probes: what a module of transformers computes, found by running its own forward on random numbers.

A probe runs a copy of the module with small or random weights on the default device, which `replace` makes the CPU. The
module itself may be on the meta device. Inputs range from small to large, so that a clamp or a cap is seen.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import get_args

import torch
from torch import Tensor, nn

from minisgl.kernel.base import Activation, Norm
from minisgl.kernel.torch_ops import TorchOps, activate_and_mul

_SCALES = (1e-3, 0.1, 1.0, 10.0, 1e3)
_EPS = ("variance_epsilon", "eps", "epsilon")  # names in transformers' norms
_SMALL, _WIDE, _EXPERTS = 8, 16, 4  # sizes of a stand-in's layers


@dataclass(frozen=True, slots=True)
class NormForm:
    """Recipe for an RMSNorm of `Ops` from a norm's weight."""

    eps: float
    float32: bool  # the weight is read as float32
    unit_offset: bool  # and stands for weight + 1

    def params(self, weight: Tensor) -> Norm:
        """Return the norm of a weight [n]."""
        return Norm((weight.float() if self.float32 else weight) + (1.0 if self.unit_offset else 0.0), self.eps)


@dataclass(frozen=True, slots=True)
class GatedForm:
    """Names of the layers in down(activation(gate(x)) * up(x))."""

    first: tuple[str, ...]  # gate and up, or one layer that is both, the gate first
    down: str
    activation: Activation


@torch.no_grad()
def norm_form(module: nn.Module) -> NormForm | None:
    """Return the form that agrees bit for bit in bfloat16 and in float32 but for rounding; None if none does."""
    weight = module._parameters.get("weight")
    eps = next((getattr(module, name) for name in _EPS if hasattr(module, name)), None)
    if weight is None or weight.ndim != 1 or not isinstance(eps, float):
        return None
    if len(module._parameters) > 1 or module._buffers or module._modules:
        return None
    generator = torch.Generator().manual_seed(0)
    inputs = _inputs(len(weight), generator)
    random = torch.rand(len(weight), generator=generator) + 0.5
    forms = [NormForm(eps, float32, offset) for float32, offset in ((False, False), (True, False), (True, True))]
    for form in forms:
        if all(
            _norms_alike(module, form, inputs.to(dtype), random.to(dtype)) for dtype in (torch.bfloat16, torch.float32)
        ):
            return form
    return None


def _norms_alike(module: nn.Module, form: NormForm, x: Tensor, weight: Tensor) -> bool:
    stand_in = copy.copy(module)
    stand_in._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    try:
        theirs = stand_in(x)
    except Exception:  # from any module of transformers: it is not a norm
        return False
    if not isinstance(theirs, Tensor) or theirs.shape != x.shape or theirs.dtype != x.dtype:
        return False
    ours = TorchOps().rms_norm(x, form.params(weight))
    return torch.equal(ours, theirs) if x.dtype == torch.bfloat16 else torch.allclose(ours, theirs, 1e-5, 1e-6)


@torch.no_grad()
def gated_form(module: nn.Module) -> GatedForm | None:
    """Return how a gated feed-forward block names its layers; None if a module is none, or of another activation."""
    linears = {name: child for name, child in module._modules.items() if type(child) is nn.Linear}
    others = [child for name, child in module._modules.items() if child is not None and name not in linears]
    if len(linears) not in (2, 3) or module._parameters or module._buffers:
        return None
    if any(list(child.parameters()) for child in others):
        return None
    generator = torch.Generator().manual_seed(0)
    x = _inputs(_SMALL, generator)
    for down in linears:
        first = tuple(name for name in linears if name != down)
        if not _fit([linears[name] for name in first], linears[down]):
            continue
        stand_in, small = _small_block(module, linears, down, generator)
        try:
            theirs = stand_in(x)
        except Exception:  # from any module of transformers: it is no such block
            continue
        if not isinstance(theirs, Tensor) or theirs.shape != x.shape:
            continue
        for order, activation in product(permutations(first), get_args(Activation)):
            hidden = activate_and_mul(torch.cat([small[name](x) for name in order], dim=-1), activation)
            if _alike(small[down](hidden), theirs):
                return GatedForm(order, down, activation)
    return None


def _fit(first: Sequence[nn.Linear], down: nn.Linear) -> bool:
    """Return True if the layers' sizes are those of a gated block."""
    sizes = {(layer.in_features, layer.out_features * len(first), layer.bias is None) for layer in first}
    return len(sizes) == 1 and sizes.pop()[:2] == (down.out_features, 2 * down.in_features)


def _alike(ours: Tensor, theirs: Tensor) -> bool:
    """Return True if rows differ by rounding alone."""
    return bool(((ours - theirs).abs() <= 1e-4 * theirs.abs().amax(-1, keepdim=True)).all())


def _small_block(
    module: nn.Module, linears: dict[str, nn.Linear], down: str, generator: torch.Generator
) -> tuple[nn.Module, dict[str, nn.Linear]]:
    """Return a copy of the block with small layers, and these."""
    small = {}
    for name, layer in linears.items():
        sizes = (_WIDE, _SMALL) if name == down else (_SMALL, 2 * _WIDE // (len(linears) - 1))
        made = nn.Linear(*sizes, bias=layer.bias is not None, dtype=torch.float32)
        for parameter in made.parameters():
            parameter.normal_(generator=generator)
        small[name] = made
    stand_in = copy.copy(module)
    stand_in._modules = {**module._modules, **small}
    return stand_in, small


@torch.no_grad()
def holds_plain_experts(module: nn.Module) -> bool:
    """Return True if a module is experts as `Ops.moe_chosen` has them: gate_up_proj [E, 2 * I, H] with the gate first,
    down_proj [E, H, I], silu, no biases; called with x [T, H], ids and weights [T, top_k].
    """
    if set(module._parameters) != {"gate_up_proj", "down_proj"} or module._buffers:
        return False
    count, width, hidden = module.get_parameter("gate_up_proj").shape
    if tuple(module.get_parameter("down_proj").shape) != (count, hidden, width // 2):
        return False
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate_up_proj": (_EXPERTS, 2 * _WIDE, _SMALL), "down_proj": (_EXPERTS, _SMALL, _WIDE)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    stand_in = copy.copy(module)
    stand_in._parameters = {name: nn.Parameter(weight, requires_grad=False) for name, weight in weights.items()}
    small = {count: _EXPERTS, hidden: _SMALL, width // 2: _WIDE, width: 2 * _WIDE}
    for name, value in vars(module).items():
        if type(value) is int and value in small:
            object.__setattr__(stand_in, name, small[value])
    x = _inputs(_SMALL, generator)[0]
    chosen = torch.stack([torch.randperm(_EXPERTS, generator=generator)[:2] for _ in x])
    shares = torch.rand(len(x), 2, generator=generator)
    try:
        theirs = stand_in(x, chosen, shares)
    except Exception:  # from any module of transformers: its experts are others
        return False
    if not isinstance(theirs, Tensor) or theirs.shape != x.shape:
        return False
    ours = TorchOps().moe_chosen(x, shares, chosen, weights["gate_up_proj"], weights["down_proj"])
    return _alike(ours, theirs)


def _inputs(size: int, generator: torch.Generator) -> Tensor:
    """[1, 5, size] float32, a row of each scale."""
    scales = torch.tensor(_SCALES).view(1, -1, 1)
    return torch.randn(1, len(_SCALES), size, generator=generator) * scales
