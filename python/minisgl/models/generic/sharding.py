"""Sharding of a model's weights among ranks, by the plan that transformers has for it (`base_model_tp_plan`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal

from torch import Tensor, nn

from minisgl.distributed import TPGroup

Form = Literal["whole", "column", "gathered column", "row", "split row"]
"""Division of a linear layer among ranks.

- whole: every rank has the whole weight.
- column: a rank has some of the outputs; gathered column: the outputs of all ranks are then gathered.
- row: a rank has some of the inputs, and the ranks' outputs are summed; split row: a rank first takes its part of an
  input that every rank has whole.
"""

_FORMS: Mapping[str, Form] = {
    "colwise": "column",
    "colwise_gather_output": "gathered column",
    "rowwise": "row",
    "rowwise_split_input": "split row",
}
_EXPERTS = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise", "": "moe_tp_experts"}
# Every rank keeps what has these styles, but for experts that `Plan.divides_experts` finds.
_WHOLE = {
    "replicate",
    "replicated_with_grad_allreduce",
    "embedding_rowwise",
    "embedding_colwise",
    "packed_colwise",
    "packed_rowwise",
    "moe_tp_experts",
    "mla_kv_a_proj",  # the latent, of which every rank makes its heads
    "local_params",  # one for each head: attention takes its share of sinks
}


class Plan:
    """Styles of modules by their names, in which * stands for numbers. An empty plan leaves everything whole."""

    def __init__(self, styles: Mapping[str, str]) -> None:
        self._styles = styles

    def form_of(self, name: str) -> Form:
        """Return how the linear layer of a name is divided."""
        return _FORMS.get(self._style(name), "whole")

    def divides_experts(self, name: str) -> bool:
        """Return True if a module's stacked experts are divided by their intermediate size."""
        return all(self._style(f"{name}.{leaf}".rstrip(".")) == style for leaf, style in _EXPERTS.items())

    def _style(self, name: str) -> str:
        return self._styles.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), "replicate")


def missing_style(styles: Mapping[str, str]) -> str | None:
    """Return why nothing, or not all, can be divided by a plan; None if it can."""
    if not any(_FORMS.get(style) in ("row", "split row") for style in styles.values()):
        return "which has no plan to divide it (base_model_tp_plan)"
    for name, style in styles.items():
        if style not in _FORMS and style not in _WHOLE:
            return f"whose plan divides {name} by {style}, which is not implemented"
    return None


def divided_sizes(
    model: nn.Module, styles: Mapping[str, str], kv_heads: Mapping[str, int]
) -> Iterator[tuple[str, int]]:
    """Yield what must divide among ranks: the size of a dimension, and a name for it.

    `kv_heads`: of each module that attends, which are divided with its projections.
    """
    plan = Plan(styles)
    for name, module in model.named_modules():
        parent, _, leaf = name.rpartition(".")
        if isinstance(module, nn.Linear) and plan.form_of(name) == "column" and parent in kv_heads:
            yield "key and value heads", kv_heads[parent]
        if isinstance(module, nn.Linear) and plan.form_of(name) == "column":
            yield f"outputs of {leaf}", module.out_features
        elif isinstance(module, nn.Linear) and plan.form_of(name) in ("row", "split row"):
            yield f"inputs of {leaf}", module.in_features
        elif plan.divides_experts(name):
            yield f"intermediate size of {leaf}", module.get_parameter("down_proj").shape[2]


def share(tensor: Tensor, dim: int, tp: TPGroup) -> Tensor:
    """Return a rank's even share of one dimension, which must divide."""
    size = tensor.shape[dim] // tp.size
    return tensor if tp.size == 1 else tensor.narrow(dim, tp.rank * size, size)


def padded_share(tensor: Tensor, tp: TPGroup) -> Tensor:
    """Return a rank's share of the first dimension; the last shares end in zeros where it does not divide."""
    if len(tensor) % tp.size:
        missing = tp.size - len(tensor) % tp.size
        tensor = nn.functional.pad(tensor, (*[0] * (2 * tensor.ndim - 1), missing))
    return share(tensor, 0, tp)
