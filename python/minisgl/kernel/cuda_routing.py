"""Choice of experts by scores, biases and groups (csrc/moe_choose.cu), for routings that are not `Routing.plain`."""

from __future__ import annotations

import torch
from torch import Tensor

from minisgl.kernel.base import Routing
from minisgl.kernel.compile import Compiler
from minisgl.kernel.signature import KernelSpec

_WARPS = 4  # as in moe_choose.cu: of a block, each with a token
_MAX_GROUPS = 32


class CudaRouting:
    """Chooses experts as `torch_ops.route` does, in one launch."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler

    @staticmethod
    def supports(routing: Routing) -> bool:
        """Return True if the kernel knows this routing."""
        return routing.groups <= _MAX_GROUPS and routing.group_scores in (1, 2)

    def __call__(self, router_logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return weights, float32, and experts, int32, of logits [tokens, experts]: [tokens, top_k] each."""
        tokens, experts = router_logits.shape
        chosen = torch.empty(tokens, routing.top_k, dtype=torch.int32, device=router_logits.device)
        weights = torch.empty_like(chosen, dtype=torch.float32)
        kernel = self._compiler.kernel(_spec, experts, routing.top_k)
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
            experts=chosen,
            weights=weights,
        )
        return weights, chosen


def _spec(experts: int, top_k: int) -> KernelSpec:
    return KernelSpec("moe_choose.cu", "moe_choose", {"SCALAR": "f32", "EXPERTS": experts, "TOP_K": top_k})
