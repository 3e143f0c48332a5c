"""A causal model of transformers as the engine runs one: modules that ours compute alike are ours, and attention is."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.distributed import TPGroup
from minisgl.kernel.base import KernelNeeds, Ops, Product
from minisgl.layers.layer_config import NO_ROPE, AttentionConfig
from minisgl.layers.linear import Linear
from minisgl.layers.rotary import Rotary
from minisgl.models.base import Model
from minisgl.models.config.model_config import (
    ModelConfig,
    RotaryCall,
    TransformersModules,
)
from minisgl.models.generic.attention_interface import PagedAttention, set_attention
from minisgl.models.generic.blocks import ReplacementExperts, ReplacementGatedMLP, ReplacementNorm
from minisgl.models.generic.linears import MergedLinear, ReplacementLinear
from minisgl.models.generic.model_probe import GivenStates, decoder_name
from minisgl.models.generic.replace import replace_modules
from minisgl.models.generic.rotation import leave_unrotated, rotation_table
from minisgl.models.generic.sharding import Plan
from minisgl.models.generic.step import Step


class PagedDecoder(nn.Module):
    """[T] token ids -> [R, hidden_size]: the states of `ctx.logits_indices` (None: of all T tokens), normed."""

    def __init__(self, decoder: nn.Module, step: Step) -> None:
        super().__init__()
        self.decoder = decoder
        self._step = step

    def forward(self, ctx: ForwardContext) -> Tensor:
        with self._step.runs(ctx):
            out = self.decoder(
                input_ids=ctx.input_ids.unsqueeze(0), position_ids=ctx.positions.unsqueeze(0), use_cache=False
            )
        states: Tensor = out[0][0]
        return states if ctx.logits_indices is None else states[ctx.logits_indices]


class _RotationTables:
    """Cosines and sines by which our kernels rotate q and k of each layer, made once for each kind."""

    def __init__(self, model: nn.Module, max_positions: int, device: torch.device) -> None:
        self._model, self._max_positions, self._device = model, max_positions, device
        self._made: dict[RotaryCall, Tensor | None] = {}
        self._still: dict[int, Tensor] = {}  # by head_dim
        self.used = 0  # layers that our kernels rotate

    def table(self, attending: nn.Module, call: RotaryCall | None, attention: AttentionConfig) -> Tensor:
        """Return a layer's table, of angles 0 if its module goes on rotating."""
        if call is not None:
            if call not in self._made:
                made = rotation_table(self._model, call, self._max_positions)
                self._made[call] = None if made is None else made.to(self._device)
            table = self._made[call]
            if table is not None:
                leave_unrotated(attending)
                self.used += 1
                return table
        dim = attention.head_dim
        if dim not in self._still:
            self._still[dim] = Rotary(dim, self._max_positions, NO_ROPE).cos_sin.to(self._device)
        return self._still[dim]


class GenericCausalLM(Model):
    """A decoder of transformers over the paged pool, and the rest of its causal model, which makes logits of states."""

    graphs_by_trial = True
    shards_logits = False

    def __init__(self, config: ModelConfig, model: Any, tp: TPGroup, device: torch.device) -> None:
        """Take over transformers' causal model, which goes to `device` next."""
        super().__init__(config, model.dtype)
        self.tp = tp
        self._step = step = Step()
        modules = modules_of(config)
        tables = _RotationTables(model, config.max_position_embeddings, device)
        for layer, (name, attention) in enumerate(zip(modules.attending, config.attentions, strict=True)):
            attending = model.get_submodule(name)
            table = tables.table(attending, modules.rotaries[layer], attention)
            set_attention(attending, PagedAttention(layer, attention, table, tp, step))
        self._rotated = tables.used
        plan = Plan(dict(modules.tp_plan) if tp.size > 1 else {})
        replace_modules(model, self.dtype, modules.merged, plan, tp, step)
        name = decoder_name(model)
        self.model = PagedDecoder(model.get_submodule(name), step)
        self._given = GivenStates()
        model.set_submodule(name, self._given)
        self.head = model

    def graph_safe(self, ops: Ops) -> bool:  # noqa: ARG002
        return True  # if the trial says so

    def prefill_graph_safe(self, ops: Ops) -> bool:
        return self.graph_safe(ops)

    def kernel_needs(self, kv_dtype: torch.dtype) -> KernelNeeds:
        products = set()
        for module in self.modules():
            if isinstance(module, ReplacementGatedMLP):
                width, size = module.gate_up_proj.weight.shape
                products.add(Product(width, size, norm=False, gate=module.activation))
            elif isinstance(module, Linear) and not module.gated:
                width, size = module.weight.shape
                products.add(Product(width, size, norm=False, gate=None))
        return KernelNeeds(
            self.dtype,
            kv_dtype,
            next((module.weight.dtype for module in self.modules() if isinstance(module, ReplacementNorm)), self.dtype),
            head_dims=frozenset(attention.head_dim for attention in self.config.attentions),
            products=frozenset(products),
            experts=frozenset(),
        )

    @property
    def layer_weights(self) -> int:
        return sum(weight.numel() for weight in self.model.parameters()) // self.config.num_layers

    def describe(self) -> str:
        """Tell which modules of transformers' gave way to ours, in a line for the log."""
        ours: dict[type[nn.Module], str] = {
            ReplacementGatedMLP: "gated blocks",
            ReplacementExperts: "layers of experts",
            ReplacementNorm: "norms",
            MergedLinear: "merged products",
            ReplacementLinear: "other products",
        }
        blocks = [module for module in self.modules() if isinstance(module, ReplacementGatedMLP)]
        inside = {part for block in blocks for part in block.children()}
        counts = Counter(ours.get(type(module)) for module in self.modules() if module not in inside)
        parts = [f"{counts[name]} {name}" for name in ours.values() if counts[name]]
        if self._rotated:
            parts.append(f"{self._rotated} rotations")
        return (
            f"{type(self.head).__name__} is computed by transformers' modules but for {', '.join(parts)}, and attention"
        )

    def logits(self, states: Tensor, ctx: ForwardContext) -> Tensor:
        with self._step.runs(ctx):
            logits = self._given.logits(self.head, states)
        return logits if ctx.logits is None else ctx.logits.copy_(logits)


def modules_of(config: ModelConfig) -> TransformersModules:
    if config.transformers is None:
        raise ValueError("the model is not one of transformers")
    return config.transformers
