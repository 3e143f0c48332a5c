"""Functions for transformers' attention registry: a probe that records each layer's attention, and paged attention.

Decoders that support the registry hand every layer's rotated q, k and v to a function by name, and make their masks by
another one. Ours pass the call on to the object that the layer's module carries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl.distributed import TPGroup
from minisgl.kernel.base import Heads
from minisgl.layers.attention import attend
from minisgl.layers.layer_config import NO_ROPE, AttentionConfig
from minisgl.models.config.model_config import RotaryCall, UnsupportedModel
from minisgl.models.generic.rotation import RotationProbe
from minisgl.models.generic.sharding import share
from minisgl.models.generic.step import Step

PAGED = "minisgl"  # in the registry; it has no masks, and transformers then makes none
PROBED = "minisgl-probe"
_FUNCTION = "minisgl_attention"  # attribute of a module
_WINDOW = "minisgl_window"  # attribute of a probe's mask
_FAR = 1 << 17  # position beyond every window


class AttentionFunction(Protocol):
    """Attends for a module."""

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any], /
    ) -> Tensor:
        """Attend with q [1, heads, T, head_dim], k and v [1, kv_heads, T, head_dim]: [1, T, heads, head_dim]."""


def register() -> None:
    """Enter the functions into transformers' registries; again is harmless."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in (PAGED, PROBED):
        ALL_ATTENTION_FUNCTIONS.register(name, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PROBED, _make_mask)


def set_attention(module: nn.Module, function: AttentionFunction) -> None:
    """Let `function` attend for the module."""
    object.__setattr__(module, _FUNCTION, function)  # past nn.Module, which would register a module as a submodule


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    function: AttentionFunction = getattr(module, _FUNCTION)
    return function(module, query, key, value, attention_mask, options), None


def _make_mask(mask_function: Any, q_length: int, **_: Any) -> Tensor:
    """Return a mask that carries the window which it leaves open."""
    mask = torch.empty(1, 1, q_length, q_length, dtype=torch.bool, device="meta")
    setattr(mask, _WINDOW, _window_of(mask_function))
    return mask


def _window_of(mask_function: Any) -> int | None:
    """Return the number of positions that a far query sees, None for all. UnsupportedModel if they are not the last."""
    windows = []
    for query in (_FAR, _FAR - 1):
        zero, position = (torch.tensor(value, device="cpu") for value in (0, query))
        sees = mask_function(zero, zero, position, torch.arange(_FAR + 2, device="cpu"))
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
    rotations: RotationProbe
    names: list[str] = field(default_factory=list)
    configs: list[AttentionConfig] = field(default_factory=list)
    rotaries: list[RotaryCall | None] = field(default_factory=list)

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        heads, head_dim = q.shape[1], q.shape[3]
        name = self.module_names[module]
        if name in self.names:
            raise UnsupportedModel("a layer attends twice")
        if v.shape[:3] != k.shape[:3] or k.shape[2] != q.shape[2]:
            raise UnsupportedModel("keys and values are of other tokens or heads than one another or the queries")
        if heads % k.shape[1]:
            raise UnsupportedModel(f"{heads} query heads are not a multiple of {k.shape[1]} KV heads")
        if k.shape[3] != head_dim or v.shape[3] > head_dim:
            raise UnsupportedModel("keys are of another size than queries, or values of a larger one")
        if not (options.get("is_causal") or getattr(module, "is_causal", True)):
            raise UnsupportedModel("its attention is bidirectional")
        if options.get("softcap") is not None:
            raise UnsupportedModel("its attention has a softcap")
        self.names.append(name)
        self.rotaries.append(self.rotations.call_of(module, q, k))
        self.configs.append(
            AttentionConfig(
                num_heads=heads,
                num_kv_heads=k.shape[1],
                head_dim=head_dim,
                rope=NO_ROPE,  # transformers' modules rotate
                scale=head_dim**-0.5 if options.get("scaling") is None else float(options["scaling"]),
                window=_window(mask, options.get("sliding_window")),
                has_sinks=options.get("s_aux") is not None,
            )
        )
        return give_queries(module, q, k, v)


def give_queries(_module: nn.Module, q: Tensor, _k: Tensor, v: Tensor, *_: object) -> Tensor:
    """Attend in shape alone."""
    return q.transpose(1, 2)[..., : v.shape[3]]


def _window(mask: Tensor | None, option: int | None) -> int | None:
    """Return a layer's window by its mask, or, where its model makes none, by its option."""
    if mask is None:
        return option
    if not hasattr(mask, _WINDOW):
        raise UnsupportedModel("it makes its attention mask itself")
    window: int | None = getattr(mask, _WINDOW)
    return window


@dataclass(frozen=True)
class PagedAttention:
    """Attention of one layer over the paged KV pool, for the tokens of all sequences of a step."""

    layer: int
    config: AttentionConfig  # for all ranks together
    cos_sin: Tensor  # [max_positions, head_dim]: see Heads.cos_sin
    tp: TPGroup
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
        config, tp, sinks = self.config, self.tp, options.get("s_aux")
        q, k, v = q[0], k[0], v[0]
        has_all = len(q) == config.num_heads
        if tp.size > 1:  # a rank attends with its share of heads that its projections did not divide
            mine = config.kv_heads_of(tp.rank, tp.size)
            if len(k) == config.num_kv_heads:
                k, v = (torch.cat([part[head : head + 1] for head in mine]) for part in (k, v))
            q = share(q, 0, tp) if has_all else q
            sinks = share(sinks, 0, tp) if sinks is not None and len(sinks) == config.num_heads else sinks
        value_dim = v.shape[2]
        if value_dim < config.head_dim:  # latent attention, for example
            v = F.pad(v, (0, config.head_dim - value_dim))
        heads = Heads(len(q), len(k), self.cos_sin, q_norm=None, k_norm=None)
        out = attend(self.layer, _side_by_side(q, k, v), heads, sinks, self.step.ctx)
        if tp.size > 1 and has_all:
            out = tp.all_gather(out.flatten(1)).view(len(out), config.num_heads, config.head_dim)
        return out[..., :value_dim].unsqueeze(0)


def _side_by_side(*parts: Tensor) -> Tensor:
    """[heads, T, head_dim] each -> [T, all heads * head_dim]; without a copy if they are columns of one product."""
    tokens, head_dim = parts[0].shape[1:]
    width = sum(map(len, parts)) * head_dim
    start = at = parts[0].storage_offset()
    for part in parts:
        memory = part.untyped_storage().data_ptr(), part.storage_offset(), part.stride()
        if memory != (parts[0].untyped_storage().data_ptr(), at, (head_dim, width, 1)):
            return torch.cat(parts).transpose(0, 1).flatten(1)
        at += len(part) * head_dim
    return parts[0].as_strided((tokens, width), (width, 1), start)
