"""Muon: momentum whose update matrices are made orthogonal (Jordan et al., 2024), for the matrices inside
the layers. It learns in fewer steps than Adam, above all to look things up in the context."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

# Coefficients of the quintic Newton-Schulz iteration, from the original Muon.
_A, _B, _C = 3.4445, -4.7750, 2.0315


class Muon(torch.optim.Optimizer):
    """Each parameter must be a matrix. Matrices of one shape are worked on together."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                gradients = [p.grad for p in parameters if p.grad is not None]
                velocities = [self._velocity(p) for p in parameters]
                torch._foreach_lerp_(velocities, gradients, 1 - group["momentum"])
                nesterov = torch._foreach_lerp(gradients, velocities, group["momentum"])
                updates = orthogonal(torch.stack(nesterov)).to(parameters[0].dtype)
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(parameters, list(updates.unbind()), alpha=-scale)

    def _velocity(self, parameter: Tensor) -> Tensor:
        state: dict[str, Tensor] = self.state[parameter]
        if "velocity" not in state:
            state["velocity"] = torch.zeros_like(parameter)
        return state["velocity"]


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearest orthogonal matrices, roughly: their singular values end between 0.7 and 1.2."""
    x: Tensor = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.mT if tall else x
