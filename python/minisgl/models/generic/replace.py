"""Puts our products and norms in the place of transformers' modules, where they compute the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from minisgl.distributed import TPGroup
from minisgl.models.generic.blocks import ReplacementExperts, ReplacementGatedMLP, ReplacementNorm
from minisgl.models.generic.linears import MergedLinear, MergedPart, ReplacementLinear
from minisgl.models.generic.numeric_probe import gated_form, holds_plain_experts, norm_form
from minisgl.models.generic.sharding import Plan
from minisgl.models.generic.step import Step

T = TypeVar("T")


def replace_modules(
    model: nn.Module, dtype: torch.dtype, merged: Sequence[Sequence[str]], plan: Plan, tp: TPGroup, step: Step
) -> None:
    """Exchange a model's modules in place.

    `dtype`: of its states. `merged`: names of linear layers that read one input.
    """
    probes = _Probes()
    for name, module in list(model.named_modules()):
        gated = probes.result(gated_form, module)
        if gated is not None:
            begin = {plan.form_of(f"{name}.{leaf}") for leaf in gated.first}
            end = plan.form_of(f"{name}.{gated.down}")
            if (begin, end) in (({"whole"}, "whole"), ({"column"}, "row")):
                model.set_submodule(name, ReplacementGatedMLP(module, gated, (begin.pop(), end), tp))
        elif probes.result(holds_plain_experts, module):
            model.set_submodule(name, ReplacementExperts(module, tp, step, divided=plan.divides_experts(name)))
    for names in merged:
        _merge(model, names, plan, tp)
    for name, module in list(model.named_modules()):
        if _is_linear(module):
            model.set_submodule(name, ReplacementLinear(module, plan.form_of(name), tp))
            continue
        form = probes.result(norm_form, module)
        if form is not None and module.get_parameter("weight").dtype == dtype:  # another one would decide the result's
            model.set_submodule(name, ReplacementNorm(module, form, step))


class _Probes:
    """Results of probes, each of which is made once for modules that can differ in weights alone."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def result(self, probe: Callable[[nn.Module], T], module: nn.Module) -> T:
        """Return a probe's result."""
        kind = probe, _kind(module)
        if kind not in self._known:
            with torch.device("cpu"):  # where stand-ins make what they need
                self._known[kind] = probe(module)
        known: T = self._known[kind]
        return known


def _merge(model: nn.Module, names: Sequence[str], plan: Plan, tp: TPGroup) -> None:
    """Make one product of linear layers, if they are still there and can be divided alike."""
    parent_name = names[0].rpartition(".")[0]
    parent = model.get_submodule(parent_name)
    leaves = [name.rpartition(".")[2] for name in names]
    modules = [parent._modules.get(leaf) for leaf in leaves]
    forms = {plan.form_of(name) for name in names}
    if len(forms) > 1 or not forms <= {"whole", "column"} or not all(type(module) is nn.Linear for module in modules):
        return
    merged = MergedLinear([module for module in modules if module is not None], forms.pop(), tp)
    parent.add_module("merged_" + "_".join(leaves), merged)
    for index, leaf in enumerate(leaves):
        parent.add_module(leaf, MergedPart(merged, index))


def _is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return type(module) in (nn.Linear, Conv1D)


def _kind(module: nn.Module) -> Any:
    """Return what a module's arithmetic can depend on besides its weights."""
    values = {name: value for name, value in vars(module).items() if isinstance(value, str | int | float | tuple)}
    shapes = tuple((name, tuple(weight.shape)) for name, weight in module.named_parameters(recurse=False))
    children = tuple((name, _kind(child)) for name, child in module.named_children())
    return type(module), shapes, tuple(sorted((name, str(value)) for name, value in values.items())), children
