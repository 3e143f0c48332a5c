"""Description of one decoder layer, for the engine, tensor parallelism and the layers themselves. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from minisgl.kernel.base import Activation, ExpertActivation, LatentDims, Routing


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Frequencies stretched by `factor` where a wave is longer than the original context (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies divided by `factor` (position interpolation, Chen et al., 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al., 2023): frequencies that turn fewer than `beta_slow` times in the original context are
    divided by `factor`, those that turn more than `beta_fast` times stay, and the rotations are scaled.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    attention_factor: float  # factor of cosines and sines
    truncate: bool  # the ramp between the two begins and ends at whole dimensions
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class LongropeScaling:
    """LongRoPE (Ding et al., 2024) within the original context: frequencies are divided by `short_factors`, one for
    each, and the rotations are scaled.

    Longer sequences have other factors at all positions. Keys that were rotated before would be wrong then, so there
    are none here.
    """

    short_factors: tuple[float, ...]
    attention_factor: float  # factor of cosines and sines
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Rotation of only the first `share` of a head's pairs, by the frequencies that a full rotation has (Gemma 4)."""

    share: float
    factor: float  # divisor of the frequencies


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Rotated queries beyond the original context times 1 + beta * log(1 + floor(position / original)) (Llama 4)."""

    beta: float
    original_max_positions: int


QKNorm = Literal["none", "head", "projection"]
RopeScaling: TypeAlias = Llama3Scaling | LinearScaling | YarnScaling | LongropeScaling | ProportionalScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021) over the first dimensions of a head, usually all of them."""

    theta: float
    scaling: RopeScaling | None = None
    partial_factor: float = 1.0  # share of the dimensions that are rotated
    interleaved: bool = False  # dimensions are rotated in pairs of neighbours, not i with i + rotary_dim / 2
    query_scaling: QueryScaling | None = None

    def rotary_dim(self, head_dim: int) -> int:
        """Number of a head's dimensions that are rotated."""
        return int(head_dim * self.partial_factor)


