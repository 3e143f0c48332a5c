"""Rounds a loaded model's matrices to 8 or 4 bits, in place (`--quantization`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minisgl.layers.embedding import LMHead
from minisgl.layers.linear import Linear, RowParallelLinear, unallocated
from minisgl.layers.mlp import Experts
from minisgl.models.config.model_config import UnsupportedModel
from minisgl.models.weights.forms import WeightForms
from minisgl.quantization.rounding import INT4_GROUP, Int4Grid, Method, levels_of_int4, round_to_8_bits, round_to_int4


@torch.no_grad()
def round_weights(model: nn.Module, method: Method, forms: WeightForms) -> None:
    """Round the matrices of attention and feed-forward blocks, with int4 the head's too, on every rank alike.

    Those that were rounded when they were loaded (`linear_loader`) are left alone; a head is kept as `forms` say.

    Embeddings, norms, biases and routers stay. 8 bits have a scale for each output, int4 for each INT4_GROUP inputs.
    UnsupportedModel if a group would lie on two ranks.
    """
    for name, module in model.named_modules():
        if isinstance(module, Experts) and module.packed is None:
            _round(name, module.w13.flatten(0, 1), method, forms, divided=False)
            _round(name, module.w2.flatten(0, 1), method, forms, divided=not module.whole)
        elif isinstance(module, LMHead):
            if method == "int4":
                _round_head(name, module, forms)
        elif isinstance(module, Linear) and module.levels is None:
            divided = isinstance(module, RowParallelLinear)
            module.grid = _round(name, module.weight, method, forms, divided=divided)


def _round_head(name: str, head: LMHead, forms: WeightForms) -> None:
    """Round a head to int4. The embedding that it may be tied to stays as it is."""
    if forms.rounded(head) is not None:
        head.levels = levels_of_int4(head.weight)
        head.weight = unallocated(*head.weight.shape, dtype=head.weight.dtype)
        return
    if head.tied:
        head.weight = nn.Parameter(head.weight.clone(), requires_grad=False)
    head.grid = _round(name, head.weight, "int4", forms, divided=False)


def _round(name: str, weight: Tensor, method: Method, forms: WeightForms, *, divided: bool) -> Int4Grid | None:
    """Round a matrix, or this rank's columns of one that is `divided`."""
    if method == "int4":
        if weight.shape[1] % INT4_GROUP:
            raise UnsupportedModel(
                f"--quantization int4 has groups of {INT4_GROUP} inputs, which do not divide the {weight.shape[1]} "
                f"of {name} on a rank"
            )
        return round_to_int4(weight)
    round_to_8_bits(weight, method, forms.largest_of_rows(weight, divided=divided))
    return None


def describe(method: Method, dtype: str, kept: str = "") -> str:
    """Return one line on how weights are rounded and multiplied; the modules `kept` stay as they are rounded."""
    scales = f"a scale for {INT4_GROUP} inputs, the head too" if method == "int4" else "a scale for each output"
    form = f"multiplied in {dtype}, {kept} kept in {method}" if kept else f"kept and multiplied in {dtype}"
    return f"matrices are rounded to {method} as they are loaded ({scales}) and {form}"
