"""The model interface of the engine, for families of this package and for models of transformers."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.kernel.base import KernelNeeds, Ops
from minisgl.models.config.model_config import ModelConfig


class Model(nn.Module, ABC):
    """A decoder, `model`, and the head that reads its states.

    `model` maps a step of T tokens to [R, hidden_size]: the states of `ctx.logits_indices` (None: of all T tokens).
    """

    model: nn.Module
    graphs_by_trial = False  # True: steps run in CUDA graphs if a trial capture succeeds
    # True: it can leave the logits of a rank's share of the vocabulary (`ForwardContext.sharded_logits`).
    shards_logits = True

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype

    def forward(self, ctx: ForwardContext) -> Tensor:
        """Return logits [S, vocab_size] of the tokens that sample, in the model's dtype, the same on every rank."""
        return self.logits(self.model(ctx), ctx)

    @abstractmethod
    def logits(self, states: Tensor, ctx: ForwardContext) -> Tensor:
        """Return [S, n] from the decoder's states [S, hidden_size], the same on every rank."""

    @abstractmethod
    def graph_safe(self, ops: Ops) -> bool:
        """True if a decode launches the same work whatever its data, as a CUDA graph demands."""

    @abstractmethod
    def prefill_graph_safe(self, ops: Ops) -> bool:
        """True if this holds for the layers of any step, too, as its rows' lengths are on the device."""

    @abstractmethod
    def kernel_needs(self, kv_dtype: torch.dtype) -> KernelNeeds:
        """Return the kernels that steps over a KV pool of this dtype need."""

    @property
    def supports_sequence_parallel(self) -> bool:
        """True if its layers keep to what `TPGroup.enable_sequence_parallel` says of the residual."""
        return False

    @property
    @abstractmethod
    def layer_weights(self) -> int:
        """Return the number of weights of the last layer that each token is multiplied by."""
