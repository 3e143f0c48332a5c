"""Mixture of experts on csrc/: three kernel launches for few tokens (two with quantized experts), five for many.

The host reads nothing back: grids are large enough for any routing, and blocks without work return at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minisgl.kernel.base import (
    ClampedSwiGLU,
    ExpertKind,
    ExpertMatrices,
    Mixture,
    Norm,
    Routing,
)
from minisgl.kernel.experts import dense_moe, quantized_moe
from minisgl.kernel.experts.cuda_routing import CudaRouting
from minisgl.kernel.experts.dense_moe import DenseMoeTiling, ExpertProduct
from minisgl.kernel.experts.quantized_moe import ProductTilings, QuantizedMoeTiling
from minisgl.kernel.gemm.small_batch_gemm import MAX_ROWS
from minisgl.kernel.launch.compile import Compiler
from minisgl.kernel.launch.signature import SCALAR_NAMES, KernelSpec, Launcher, Macros
from minisgl.kernel.torch_ops import route
from minisgl.quantization.expert_layout import PackedExperts
from minisgl.quantization.levels import LevelFormat

_MAX_EXPERTS = 512
_MAX_TOP_K = 32
_MAX_WITH_GATE = 16  # most tokens for which a shared expert with a gate is merged into the routed ones
_PLAN_TOKENS = 128  # most tokens that one block routes and sorts, as in moe.cu
_MAX_THREADS = 1024  # threads per block
_ROUTE_THREADS = 128


class _Kind(NamedTuple):
    """Sparse layer in one dtype; `macros` are those of csrc/moe.cuh."""

    dtype: torch.dtype
    experts: ExpertKind

    @property
    def taken(self) -> int:
        """Number of experts that a token takes."""
        return self.experts.top_k + self.experts.shared

    @property
    def macros(self) -> Macros:
        experts = self.experts
        return {
            "SCALAR": SCALAR_NAMES[self.dtype],
            "LOGIT_SCALAR": SCALAR_NAMES[experts.logits or self.dtype],
            "EXPERTS": experts.num_experts,
            "TOP_K": experts.top_k,
            "SHARED": experts.shared,
            "GATED_SHARED": int(experts.shared_gate),
        }


class _Plan(NamedTuple):
    """(token, expert) pairs sorted by expert; pair n is the (n % taken)-th expert of token n // taken."""

    tiles: Tensor  # [most tiles of any routing, 4] int32: expert, first index in `order`, number of pairs, unused
    tile_count: Tensor  # [1] int32
    order: Tensor  # [pairs] int32: pairs of this rank's experts, sorted by expert
    weights: Tensor  # [pairs] float32; ELSEWHERE of moe.cuh for pairs whose expert another rank holds


class _Weighting(IntEnum):
    """Source of the weights of a token's experts, numbered as in csrc/moe.cuh."""

    PROBABILITIES = 0
    RENORMALIZED = 1
    CHOSEN = 2  # by another kernel, for routings other than the top-k of a softmax


