"""A run of one rank's part of a model on the meta device: a plan that does not fit its modules is refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from minisgl.context import ForwardContext
from minisgl.distributed import SingleRank
from minisgl.error_text import in_one_line
from minisgl.kernel.torch_ops import TorchOps
from minisgl.layers.linear import bind_weights
from minisgl.models.config.model_config import ModelConfig, UnsupportedModel
from minisgl.models.generic.attention_interface import PAGED, give_queries, set_attention
from minisgl.models.generic.causal_lm import GenericCausalLM, modules_of
from minisgl.models.generic.model_probe import make_empty

_TOKENS = 4


class _MetaRank(SingleRank):
    """Rank 0 of a group on the meta device, where tensors have shapes and no values."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, x: Tensor, width: int | None = None, out: Tensor | None = None) -> Tensor:
        return super().all_gather(torch.cat([x] * self.size, dim=1), width, out)


class _MetaOps(TorchOps):
    def moe_chosen(self, x: Tensor, *_: object) -> Tensor:
        return torch.empty_like(x)


def check_sharding(config: ModelConfig, tp_size: int) -> None:
    """Raise UnsupportedModel if modules of a model sharded among so many ranks do not fit one another."""
    meta = torch.device("meta")
    empty = make_empty(modules_of(config).config_json)
    empty.set_attn_implementation(PAGED)
    try:
        with meta, torch.inference_mode():
            model = GenericCausalLM(config, empty, _MetaRank(tp_size), meta)
            ops = _MetaOps()
            bind_weights(model, ops)
            for module in model.modules():
                set_attention(module, give_queries)
            ids = torch.zeros(_TOKENS, dtype=torch.int64)
            step = SimpleNamespace(input_ids=ids, positions=ids, logits_indices=None, logits=None, ops=ops)
            model(cast(ForwardContext, step))
    except Exception as error:  # from any module of transformers
        raise UnsupportedModel(
            f"--tp {tp_size}: {config.architecture} is computed by transformers, whose plan does not fit its modules: "
            f"{in_one_line(error)}"
        ) from error
