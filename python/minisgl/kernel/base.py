"""The fused operations that layers call. `TorchOps` is the reference, `CudaOps` the same on kernels of csrc/."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Ops(Protocol):
    """Operations between the matrix products. All of them keep the dtype of their input; sums are float32."""

    moe_graph_safe: bool  # `moe` launches the same work whatever its data: a CUDA graph may hold it

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, in], weight [out, in], bias [out] -> x @ weight.T + bias, [T, out]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, H] -> x / sqrt(mean(x^2) + eps) * weight, [T, H]."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual); may overwrite both arguments."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 * I] with the gate first -> silu(gate) * up, [T, I]."""
        ...

    def norm_rope_store(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv_slots: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        num_heads: int,
        num_kv_heads: int,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Split qkv [T, (heads + 2 * kv_heads) * head_dim]; RMS-norm each head of q and k where weights are given
        (Qwen3); rotate q and k by `cos_sin[positions]`; write k and v to the cache rows `kv_slots`.

        cos_sin is float32 [max_positions, head_dim]: cosines in the first half of the last axis, sines in the
        second; the rotation pairs dimension i with i + head_dim / 2 (the "neox" layout). The caches are
        [pages, page_size, kv_heads, head_dim]. Returns q [T, heads, head_dim].
        """
        ...

    def moe(
        self, x: Tensor, router_logits: Tensor, w13: Tensor, w2: Tensor, *, top_k: int, renormalize: bool
    ) -> Tensor:
        """A mixture of gated experts: x [T, H] -> the weighted sum of the outputs of each token's experts, [T, H].

        A token's experts are the top_k of softmax(router_logits [T, experts]) in float32, their weights those
        probabilities, divided by their sum if `renormalize`. w13 is [experts, 2 * I, H] with the gate first, w2
        [experts, H, I]: expert e gives w2[e] @ silu_and_mul(w13[e] @ x).
        """
        ...
