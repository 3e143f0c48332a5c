"""Interface of the fused operations that layers call: `TorchOps` is the reference, `CudaOps` runs kernels of csrc/."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:  # a model's config names activations and routings where torch must not be imported
    import torch
    from torch import Tensor

    from minisgl.kernel.delta_net.recurrent_rows import ChunkedRows, SingleRows
    from minisgl.quantization.expert_layout import PackedExperts
    from minisgl.quantization.levels import LevelFormat, Levels
    from minisgl.quantization.rounding import Int4Grid

ExpertMatrices: TypeAlias = "Tensor | PackedExperts"
"""A matrix of each expert, [experts, out, in], in the model's dtype or as a checkpoint has them."""

Activation = Literal["silu", "gelu_tanh"]  # activation of a gated MLP; gelu_tanh: gelu's tanh approximation
GateActivation: TypeAlias = Activation | Literal["sigmoid"]  # sigmoid: of a gate of attention's output


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """(up + 1) * gate * sigmoid(alpha * gate) (gpt-oss): of the gate up to `limit`, of up from -limit to `limit`."""

    alpha: float
    limit: float


ExpertActivation: TypeAlias = Activation | ClampedSwiGLU


@dataclass(frozen=True, slots=True)
class Routing:
    """Choice of a token's experts: the `top_k` with the largest scores; the scores are also their weights.

    With `groups` (DeepSeek V3) the experts form this many groups of equal size. A group's score is the sum of its best
    `group_scores` scores, and only experts of the `top_groups` groups with the largest scores can be chosen.
    """

    top_k: int
    renormalize: bool  # the weights of a token's experts are made to sum to 1
    score: Literal["softmax", "sigmoid"] = "softmax"  # how a router's logits become scores
    groups: int = 1
    top_groups: int = 1
    group_scores: int = 2  # best scores of a group that are added: 2 in DeepSeek V3, 1 in V2
    scale: float = 1.0  # factor of the weights

    @property
    def plain(self) -> bool:
        """True if the experts are simply those with the largest softmax probabilities, as moe.cu routes."""
        return (self.score, self.groups, self.scale) == ("softmax", 1, 1.0)


class ExpertBiases(NamedTuple):
    """Biases of a mixture of experts."""

    choice: Tensor | None = None  # [experts] float32, of the scores when experts are chosen, not of their weights
    w13: Tensor | None = None  # [experts, 2 * I]
    w2: Tensor | None = None  # [experts, H]


NO_BIASES = ExpertBiases()


class SharedExpert(NamedTuple):
    """Shared expert, which every token takes in addition to its routed experts; it has the size of n routed ones.

    w13 is [2 * n * I, H] with the gate first, w2 [H, n * I].

    `has_gate`: its output is multiplied by the sigmoid of a logit, which follows the experts' logits.
    """

    w13: Tensor
    w2: Tensor
    has_gate: bool


class Mixture(NamedTuple):
    """Experts of a sparse layer, and how tokens are sent to them.

    w13 is [experts, 2 * I, H] with the gate first, w2 [experts, H, I]: expert e gives w2[e] @ activated(w13[e] @ x),
    where "silu" is silu(gate) * up. The matrices may have fewer experts than `num_experts`: those from `first` on. The
    other experts add nothing.
    """

    w13: ExpertMatrices
    w2: ExpertMatrices
    num_experts: int
    routing: Routing
    biases: ExpertBiases = NO_BIASES
    activation: ExpertActivation = "silu"
    first: int = 0
    shared: SharedExpert | None = None
    expert_scale: Tensor | None = None  # [num_experts] float32, factors of the weights of a token's experts


class Norm(NamedTuple):
    """RMSNorm parameters: weight [H], in the input's dtype or float32, and what is added to the mean square."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Heads:
    """Parameters that turn the QKV product into q, k and v: heads, norms and rotary embedding.

    cos_sin is float32 [max_positions, head_dim]: cosines in the first half of the last axis, sines in the second; the
    rotation pairs dimension i with i + head_dim / 2 (the "neox" layout).
    """

    num_heads: int
    num_kv_heads: int  # 0: the layer has only queries, which attend to K and V of an earlier layer
    cos_sin: Tensor
    q_norm: Norm | None  # norm of each query head before its rotation (Qwen3)
    k_norm: Norm | None
    v_eps: float | None = None  # eps of a norm of each head of v, without weights (Gemma 4); None: no norm


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Heads and small weights of a Gated DeltaNet layer on one rank.

    A projection [T, width] of its input holds q and k of all key heads, v of all value heads (together the `channels`
    of the convolution), the gate z, and a logit b of the step and a of the decay for each value head.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv: Tensor  # [conv_size, channels] float32, the newest input's weights last
    a_log: Tensor  # [value_heads] float32
    dt_bias: Tensor  # [value_heads] float32
    norm: Norm  # norm of each value head's output

    @property
    def channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


class Product(NamedTuple):
    """Matrix product of a model's steps, for which kernels are compiled: weight [width, size], maybe with a norm."""

    width: int
    size: int
    norm: bool
    gate: Activation | None  # activation of a gated product


