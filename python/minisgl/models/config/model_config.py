"""A model's configuration in this package's own form. Families make it from a config.json, which only they read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from minisgl.config import ConfigError
from minisgl.layers.layer_config import AttentionConfig, LayerConfig, LayerInputConfig, MLPConfig, NormConfig
from minisgl.pooling.pooling_config import PoolingConfig
from minisgl.quantization.schemes import Quantization

DTypeName = Literal["float32", "bfloat16", "float16"]


class ModelError(ConfigError):
    """A model that cannot be served; the text is one line for the person who named it."""


class UnsupportedModel(ModelError):
    """The model is missing, or needs something that is not implemented."""


class WeightError(ModelError):
    """The checkpoint does not hold the weights that the config describes."""


@dataclass(frozen=True, slots=True)
class CheckpointNames:
    """Differences between a checkpoint's tensor names and this decoder's, which begin with `model.` or `lm_head.`."""

    renamed: tuple[tuple[str, str], ...] = ()  # (theirs, ours): the first prefix that matches is replaced
    ignored: tuple[str, ...] = ()  # prefixes of tensors that text does not need, such as a vision tower's

    def ours(self, name: str) -> str | None:
        """Return this decoder's name of a checkpoint tensor; None for a tensor that is left out."""
        if name.startswith(self.ignored):
            return None
        for theirs, ours in self.renamed:
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return name


@dataclass(frozen=True, slots=True)
class RotaryCall:
    """Call of a module that computes cosines and sines: its name, and its arguments besides x and the positions."""

    name: str
    args: tuple[str | int | float | None, ...] = ()
    kwargs: tuple[tuple[str, str | int | float | None], ...] = ()


@dataclass(frozen=True, slots=True)
class TransformersModules:
    """Modules of transformers that compute a model."""

    config_json: str  # transformers builds the modules from it
    attending: tuple[str, ...]  # names of attention modules, in the layers' order
    rotaries: tuple[RotaryCall | None, ...]  # by attention module; None: transformers rotates
    merged: tuple[tuple[str, ...], ...]  # names of linear layers that read one input
    tp_plan: tuple[tuple[str, str], ...]  # styles by which transformers divides modules among ranks
    tp_missing: str | None  # reason why the plan cannot divide the model, if so
    tp_sizes: tuple[tuple[str, int], ...]  # (name of a size that ranks divide, size)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder with its two vocabulary matrices, or, if it pools, without the second."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm: NormConfig
    max_position_embeddings: int  # the context length: with YaRN, config.json may have less
    tie_word_embeddings: bool | None  # None: tied if the checkpoint has no head
    dtype: DTypeName
    initializer_range: float
    eos_token_ids: tuple[int, ...] = ()
    embedding_scale: float = 1.0  # factor of the input embeddings
    layer_inputs: LayerInputConfig | None = None  # inputs of every layer
    logits_scale: float = 1.0  # factor of the logits
    logits_softcap: float | None = None  # logits become softcap * tanh(logits / softcap)
    checkpoint: CheckpointNames = CheckpointNames()
    transformers: TransformersModules | None = None  # modules that compute the model; None: this package's
    quantization: Quantization | None = None  # format of the checkpoint's matrices; None: floating point, not quantized
    pooling: PoolingConfig | None = None  # result for a prompt; None: text

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attentions(self) -> tuple[AttentionConfig, ...]:
        """Attention of each layer that attends: all but the recurrent layers of a hybrid model."""
        return tuple(layer.attention for layer in self.layers if isinstance(layer.attention, AttentionConfig))

    @property
    def attention(self) -> AttentionConfig:
        """Attention of the first such layer; in some families later ones have other KV heads or head sizes."""
        return self.attentions[0]

    @property
    def is_hybrid(self) -> bool:
        """True if some layers are recurrent: their state belongs to a slot, and pages of a prefix cannot restore it."""
        return len(self.attentions) < len(self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer that attends."""
        return tuple(attention.window for attention in self.attentions)

    def with_whole_experts(self) -> ModelConfig:
        """Return the model with experts that ranks hold whole. Raises UnsupportedModel if there are none."""
        layers = tuple(layer.with_whole_experts() for layer in self.layers)
        if layers == self.layers:
            computed = ", which is computed by transformers," if self.transformers is not None else ""
            raise UnsupportedModel(f"--enable-expert-parallel: {self.architecture}{computed} has no experts to spread")
        return replace(self, layers=layers)

    @property
    def experts_per_token(self) -> int:
        """The largest number of experts that a layer sends a token to; 0 for a dense model."""
        return max((one.routing.top_k for layer in self.layers if (one := layer.experts)), default=0)

    def check_tp(self, size: int) -> None:
        """Raise UnsupportedModel if the layers cannot be divided among `size` ranks.

        KV heads are replicated and the vocabulary is padded, so neither has to divide.
        """
        by_plan = () if self.transformers is None or size == 1 else self.transformers.tp_sizes
        if self.transformers is not None and size > 1 and self.transformers.tp_missing is not None:
            raise UnsupportedModel(
                f"--tp {size}: {self.architecture} is computed by transformers, {self.transformers.tp_missing}"
            )
        for layer in self.layers:
            if isinstance(layer.attention, AttentionConfig):
                divided = {"attention heads": layer.attention.num_heads}
            else:
                divided = {"key heads of linear attention": layer.attention.num_key_heads}
            if isinstance(layer.mlp, MLPConfig):
                divided["intermediate size"] = layer.mlp.intermediate_size
            if layer.experts is not None:
                if not layer.experts.whole:
                    divided["intermediate size of an expert"] = layer.experts.intermediate_size
                elif layer.experts.num_experts < size:
                    raise UnsupportedModel(
                        f"the model's {layer.experts.num_experts} experts do not suffice for {size} ranks that hold "
                        "them whole (--enable-expert-parallel)"
                    )
                divided["intermediate size of the shared experts"] = layer.experts.shared_intermediate_size
            for what, count in (*divided.items(), *by_plan):
                if count % size:
                    raise UnsupportedModel(
                        f"tensor parallelism over {size} ranks does not divide the model's {what} ({count})"
                    )