class CudaMoe:
    """Implements kernel.base.Ops.moe for 16-bit floats."""

    def __init__(self, compiler: Compiler, routing: CudaRouting) -> None:
        self._compiler = compiler
        self._routing = routing

    def begin_compiling(self, dtype: torch.dtype, experts: ExpertKind) -> None:
        """Begin to compile the kernels of these experts."""
        form = experts.form
        tilings: Sequence[DenseMoeTiling | QuantizedMoeTiling] = dense_moe.tilings(self._compiler.arch)
        if form is not None:
            tilings = quantized_moe.tilings(form)
        for each in {experts, experts._replace(shared=0, shared_gate=False)}:
            kind = _Kind(dtype, each)
            self._compiler.begin([_plan_spec("moe_combine", kind)])
            self._compiler.begin(_product_spec("gated", form, tiling, kind) for tiling in tilings)

    def keeps(self, form: LevelFormat, width: int, size: int, dtype: torch.dtype) -> bool:
        """Return True if the kernels read experts [width, size] of this format as they are."""
        return self._compiler.arch == 90 and quantized_moe.supports(form, width, size, dtype)

    @staticmethod
    def supports(mixture: Mixture) -> bool:
        """Return True if the kernels can compute this layer for any number of tokens."""
        w13, w2, num_experts, top_k = mixture.w13, mixture.w2, mixture.num_experts, mixture.routing.top_k
        _, hidden, intermediate = w2.shape
        sizes = hidden % 8 == 0 and intermediate % 8 == 0 and num_experts <= _MAX_EXPERTS and top_k <= _MAX_TOP_K
        if isinstance(w13, PackedExperts) or isinstance(w2, PackedExperts):
            return sizes
        whole = w13.is_contiguous() and w2.is_contiguous()
        return sizes and whole and w2.dtype in (torch.bfloat16, torch.float16)

    def __call__(self, x: Tensor, router_logits: Tensor, mixture: Mixture, residual: Tensor | None = None) -> Tensor:
        """Compute Ops.moe."""
        routing, bias = mixture.routing, mixture.biases.choice
        weighting = _weighting(routing)
        if not routing.plain or bias is not None or router_logits.dtype not in (x.dtype, torch.float32):
            router_logits, weighting = self._choose(router_logits, routing, bias, x.dtype), _Weighting.CHOSEN
        return self._mix(x, router_logits, weighting, mixture, residual)

    def chooses_with_router(self, x: Tensor, weight: Tensor, mixture: Mixture) -> bool:
        """Return True if `norm_mix` supports tokens x [T, H], a router's weight [experts, H] and these experts."""
        routing = mixture.routing
        if not routing.plain or mixture.biases.choice is not None or not self.supports(mixture):
            return False
        gated_tiling, _ = self._tilings(len(x) * routing.top_k, mixture.num_experts, mixture.w13)
        return not gated_tiling.route and self._routing.scores_many(x, weight)

    def norm_mix(
        self,
        x: Tensor,
        norm: Norm,
        weight: Tensor,
        bias: Tensor | None,
        mixture: Mixture,
        residual: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Compute Ops.norm_moe; the launch of norm and router chooses the experts, too."""
        tokens, device, held = len(x), x.device, len(mixture.w2)
        kind, weighting = _kind(x.dtype, weight.dtype, mixture), _weighting(mixture.routing)
        gated_tiling, _ = self._tilings(tokens * mixture.routing.top_k, mixture.num_experts, mixture.w13)
        plan = _empty_plan(tokens, device, held, kind, gated_tiling.block_m)
        chosen = torch.empty(tokens * kind.taken, dtype=torch.int32, device=device)
        normed = self._routing.norm_router_choose(
            x,
            norm,
            weight,
            bias,
            kind.macros,
            **_route_arguments(weighting, mixture),
            experts=chosen,
            weights=plan.weights,
        )
        self._sort(chosen, tokens, kind, gated_tiling.block_m, plan)
        return normed, self._products(normed, None, plan, kind, weighting, mixture, residual)

    def merges_shared(self, tokens: int, mixture: Mixture) -> bool:
        """Return True if for this number of tokens the shared expert is computed as additional routed experts.

        With more tokens separate products are as fast, and the router's launch, which also computes the logit of the
        shared expert's gate, is slower than a norm and a product.
        """
        w13, shared, routing = mixture.w13, mixture.shared, mixture.routing
        if shared is None or not isinstance(w13, Tensor) or not self.supports(mixture):
            return False
        parts, rest = divmod(shared.w2.shape[1], mixture.w2.shape[2])
        if rest or routing.top_k + parts > _MAX_TOP_K or shared.has_gate > routing.plain:
            return False
        few = 0 < tokens <= (_MAX_WITH_GATE if shared.has_gate else MAX_ROWS)
        return few and all(one.is_contiguous() and one.dtype == w13.dtype for one in (shared.w13, shared.w2))

    def mix_chosen(self, x: Tensor, weights: Tensor, experts: Tensor, mixture: Mixture) -> Tensor:
        """Compute Ops.moe_chosen."""
        table = _table(weights, experts, mixture.num_experts, x.dtype)
        return self._mix(x, table, _Weighting.CHOSEN, mixture, None)

    def _mix(
        self, x: Tensor, router_logits: Tensor, weighting: _Weighting, mixture: Mixture, residual: Tensor | None
    ) -> Tensor:
        """Mix the experts of each token that the router's logits choose."""
        if not len(x):
            return torch.empty_like(x)
        x, router_logits = x.contiguous(), router_logits.contiguous()
        kind = _kind(x.dtype, router_logits.dtype, mixture)
        gated_tiling, _ = self._tilings(len(x) * mixture.routing.top_k, mixture.num_experts, mixture.w13)
        plan: _Plan | None = None
        if not gated_tiling.route:
            plan = self._plan(router_logits, weighting, mixture, kind, gated_tiling.block_m)
        return self._products(x, router_logits, plan, kind, weighting, mixture, residual)

    def _products(
        self,
        x: Tensor,
        router_logits: Tensor | None,
        plan: _Plan | None,
        kind: _Kind,
        weighting: _Weighting,
        mixture: Mixture,
        residual: Tensor | None,
    ) -> Tensor:
        """Compute both products of the pairs of a plan.

        Without a plan each pair is a tile, whose block chooses the expert by the router's logits.
        """
        w13, w2, shared = mixture.w13, mixture.w2, mixture.shared
        tokens, hidden = x.shape
        held, _, intermediate = w2.shape
        pairs = tokens * kind.taken
        gated_tiling, weighted_tiling = self._tilings(tokens * mixture.routing.top_k, mixture.num_experts, w13)
        max_tiles = pairs if plan is None else len(plan.tiles)
        inner = x.new_empty((pairs, intermediate))
        summed = isinstance(w2, PackedExperts) and weighted_tiling.route  # by clusters of the second product
        outputs = x.new_empty((tokens if summed else pairs, hidden))
        common = {"router_logits": router_logits, **_product_arguments(weighting, mixture, plan)}
        gated = self._product("gated", w13, shared and shared.w13, gated_tiling, kind)
        gated(
            (-(-intermediate // (gated_tiling.block_n // 2)), max_tiles),
            gated_tiling.threads,
            x=x,
            divisor=kind.taken,
            bias=mixture.biases.w13,
            out=inner,
            N=intermediate,
            K=hidden,
            **common,
        )
        weighted = self._product("weighted", w2, shared and shared.w2, weighted_tiling, kind)
        summing = {"residual": residual if summed else None} if isinstance(w2, PackedExperts) else {}
        weighted(
            (-(-hidden // weighted_tiling.block_n), tokens if summed else max_tiles),
            weighted_tiling.threads,
            cluster=kind.taken if summed else 1,
            x=inner,
            divisor=1,
            bias=mixture.biases.w2,
            out=outputs,
            N=hidden,
            K=intermediate,
            **common,
            **summing,
        )
        if summed:
            return outputs
        # If a rank has only some of the experts, the weights say which pairs have an output.
        weights = None if plan is None or held == mixture.num_experts else plan.weights
        return self._combine(outputs, tokens, weights, residual, kind)

    def _combine(
        self, outputs: Tensor, tokens: int, weights: Tensor | None, residual: Tensor | None, kind: _Kind
    ) -> Tensor:
        """Return [tokens, H]: the sum of each token's weighted outputs [pairs, H] and its residual."""
        hidden = outputs.shape[1]
        out = outputs.new_empty((tokens, hidden))
        combine = self._compiler.kernel(_plan_spec, "moe_combine", kind)
        combine(
            (tokens,),
            min(-(-hidden // 256) * 32, _MAX_THREADS),
            y=outputs,
            pair_weights=weights,
            residual=residual,
            out=out,
            H=hidden,
        )
        return out

    def _choose(
        self, router_logits: Tensor, routing: Routing, choice_bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Choose each token's experts; return [T, experts] with their weights, and -1 for the others."""
        if CudaRouting.supports(routing):
            return self._routing.table(router_logits, routing, choice_bias, dtype)
        return _table(*route(router_logits, routing, choice_bias), router_logits.shape[1], dtype)

    def _plan(
        self, router_logits: Tensor, weighting: _Weighting, mixture: Mixture, kind: _Kind, tile_rows: int
    ) -> _Plan:
        tokens, device, held = len(router_logits), router_logits.device, len(mixture.w2)
        plan = _empty_plan(tokens, device, held, kind, tile_rows)
        if tokens <= _PLAN_TOKENS:
            route_and_sort = self._compiler.kernel(_plan_spec, "moe_plan", kind)
            route_and_sort(
                (1,),
                min(max(32 * tokens, 128), _MAX_THREADS),
                router_logits=router_logits,
                tokens=tokens,
                **_route_arguments(weighting, mixture),
                tile_rows=tile_rows,
                weights=plan.weights,
                order=plan.order,
                tiles=plan.tiles,
                tile_count=plan.tile_count,
            )
            return plan
        chosen = torch.empty(tokens * kind.taken, dtype=torch.int32, device=device)
        choose = self._compiler.kernel(_plan_spec, "moe_route", kind)
        choose(
            (-(-tokens // (_ROUTE_THREADS // 32)),),
            _ROUTE_THREADS,
            router_logits=router_logits,
            tokens=tokens,
            **_route_arguments(weighting, mixture),
            experts=chosen,
            weights=plan.weights,
        )
        self._sort(chosen, tokens, kind, tile_rows, plan)
        return plan

    def _sort(self, experts: Tensor, tokens: int, kind: _Kind, tile_rows: int, plan: _Plan) -> None:
        """Sort pairs by their experts [pairs] into `plan`, which has their weights already."""
        sort = self._compiler.kernel(_plan_spec, "moe_sort", kind)
        sort(
            (1,),
            min(max(-(-len(experts) // 32) * 32, 128), _MAX_THREADS),
            tokens=tokens,
            tile_rows=tile_rows,
            experts=experts,
            order=plan.order,
            tiles=plan.tiles,
            tile_count=plan.tile_count,
        )

    def _tilings(
        self, pairs: int, experts: int, w13: ExpertMatrices
    ) -> tuple[DenseMoeTiling, DenseMoeTiling] | ProductTilings:
        """Return the tilings of the two products for a number of (token, expert) pairs."""
        if isinstance(w13, PackedExperts):
            return quantized_moe.choose_tilings(w13.format, pairs, experts)
        tiling = dense_moe.choose_tiling(self._compiler.arch, pairs, experts)
        return tiling, tiling

    def _product(
        self,
        kernel: ExpertProduct,
        weight: ExpertMatrices,
        shared: Tensor | None,
        tiling: DenseMoeTiling | QuantizedMoeTiling,
        kind: _Kind,
    ) -> Launcher:
        """Return the launcher of a grouped product with the weight's arguments bound."""
        form, arguments = None, {"weight": weight, "shared": shared}
        if isinstance(weight, PackedExperts):
            form, arguments = weight.format, quantized_moe.weight_arguments(weight)
        return partial(self._compiler.kernel(_product_spec, kernel, form, tiling, kind), **arguments)


def _kind(dtype: torch.dtype, logits: torch.dtype, mixture: Mixture) -> _Kind:
    experts = ExpertKind(mixture.num_experts, mixture.routing.top_k, mixture.activation, logits=logits)
    shared = mixture.shared
    if shared is not None:
        experts = experts._replace(shared=shared.w2.shape[1] // mixture.w2.shape[2], shared_gate=shared.has_gate)
    return _Kind(dtype, experts)


def _weighting(routing: Routing) -> _Weighting:
    """Return how experts with the largest probabilities are weighed."""
    return _Weighting.RENORMALIZED if routing.renormalize else _Weighting.PROBABILITIES


def _route_arguments(weighting: _Weighting, mixture: Mixture) -> dict[str, Any]:
    """Return the arguments of moe.cuh's `route` that do not depend on tokens."""
    return {
        "weighting": weighting,
        "first_expert": mixture.first,
        "held": len(mixture.w2),
        "expert_scale": mixture.expert_scale,
    }


def _product_arguments(weighting: _Weighting, mixture: Mixture, plan: _Plan | None) -> dict[str, Any]:
    """Return the arguments that both products have besides matrices and logits; without a plan, tiles route."""
    clamped = mixture.activation if isinstance(mixture.activation, ClampedSwiGLU) else None
    return {
        "alpha": 0.0 if clamped is None else clamped.alpha,
        "limit": 0.0 if clamped is None else clamped.limit,
        **_route_arguments(weighting, mixture),
        "order": None if plan is None else plan.order,
        "tiles": None if plan is None else plan.tiles,
        "tile_count": None if plan is None else plan.tile_count,
        "pair_weights": None if plan is None else plan.weights,
    }


def _empty_plan(tokens: int, device: torch.device, held: int, kind: _Kind, tile_rows: int) -> _Plan:
    """Allocate a plan that is large enough for any routing of so many tokens."""
    chosen_pairs, pairs = tokens * kind.experts.top_k, tokens * kind.taken
    touched = min(chosen_pairs, held)
    tiles = touched + (chosen_pairs - touched) // tile_rows + kind.experts.shared * -(-tokens // tile_rows)
    return _Plan(
        tiles=torch.empty((tiles, 4), dtype=torch.int32, device=device),
        tile_count=torch.empty(1, dtype=torch.int32, device=device),
        order=torch.empty(pairs, dtype=torch.int32, device=device),
        weights=torch.empty(pairs, dtype=torch.float32, device=device),
    )


def _table(weights: Tensor, chosen: Tensor, experts: int, dtype: torch.dtype) -> Tensor:
    """Return [T, experts] with the weights [T, top_k] at their ids, and -1 for all other experts."""
    table = weights.new_full((len(weights), experts), -1.0, dtype=dtype)
    return table.scatter_(-1, chosen.long(), weights.to(dtype))


def _plan_spec(kernel: str, kind: _Kind) -> KernelSpec:
    return KernelSpec("moe.cu", kernel, kind.macros)


def _product_spec(
    kernel: ExpertProduct, form: LevelFormat | None, tiling: DenseMoeTiling | QuantizedMoeTiling, kind: _Kind
) -> KernelSpec:
    both: Macros = {
        **kind.macros,
        "ROUTE": int(tiling.route),
        "CLAMPED": int(isinstance(kind.experts.activation, ClampedSwiGLU)),
        "GELU_TANH": int(kind.experts.activation == "gelu_tanh"),
    }
    if isinstance(tiling, QuantizedMoeTiling):
        assert form is not None
        return quantized_moe.product_spec(kernel, form, tiling, both)
    return dense_moe.product_spec(kernel, tiling, both)