class ExpertKind(NamedTuple):
    """Sparse layer as kernels are compiled for it; a token goes to `top_k` experts."""

    num_experts: int
    top_k: int
    activation: ExpertActivation
    form: LevelFormat | None = None  # format of experts that stay quantized
    shared: int = 0  # size of the shared expert, in routed experts; every token takes it
    shared_gate: bool = False  # `SharedExpert.has_gate`
    logits: torch.dtype | None = None  # type of the router, if not the model's dtype


class LatentDims(NamedTuple):
    """Sizes in latent attention: the latent, a head's query with and without rotation, and a head's value."""

    rank: int
    rope: int
    nope: int
    value: int


@dataclass(frozen=True, slots=True)
class KernelNeeds:
    """Products, heads and layers of a model that its steps need kernels for."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    norm_dtype: torch.dtype  # type of the norms' weights
    head_dims: frozenset[int]
    products: frozenset[Product]
    experts: frozenset[ExpertKind]
    delta_taps: frozenset[int] = frozenset()  # inputs that a convolution of recurrent layers reads
    latents: frozenset[LatentDims] = frozenset()


class LatentRows(NamedTuple):
    """Rows that a step stores in a layer of latent attention, and the parameters to norm and rotate them first.

    Latents have `rank` = len(norm.weight) numbers.
    """

    projected: Tensor  # [T, rank + rope_dim]: the latents, to be normed, and keys, to be rotated
    norm: Norm
    cos_sin: Tensor  # float32 [max_positions, rope_dim], as in Heads
    positions: Tensor  # [T] int64
    out_cache_loc: Tensor  # [T] int64: rows of the cache
    cache: Tensor  # [pages, page_size, 1, rank + rope_dim], in the dtype of `projected` or float8_e4m3fn


class DecodeInputs(NamedTuple):
    """Inputs of a decode, per row: the newest token, its position and its place in the KV pool."""

    input_ids: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64
    out_cache_loc: Tensor  # [rows] int64: page * page_size + offset
    kv_lens: Tensor  # [rows] int32
    page_table: Tensor  # [rows, max_pages] int32; undefined after a row's length


class Weight(Protocol):
    """Matrix [out, in] of a linear layer with the products that read it, chosen once when it is loaded (`Ops.bind`).

    Each layout or quantized format is a class of its own.
    """

    @property
    def tensor(self) -> Tensor:
        """Return the matrix in the form that products of many rows read."""

    @property
    def label(self) -> str:
        """Layout of the matrix and its products, in a few words for the log."""

    def linear(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Compute `Ops.linear` with this weight."""

    def norm_linear(
        self, x: Tensor, norm: Norm | None, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Compute `Ops.norm_linear` with this weight."""

    def norm_gated_linear(
        self, x: Tensor, norm: Norm | None, bias: Tensor | None = None, *, activation: Activation
    ) -> Tensor:
        """Compute `Ops.norm_gated_linear` with this weight."""


class Ops(Protocol):
    """Operations of a layer besides attention. Results have the dtype of the input; sums are float32."""

    def begin_compiling(self, needs: KernelNeeds, /) -> None:
        """Begin to compile, in threads, the kernels that would otherwise be compiled at their first use, if any."""

    def decode_inputs(
        self, slots: Tensor, tokens: Tensor, lengths: Tensor, page_table: Tensor, page_size: int, *, pages: bool
    ) -> DecodeInputs:
        """Gather the inputs of a decode of `slots` [rows] int64 from int32 tables of all slots: tokens
        [slots, max_len], lengths [slots] and page table [slots, max_pages].

        Without `pages` the rows of the page table are left out.
        """

    def embed(self, ids: Tensor, weight: Tensor, first: int | None = None) -> Tensor:
        """ids [T] int64, weight [vocab, H] -> weight[ids], [T, H].

        With `first` the weight has the ids from `first` on; other ids give zeros.
        """

    def bind(self, weight: Tensor, grid: Int4Grid | None = None) -> Weight:
        """Return a loaded weight [out, in] with its products, in the layout that they read fastest.

        `grid`: scales and offsets of a weight that has been rounded to 4 bits, which some products on CPUs read
        instead.
        """

    def keeps(self, form: LevelFormat, width: int, size: int, dtype: torch.dtype) -> bool:
        """Return True if a weight [width, size] of this format stays quantized for products in `dtype`."""

    def keeps_experts(self, form: LevelFormat, width: int, size: int, dtype: torch.dtype) -> bool:
        """Return True if experts [experts, width, size] of this format stay quantized for `moe` in `dtype`."""

    def bind_levels(self, levels: Levels, dtype: torch.dtype, *, gated: bool) -> Weight:
        """Return a loaded quantized weight with its products in `dtype`. `gated`: only `norm_gated_linear` reads it."""

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """x [T, H] -> x / sqrt(mean(x^2) + eps) * weight, [T, H].

        The quotient is rounded to the weight's dtype, the product to x's: with a float32 weight only the result is.
        """

    def norm_add(
        self, x: Tensor, norm: Norm, residual: Tensor, *next_norms: Norm, factor: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """End a block: y = (residual + rms_norm(x)) * factor, and rms_norm(y) by each of the next norms.

        All are [T, H], factor is [1] in their dtype. May overwrite x and the residual.
        """

    def activate(self, gate: Tensor, up: Tensor, activation: GateActivation) -> Tensor:
        """Return activation(gate) * up, [T, I]. Rows of gate and up may be strided. May overwrite the gate."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """x [T, in], weight [out, in], bias [out], residual [T, out] -> x @ weight.T + bias + residual, [T, out].

        May overwrite the residual.
        """

    def norm_linear(
        self, x: Tensor, norm: Norm | None, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """linear(rms_norm(x)), which begins each half of a decoder layer; without a norm linear(x).

        The result is written to `out`, if given.
        """

    def norm_gated_linear(
        self, x: Tensor, norm: Norm | None, weight: Tensor, bias: Tensor | None = None, *, activation: Activation
    ) -> Tensor:
        """activation(gate) * up of norm_linear(x), whose weight [2 * I, in] has the gate first: [T, I]."""

    def norm_rope_store(
        self, qkv: Tensor, heads: Heads, positions: Tensor, out_cache_loc: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        """Split qkv [T, (heads + 2 * kv_heads) * head_dim]; norm and rotate q and k as `heads` says; write k and v to
        the rows `out_cache_loc` of the caches [pages, page_size, kv_heads, head_dim], in qkv's dtype or float8_e4m3fn,
        where what is beyond 448 becomes 448. Without KV heads in `heads` nothing is written. Returns q [T, heads,
        head_dim].
        """

    def delta_step(
        self, projected: Tensor, heads: DeltaHeads, inputs: Tensor, memory: Tensor, rows: SingleRows, out: Tensor
    ) -> None:
        """Compute rows of one token through a Gated DeltaNet: read their tokens of projected [T, width] and write the
        same tokens of `out` [T, value_heads * value_dim].

        Updates the rows' `inputs` [slots, conv_size - 1, channels] and `memory` [slots, value_heads, key_dim,
        value_dim] float32. Only the scratch slot may occur several times.
        """

    def delta_chunks(
        self, projected: Tensor, heads: DeltaHeads, inputs: Tensor, memory: Tensor, rows: ChunkedRows, out: Tensor
    ) -> None:
        """Compute rows of several tokens, as `delta_step` computes rows of one token. If the rows have no padded
        chunks, other tokens of `out` may be overwritten too.
        """

    def delta_graph_safe(self, heads: DeltaHeads, dtype: torch.dtype, /) -> bool:
        """Return True if `delta_chunks` takes rows without padded chunks, as they are in a CUDA graph."""

    def norm_rope_store_latent(self, rows: LatentRows, q_rope: Tensor, rotated: Tensor) -> None:
        """Store the rows of latent attention, and rotate q_rope [T, heads, rope_dim] into `rotated`, of the same shape.

        `rotated` may be q_rope itself.
        """

    def latent_query(self, rows: LatentRows, q_nope: Tensor, q_rope: Tensor, keys: Tensor) -> Tensor:
        """Store a step's rows as `norm_rope_store_latent` does, and return the absorbed queries.

        q_nope [T, heads, nope_dim] times its head's part of keys [heads, nope_dim, rank], then q_rope rotated:
        [T, heads, rank + rope_dim].
        """

    def latent_values(self, latents: Tensor, weight: Tensor) -> Tensor:
        """Return the values [T, heads, value_dim] that weight [heads, value_dim, rank] makes of [T, heads, rank]."""

    def norm_moe(
        self,
        x: Tensor,
        norm: Norm | None,
        weight: Tensor,
        bias: Tensor | None,
        gate: Tensor | None,
        mixture: Mixture,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return rms_norm(x) [T, H] and a mixture of experts of it, `moe` of the router's logits in their dtype.

        The router has the weight [experts, H]. `gate` [1, H] belongs to a shared expert that `merges_shared`; its logit
        follows the others.
        """

    def moe(self, x: Tensor, router_logits: Tensor, mixture: Mixture, residual: Tensor | None = None) -> Tensor:
        """Compute a mixture of gated experts: x [T, H] -> the weighted sum of each token's experts' outputs, [T, H].

        The residual [T, H] is added, if there is one, and the output of the mixture's shared expert, which is given
        only if `merges_shared`.

        A token's experts are the `top_k` of the scores of router_logits [T, experts] in float32, plus `biases.choice`;
        their weights are the scores, divided by their sum if `renormalize`, times `expert_scale`.
        """

    def moe_chosen(self, x: Tensor, weights: Tensor, experts: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        """Compute `moe`, with silu and without biases, for tokens whose experts are already chosen: ids [T, top_k],
        distinct within a token, and their weights.
        """

    def merges_shared(self, tokens: int, mixture: Mixture, /) -> bool:
        """Return True if `norm_moe` includes the mixture's shared expert for this number of tokens."""

    def moe_graph_safe(self, mixture: Mixture, /) -> bool:
        """Return True if `moe` launches the same work for any data, as a CUDA graph requires."""
