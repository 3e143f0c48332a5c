"""Functions behind transformers' attention registry: first a probe of what each layer asks for, then paged attention.

Decoders that support the registry hand every layer's rotated q, k and v to a function by name, and make their masks by
another one. Ours pass the call on to the object that the layer's module carries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.kernel.base import Heads
from minisgl.layers.attention import attend
from minisgl.layers.layer_config import NO_ROPE, AttentionConfig
from minisgl.models.config.model_config import UnsupportedModel

PAGED = "minisgl"  # in the registry; it has no masks, and transformers then makes none
PROBED = "minisgl-probe"
_SEAT = "minisgl_seat"  # attribute of a module
_WINDOW = "minisgl_window"  # attribute of a probe's mask


class Seat(Protocol):
    """Attends for a module."""

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """Attend with q [1, heads, T, head_dim], k and v [1, kv_heads, T, head_dim]: [1, T, heads, head_dim]."""
        ...


def register() -> None:
    """Enter the functions into transformers' registries; again is harmless."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in (PAGED, PROBED):
        ALL_ATTENTION_FUNCTIONS.register(name, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PROBED, _make_mask)


def seat(module: nn.Module, occupant: Seat) -> None:
    """Let `occupant` attend for the module."""
    object.__setattr__(module, _SEAT, occupant)  # past nn.Module, which would make a submodule of one that is a module


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    occupant: Seat = getattr(module, _SEAT)
    return occupant(module, query, key, value, attention_mask, options), None


def _make_mask(mask_function: Any, q_length: int, **_: Any) -> Tensor:
    """Return a mask that carries the window which it leaves open."""
    mask = torch.empty(1, 1, q_length, q_length, dtype=torch.bool, device="meta")
    setattr(mask, _WINDOW, _window_of(mask_function))
    return mask


def _window_of(mask_function: Any, far: int = 1 << 17) -> int | None:
    """Return the number of positions that a far query sees, None for all. UnsupportedModel if they are not the last."""
    windows = []
    for query in (far, far - 1):
        zero, position = (torch.tensor(value, device="cpu") for value in (0, query))
        sees = mask_function(zero, zero, position, torch.arange(far + 2, device="cpu"))
        count = int(sees.sum())
        if not bool(sees[query + 1 - count : query + 1].all()):
            raise UnsupportedModel("its attention mask is neither causal nor a sliding window")
        windows.append(None if count == query + 1 else count)
    if windows[0] != windows[1]:
        raise UnsupportedModel("its attention mask is neither causal nor a sliding window")
    return windows[0]


@dataclass
class Probe:
    """Records what each attention of a model on the meta device asks for, in the order of the calls."""

    module_names: Mapping[nn.Module, str]
    names: list[str] = field(default_factory=list)
    configs: list[AttentionConfig] = field(default_factory=list)

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        heads, head_dim = q.shape[1], q.shape[3]
        name = self.module_names[module]
        if name in self.names:
            raise UnsupportedModel("a layer attends twice")
        if v.shape != k.shape or k.shape[3] != head_dim or k.shape[2] != q.shape[2]:
            raise UnsupportedModel("keys and values of a token have other sizes than its queries, or other tokens")
        if not (options.get("is_causal") or getattr(module, "is_causal", True)):
            raise UnsupportedModel("its attention is bidirectional")
        if options.get("softcap") is not None:
            raise UnsupportedModel("its attention has a softcap")
        self.names.append(name)
        self.configs.append(
            AttentionConfig(
                num_heads=heads,
                num_kv_heads=k.shape[1],
                head_dim=head_dim,
                rope=NO_ROPE,  # q and k come rotated
                scale=head_dim**-0.5 if options.get("scaling") is None else float(options["scaling"]),
                window=_window(mask, options.get("sliding_window")),
                has_sinks=options.get("s_aux") is not None,
            )
        )
        return q.transpose(1, 2)


def _window(mask: Tensor | None, option: int | None) -> int | None:
    """Return a layer's window by its mask, or, where its model makes none, by its option."""
    if mask is None:
        return option
    if not hasattr(mask, _WINDOW):
        raise UnsupportedModel("it makes its attention mask itself")
    window: int | None = getattr(mask, _WINDOW)
    return window


@dataclass
class Step:
    """The step under way."""

    ctx: ForwardContext | None = None


@dataclass(frozen=True)
class PagedSeat:
    """Attention of one layer over the paged KV pool, for the tokens of all sequences of a step."""

    layer: int
    config: AttentionConfig
    unrotated: Tensor  # [max_positions, head_dim]: see Heads.cos_sin
    step: Step

    def __call__(
        self,
        module: nn.Module,  # noqa: ARG002
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,  # noqa: ARG002 (the pool's pages tell sequences apart)
        options: dict[str, Any],
    ) -> Tensor:
        if self.step.ctx is None:
            raise RuntimeError("no step is under way")
        qkv = torch.cat((q[0], k[0], v[0])).transpose(0, 1).flatten(1)
        heads = Heads(self.config.num_heads, self.config.num_kv_heads, self.unrotated, q_norm=None, k_norm=None)
        return attend(self.layer, qkv, heads, options.get("s_aux"), self.step.ctx).unsqueeze(0)
