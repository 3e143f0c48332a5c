"""Rotary positions by our kernels in models of transformers: queries and keys reach attention unrotated.

A module's forward finds the function that rotates among the globals of its file. It gets a copy of its forward whose
globals have ours there, which hands q and k on as they are; its decorators are kept. That is right only if the function
is the plain rotation of halves, and if what it returns is what attends, untouched: both are looked at in the probe of
the model, by numbers and by identity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from minisgl.models.config.model_config import RotaryCall

_NAME = "apply_rotary_pos_emb"

Rotate = Callable[..., tuple[Tensor, Tensor]]


@dataclass
class RotationProbe:
    """Records which cosines rotate what, in a model that is probed on the meta device."""

    module_names: Mapping[nn.Module, str]
    _made: list[tuple[RotaryCall, Tensor]] = field(default_factory=list)
    _rotated: dict[nn.Module, tuple[Tensor, Tensor, RotaryCall]] = field(default_factory=dict)

    def watch(self, model: nn.Module) -> None:
        """Begin to record what a model's modules do."""
        for module in model.modules():
            if type(module).__name__.endswith("RotaryEmbedding"):
                module.register_forward_hook(self._note_table, with_kwargs=True)
            rotate = _rotation_of(module)
            if rotate is not None and _rotates_halves(rotate):
                replace_rotation(module, self._recorder(module, rotate))

    def call_of(self, module: nn.Module, q: Tensor, k: Tensor) -> RotaryCall | None:
        """Return what made the cosines of a module's q and k, if these attend as they were rotated."""
        found = self._rotated.get(module)
        return found[2] if found is not None and found[0] is q and found[1] is k else None

    def _note_table(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        kept = {name: value for name, value in kwargs.items() if name not in ("x", "position_ids")}
        more = args[2:]
        values = (*more, *kept.values())
        if isinstance(output, tuple) and all(isinstance(value, str | int | float | None) for value in values):
            call = RotaryCall(self.module_names[module], more, tuple(kept.items()))
            self._made.append((call, output[0]))

    def _recorder(self, module: nn.Module, rotate: Rotate) -> Rotate:
        def record(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            if len(args) != 4 or kwargs:
                return rotate(*args, **kwargs)
            q, k, cos, _ = args
            call = next((call for call, made in self._made if made is cos), None)
            if call is None or cos.shape[-1] != q.shape[-1]:
                return rotate(*args)
            rotated = q.clone(), k.clone()
            self._rotated[module] = (*rotated, call)
            return rotated

        return record


def leave_unrotated(module: nn.Module) -> None:
    """Let a module hand on q and k as they are."""
    replace_rotation(module, lambda q, k, *_: (q, k))


def replace_rotation(module: nn.Module, rotate: Rotate) -> None:
    """Let a module of which `_rotation_of` finds the rotation call another one."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType):
        raise TypeError("the module's forward is no plain function")
    object.__setattr__(module, "forward", MethodType(_with_rotation(forward, rotate), module))


def _with_rotation(forward: FunctionType, rotate: Rotate) -> FunctionType:
    """Return a copy of a forward, and of the decorators around it, that calls another rotation."""
    scope, closure = forward.__globals__, forward.__closure__
    decorated = getattr(forward, "__wrapped__", None)
    if decorated is None:
        scope = {**scope, _NAME: rotate}
    else:
        made = _with_rotation(decorated, rotate)
        closure = tuple(CellType(made) if cell.cell_contents is decorated else cell for cell in closure or ())
    copy = FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, closure)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def rotation_table(model: nn.Module, call: RotaryCall, max_positions: int) -> Tensor | None:
    """[max_positions, head_dim] float32 as in Heads.cos_sin; None if cosines are not those of two equal halves."""
    rotary = model.get_submodule(call.name)
    device = next(iter(rotary.buffers())).device
    x = torch.empty(0, dtype=torch.float32, device=device)
    positions = torch.arange(max_positions, device=device).unsqueeze(0)
    with torch.no_grad():
        cos, sin = rotary(x, positions, *call.args, **dict(call.kwargs))
    halves = [part.float()[0].chunk(2, dim=-1) for part in (cos, sin)]
    if not cos.is_meta and not all(torch.equal(first, second) for first, second in halves):
        return None
    return torch.cat([first for first, _ in halves], dim=-1)


def _rotation_of(module: nn.Module) -> Rotate | None:
    """Return the function by which a module's forward rotates."""
    forward: Any = type(module).forward
    while isinstance(forward, FunctionType) and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    if not isinstance(forward, FunctionType) or _NAME not in forward.__code__.co_names:
        return None
    rotate: Rotate | None = forward.__globals__.get(_NAME)
    return rotate


@torch.no_grad()
def _rotates_halves(rotate: Rotate) -> bool:
    """Return True if the function turns q and k [1, heads, T, dim] in pairs (i, i + dim / 2)."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 3, 8, generator=generator, device="cpu") for heads in (4, 2))
    cos, sin = (torch.randn(1, 3, 4, generator=generator, device="cpu") for _ in "cs")
    try:
        found = rotate(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    except Exception:  # from any module of transformers: it rotates in another way
        return False
    for before, after in zip((q, k), found, strict=True):
        a, b = before.chunk(2, dim=-1)
        wanted = torch.cat((a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]), dim=-1)
        if after.shape != wanted.shape or not torch.allclose(after, wanted, 1e-5, 1e-6):
            return False
    return True