NO_ROPE = RopeConfig(theta=1.0, partial_factor=0.0)  # positions are known by the causal mask alone


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek V2, 2024), whose cache has one row per token for all heads.

    The row is a latent, of which each head makes a key and a value by its own matrices, and a rotated part that ends
    the key of every head.
    """

    kv_rank: int  # size of the latent
    nope_dim: int  # dimensions of a head's query and key without a rope
    rope_dim: int  # dimensions of a head's query and key with a rope
    value_dim: int  # dimensions of a head's value
    q_rank: int | None  # size between the two matrices that compute the queries; None: one matrix does

    @property
    def dims(self) -> LatentDims:
        """Return the sizes that kernels and attention depend on."""
        return LatentDims(self.kv_rank, self.rope_dim, self.nope_dim, self.value_dim)


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Grouped-query attention of one layer; latent attention has one KV head of `latent.kv_rank + latent.rope_dim`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    scale: float  # factor of q @ k before the softmax
    window: int | None = None  # positions that a query attends to, including its own; None: all before it
    qk_norm: QKNorm = "none"  # norms of q and k before their rotation: per head, or over all heads together
    qkv_bias: bool = False
    out_bias: bool = False
    v_norm: bool = False  # each head of v is normalized, without weights (Gemma 4)
    k_is_v: bool = False  # v is the product of k's matrix, before its norm and rotation (Gemma 4)
    has_sinks: bool = False  # each head has a learned score in its softmax, for a value of 0
    output_gate: bool = False  # a head's output is multiplied by sigmoid(gate), whose rows follow q's in q_proj
    latent: LatentConfig | None = None
    kv_of: int | None = None  # earlier layer whose K and V are read; None: it has its own

    @property
    def scales_kv_by_weights(self) -> bool:
        """True if k and v, as the cache stores them, are multiples of weights that scale nothing else."""
        gated = self.output_gate and self.qk_norm == "none"  # q_proj has the gate, too
        return self.latent is None and self.kv_of is None and not (self.v_norm or self.k_is_v or gated)

    @property
    def rope_head_dim(self) -> int:
        """Size of a head for its rope, which may rotate only a part: see RopeConfig.rotary_dim."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    def heads_per_rank(self, tp_size: int) -> int:
        """Query heads of each tensor-parallel rank."""
        return self.num_heads // tp_size

    def kv_heads_per_rank(self, tp_size: int) -> int:
        """KV heads that each rank stores, replicas included: the KV pool's `num_kv_heads`."""
        return len(self.kv_heads_of(0, tp_size))

    def kv_heads_of(self, rank: int, tp_size: int) -> list[int]:
        """Return the KV head of each equal block of a rank's query heads; a head may occur more than once."""
        heads, group = self.heads_per_rank(tp_size), self.num_heads // self.num_kv_heads
        block = math.gcd(heads, group)
        return [head // group for head in range(rank * heads, (rank + 1) * heads, block)]


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    """Gated DeltaNet (Yang et al., 2024) of one layer: a state of fixed size in the place of K and V.

    Each key head serves `num_value_heads / num_key_heads` value heads.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # per head
    value_dim: int  # per head
    conv_size: int  # inputs that the convolution of q, k and v reads for a token, including its own
    grouped: bool = False  # the checkpoint's rows are ordered by key head (Qwen3-Next)

    def channels_per_rank(self, tp_size: int) -> int:
        """Channels of q, k and v together on each tensor-parallel rank."""
        return (2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim) // tp_size


@dataclass(frozen=True, slots=True)
class MLPConfig:
    """A gated feed-forward block: down(activation(gate(x)) * up(x))."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """A router and gated experts; each token is sent to a few experts."""

    num_experts: int
    intermediate_size: int  # per expert
    routing: Routing
    shared_intermediate_size: int = 0  # size of the shared expert, which every token uses; 0: none
    shared_gate: bool = False  # the shared expert's output is multiplied by a sigmoid gate (Qwen2-MoE)
    choice_bias: bool = False  # scores have a bias when experts are chosen (DeepSeek V3)
    float32_router: bool = False  # the router's product is computed in float32
    activation: ExpertActivation = "silu"
    router_name: str = "gate"  # the router's name in the checkpoint
    router_bias: bool = False
    expert_bias: bool = False
    interleaved: bool = False  # the checkpoint stacks transposed experts, gate and up rows alternating (gpt-oss)
    whole: bool = False  # a rank has some whole experts, not a share of each

    def held_by(self, rank: int, tp_size: int) -> range:
        """Return the experts of a tensor-parallel rank: all, or a range; the ranges' sizes differ by at most one."""
        if not self.whole:
            return range(self.num_experts)
        return range(rank * self.num_experts // tp_size, (rank + 1) * self.num_experts // tp_size)


@dataclass(frozen=True, slots=True)
class NormConfig:
    """RMSNorm of all layers of a model."""

    eps: float
    float32: bool = False  # weights are kept in float32, so that only the result is rounded
    unit_offset: bool = False  # the checkpoint holds w - 1 of each weight w


@dataclass(frozen=True, slots=True)
class NormNames:
    """Checkpoint names of a layer's RMSNorms before and after attention and MLP; None: the layer has no such norm."""

    attention: str | None = "input_layernorm"
    mlp: str | None = "post_attention_layernorm"
    attention_post: str | None = None
    mlp_post: str | None = None


@dataclass(frozen=True, slots=True)
class LayerInputConfig:
    """Embeddings of the tokens for each layer, in addition to the states (Gemma 4 E2B, E4B)."""

    size: int
    vocab_size: int  # number of ids in the table


@dataclass(frozen=True, slots=True)
class Gemma4Parts:
    """Parts of a Gemma 4 layer besides attention and MLP. Each layer also scales its output by a learned factor."""

    experts: MoEConfig | None = None  # in addition to the MLP, with its activation


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One decoder layer."""

    attention: AttentionConfig | DeltaNetConfig
    mlp: MLPConfig | MoEConfig
    norms: NormNames = NormNames()
    residual_scale: float = 1.0  # factor of each block's output before it is added (Granite)
    gemma4: Gemma4Parts | None = None  # parts that only layers of that family have

    @property
    def experts(self) -> MoEConfig | None:
        """The experts of the layer, in place of the MLP or in addition to it."""
        if isinstance(self.mlp, MoEConfig):
            return self.mlp
        return None if self.gemma4 is None else self.gemma4.experts

    def with_whole_experts(self) -> LayerConfig:
        """Return the layer with experts that ranks hold whole, if it has experts."""
        if self.experts is None:
            return self
        experts = replace(self.experts, whole=True)
        if self.experts is self.mlp:
            return replace(self, mlp=experts)
        return replace(self, gemma4=Gemma4Parts(experts))
