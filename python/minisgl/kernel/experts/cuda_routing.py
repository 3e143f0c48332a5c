"""Router of a mixture of experts: RMSNorm and router logits in one launch, and routing beyond the top-k of a softmax.

csrc/moe_router.cu computes norm and logits for a few tokens, csrc/moe_router_many.cu for up to some hundred tokens with
a 16-bit router on Hopper. csrc/moe_choose.cu chooses experts if the rule is not the top-k of a softmax of 16-bit logits
(sigmoid scores, biases, groups).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from minisgl.kernel.base import Norm, Routing
from minisgl.kernel.gemm.small_batch_gemm import MAX_ROWS
from minisgl.kernel.launch.compile import Compiler
from minisgl.kernel.launch.signature import SCALAR_NAMES, KernelSpec, Macros

_WARPS = 4  # warps per block of moe_choose.cu, as declared there
_MAX_GROUPS = 32
# moe_router.cu.
_MAX_ROUTER_THREADS = 384  # per block; each thread has eight values of a token at a time
_ROUTER_TOKENS = 4  # most tokens per block
_ROUTER_EXPERTS = 2  # experts per block, as declared in moe_router.cu
_MAX_SCORES = 2048  # tokens times experts up to which this launch is faster than a norm and a 16-bit product
# moe_router_many.cu. If the router has fewer than _MIN_EXPERTS, blocks of moe_router.cu leave most of the GPU idle, and
# clusters are faster at any number of tokens; otherwise they are faster from _MIN_TOKENS on. On GPUs without clusters,
# a norm and the product of skinny_gemm.py are faster in these cases.
_MIN_EXPERTS = 64
_MIN_TOKENS = 17
_CLUSTER = 8  # blocks of a cluster, as declared in moe_router_many.cu
_CLUSTER_TOKENS = 16  # tokens per cluster, as declared there
_MAX_LOADS = 16  # 16-byte loads of the router's weight that a thread keeps in registers
_MAX_UNITS = 32  # units of 32 columns for which a block has shared memory
# Limits up to which all clusters run at once, which is faster than two launches.
_MAX_MANY = 256  # tokens
_MAX_MANY_SCORES = 1 << 15  # tokens times experts


class _RouterTiling(NamedTuple):
    """Macros of moe_router_many.cu: the division of a router's experts and columns among warps and blocks."""

    tiles: int  # tiles of eight experts of a warp
    kparts: int  # warps that divide the columns of the same experts
    units: int  # units of 32 columns of a block

    @classmethod
    def of(cls, experts: int, size: int) -> _RouterTiling | None:
        """Return the tiling of a router [experts, size], if it has one."""
        warps = 8 if experts <= 128 else 16
        tiles, kparts = max(experts // (8 * warps), 1), max(8 * warps // experts, 1)
        units = -(-(size // 32) // _CLUSTER)
        whole = experts % 32 == 0 and experts * kparts == 8 * warps * tiles and size % 32 == 0
        fits = units <= _MAX_UNITS and tiles * -(-units // kparts) <= _MAX_LOADS
        return cls(tiles, kparts, units) if whole and fits else None

    def threads(self, experts: int) -> int:
        return experts // 8 // self.tiles * self.kparts * 32


class CudaRouting:
    """Scores and chooses experts as `TorchOps.norm_router` and `torch_ops.route` do."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler

    @staticmethod
    def scores(x: Tensor, weight: Tensor) -> bool:
        """Return True if `norm_router` supports tokens x [T, H] and a router's weight [experts, H]."""
        most = MAX_ROWS if weight.dtype == torch.float32 else min(_MAX_SCORES // len(weight), MAX_ROWS)
        least = _MIN_TOKENS if weight.dtype == x.dtype and len(weight) < _MIN_EXPERTS else 1
        few = least <= len(x) <= most and x.is_contiguous() and x.shape[1] % 8 == 0
        return few and x.dtype in (torch.bfloat16, torch.float16) and weight.dtype in (torch.float32, x.dtype)

    def norm_router(
        self, x: Tensor, norm: Norm | None, weight: Tensor, bias: Tensor | None, gate: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return norm(x) [T, H], and its products with weight [experts, H] plus bias, and with gate [1, H]."""
        (tokens, size), experts = x.shape, len(weight)
        outputs = experts + (gate is not None)
        normed = x if norm is None else torch.empty_like(x)
        logits = weight.new_empty((tokens, outputs))
        vectors = size // 8
        passes = -(-vectors // _MAX_ROUTER_THREADS)
        threads = -(-vectors // (32 * passes)) * 32
        dtypes = x.dtype, norm.weight.dtype if norm else x.dtype, weight.dtype
        block_tokens = 1 if tokens == 1 else _ROUTER_TOKENS
        kernel = self._compiler.kernel(_router_spec, *dtypes, threads, block_tokens)
        kernel(
            (-(-outputs // _ROUTER_EXPERTS), -(-tokens // block_tokens)),
            threads,
            x=x,
            norm=norm.weight if norm else None,
            eps=norm.eps if norm else 0.0,
            weight=weight,
            bias=bias,
            gate=gate,
            normed=normed if norm else None,
            logits=logits,
            tokens=tokens,
            experts=experts,
            H=size,
        )
        return normed, logits

    def scores_many(self, x: Tensor, weight: Tensor) -> bool:
        """Return True if `norm_router_many` supports tokens x [T, H] and a router's weight [experts, H]."""
        tokens, experts = len(x), len(weight)
        least = 1 if experts < _MIN_EXPERTS else _MIN_TOKENS
        many = least <= tokens <= min(_MAX_MANY, _MAX_MANY_SCORES // experts)
        same = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16) and x.is_contiguous()
        return self._compiler.arch == 90 and many and same and _RouterTiling.of(*weight.shape) is not None

    def norm_router_many(self, x: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return norm(x) [T, H], and its products with weight [experts, H] plus bias."""
        logits = weight.new_empty((len(x), len(weight)))
        macros: Macros = {"SCALAR": SCALAR_NAMES[x.dtype], "EXPERTS": len(weight)}
        return self._by_clusters("moe_router_many", x, norm, weight, bias, macros, logits=logits), logits

    def norm_router_choose(
        self, x: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None, mixture: Macros, **choice: Any
    ) -> Tensor:
        """Return norm(x) [T, H], and choose experts by its products with weight [experts, H] plus bias.

        `mixture`: macros of moe.cuh. `choice`: the kernel's other arguments.
        """
        return self._by_clusters("moe_router_choose", x, norm, weight, bias, mixture, **choice)

    def _by_clusters(
        self, name: str, x: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None, macros: Macros, **rest: Any
    ) -> Tensor:
        """Launch a kernel of csrc/moe_router_many.cu, `rest` its further arguments, and return norm(x)."""
        (tokens, size), experts = x.shape, len(weight)
        tiling = _RouterTiling.of(experts, size)
        if tiling is None:
            raise ValueError(f"no cluster divides a router of {experts} experts and {size} columns")
        normed = torch.empty_like(x)
        kernel = self._compiler.kernel(_many_spec, name, norm.weight.dtype, tiling, tuple(macros.items()))
        kernel(
            (1, -(-tokens // _CLUSTER_TOKENS)),
            tiling.threads(experts),
            cluster=_CLUSTER,
            x=x,
            norm=norm.weight,
            eps=norm.eps,
            weight=weight,
            bias=bias,
            normed=normed,
            tokens=tokens,
            H=size,
            **rest,
        )
        return normed

    @staticmethod
    def supports(routing: Routing) -> bool:
        """Return True if moe_choose.cu supports this routing."""
        return routing.groups <= _MAX_GROUPS and routing.group_scores in (1, 2)

    def __call__(self, router_logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return weights, float32, and experts, int32, of logits [tokens, experts]: [tokens, top_k] each."""
        chosen = router_logits.new_empty((len(router_logits), routing.top_k), dtype=torch.int32)
        weights = torch.empty_like(chosen, dtype=torch.float32)
        self._choose(router_logits, routing, bias, torch.bfloat16, experts=chosen, weights=weights)
        return weights, chosen

    def table(self, router_logits: Tensor, routing: Routing, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the weights of each token's experts, and -1 for the others: [tokens, experts] in a 16-bit dtype."""
        table = torch.empty_like(router_logits, dtype=dtype)
        self._choose(router_logits, routing, bias, dtype, table=table)
        return table

    def _choose(
        self,
        router_logits: Tensor,
        routing: Routing,
        bias: Tensor | None,
        dtype: torch.dtype,
        experts: Tensor | None = None,
        weights: Tensor | None = None,
        table: Tensor | None = None,
    ) -> None:
        tokens, count = router_logits.shape
        kernel = self._compiler.kernel(_spec, dtype, count, routing.top_k)
        kernel(
            (-(-tokens // _WARPS),),
            32 * _WARPS,
            router_logits=router_logits.float().contiguous(),
            bias=bias,
            tokens=tokens,
            sigmoid=routing.score == "sigmoid",
            groups=routing.groups,
            top_groups=routing.top_groups,
            group_scores=routing.group_scores,
            renormalize=routing.renormalize,
            scale=routing.scale,
            experts=experts,
            weights=weights,
            table=table,
        )


def _spec(dtype: torch.dtype, experts: int, top_k: int) -> KernelSpec:
    macros: Macros = {"SCALAR": SCALAR_NAMES[dtype], "EXPERTS": experts, "TOP_K": top_k}
    return KernelSpec("moe_choose.cu", "moe_choose", macros)


def _router_spec(
    dtype: torch.dtype, norm_dtype: torch.dtype, logit_dtype: torch.dtype, threads: int, tokens: int
) -> KernelSpec:
    macros: Macros = {
        "SCALAR": SCALAR_NAMES[dtype],
        "NORM_SCALAR": SCALAR_NAMES[norm_dtype],
        "LOGIT_SCALAR": SCALAR_NAMES[logit_dtype],
        "THREADS": threads,
        "TOKENS": tokens,
    }
    return KernelSpec("moe_router.cu", "moe_router", macros)


def _many_spec(
    name: str, norm_dtype: torch.dtype, tiling: _RouterTiling, macros: tuple[tuple[str, str | int], ...]
) -> KernelSpec:
    divided: Macros = {
        "NORM_SCALAR": SCALAR_NAMES[norm_dtype],
        "TILES": tiling.tiles,
        "KPARTS": tiling.kparts,
        "UNITS": tiling.units,
    }
    return KernelSpec("moe_router_many.cu", name, {**dict(macros), **divided})
