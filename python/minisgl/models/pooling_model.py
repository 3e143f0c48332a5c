"""Decoder that makes a vector of each prompt: the last token's state, the mean of all states, or logits of classes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minisgl.context import ForwardContext
from minisgl.distributed import TPGroup
from minisgl.layers.linear import empty
from minisgl.layers.weight_slice import WeightSlice, whole
from minisgl.models.config.model_config import ModelConfig
from minisgl.models.decoder import DecoderModel
from minisgl.pooling.pooling_config import PoolingConfig


class ScoreHead(nn.Module):
    """[S, hidden_size] -> logits of the classes [S, n], in float32 on every rank.

    Its weights are a classifier's own, or rows of the language model's head: those of the tokens `answer_ids`, whose
    difference is the logit of the one class.
    """

    def __init__(self, config: ModelConfig, pooling: PoolingConfig) -> None:
        super().__init__()
        self.answer_ids = pooling.answer_ids
        self.vocab_size = config.vocab_size
        self.tied = config.tie_word_embeddings
        self.weight = empty(len(self.answer_ids) or pooling.size, config.hidden_size, dtype=torch.float32)

    def classes(self, x: Tensor) -> Tensor:
        logits = nn.functional.linear(x, self.weight)
        return logits[:, 1:] - logits[:, :1] if len(self.answer_ids) == 2 else logits

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        if not self.answer_ids:
            yield whole(f"{name}.weight", self.weight)
        matrix = "model.embed_tokens.weight" if self.tied else "lm_head.weight"
        for row, token in enumerate(self.answer_ids):
            source = (slice(token, token + 1), slice(None))
            yield WeightSlice(matrix, (self.vocab_size, self.weight.shape[1]), source, self.weight[row : row + 1])


class PoolingModel(DecoderModel):
    """A decoder and, for a classifier, its head."""

    def __init__(self, config: ModelConfig, pooling: PoolingConfig, *, tp: TPGroup, dtype: torch.dtype) -> None:
        super().__init__(config, tp=tp, dtype=dtype)
        self.pooling = pooling
        self.score = ScoreHead(config, pooling) if pooling.makes == "classes" else None

    def logits(self, states: Tensor, ctx: ForwardContext) -> Tensor:
        """Return vectors [S, size] float32 of states [S, hidden_size]: the last norm's output, or logits of classes."""
        vectors: Tensor = self.model.norm(states, ctx).float()
        return vectors if self.score is None else self.score.classes(vectors)
