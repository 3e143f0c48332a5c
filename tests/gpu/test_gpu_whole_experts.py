"""Expert parallelism: a rank has some experts as a whole, and computes its part of the sum for any routing."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from gpu.test_gpu_moe import distinct_scores, in_double, layer
from gpu.test_gpu_quantized_moe import experts
from minisgl.kernel.base import (
    NO_BIASES,
    ClampedSwiGLU,
    ExpertActivation,
    ExpertBiases,
    ExpertMatrices,
    Mixture,
    Ops,
    Routing,
)
from minisgl.kernel.torch_ops import TorchOps
from minisgl.quantization.expert_layout import PackedExperts
from minisgl.quantization.levels import LevelFormat

pytestmark = pytest.mark.gpu

COUNT, HIDDEN, INTERMEDIATE = 24, 512, 256
RANKS = (range(9), range(9, 24))
PLAIN = Routing(4, renormalize=True)
GROUPED = Routing(4, renormalize=True, score="sigmoid", groups=4, top_groups=2, scale=2.5)


@pytest.fixture(scope="module")
def ops() -> Ops:
    from minisgl.kernel.cuda_ops import CudaOps

    return CudaOps(torch.device("cuda", 0))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


Matrices: TypeAlias = tuple[ExpertMatrices, ExpertMatrices]


def make_matrices(form: LevelFormat | None) -> tuple[Matrices, Matrices]:
    """All experts, and their values in float64."""
    if form is None:
        w13, w2 = layer(COUNT, HIDDEN, INTERMEDIATE, torch.bfloat16)
        return (w13, w2), (w13.double(), w2.double())
    packed13, wide13 = experts(form, COUNT, 2 * INTERMEDIATE, HIDDEN, torch.bfloat16, gated=True)
    packed2, wide2 = experts(form, COUNT, HIDDEN, INTERMEDIATE, torch.bfloat16, gated=False)
    return (packed13, packed2), (wide13, wide2)


def held(matrices: ExpertMatrices, rank: range) -> ExpertMatrices:
    """The matrices of a rank's experts."""
    kept = slice(rank.start, rank.stop)
    if isinstance(matrices, Tensor):
        return matrices[kept]
    assert isinstance(matrices, PackedExperts)
    return dataclasses.replace(
        matrices,
        shape=(len(rank), *matrices.shape[1:]),
        words=matrices.words[kept],
        scales=matrices.scales[kept],
        row_scales=None if matrices.row_scales is None else matrices.row_scales[kept],
    )


@pytest.mark.parametrize(
    ("form", "routing", "activation"),
    [
        (None, PLAIN, "silu"),
        (None, GROUPED, "silu"),
        (LevelFormat("fp8", 128), PLAIN, "silu"),
        (LevelFormat("mxfp4", 32), PLAIN, ClampedSwiGLU(1.702, 7.0)),
    ],
    ids=["bf16", "bf16 grouped", "fp8", "mxfp4"],
)
def test_a_rank_adds_its_experts_alone(
    ops: Ops, form: LevelFormat | None, routing: Routing, activation: ExpertActivation
) -> None:
    (matrices, wide), clamped = make_matrices(form), activation != "silu"
    biases = [torch.randn(COUNT, width, device="cuda").bfloat16() for width in (2 * INTERMEDIATE, HIDDEN)]
    for tokens in (1, 2, 7, 33, 128, 129, 500, 2100):
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        scores = distinct_scores(tokens, COUNT, torch.bfloat16)
        if tokens in (2, 33, 500):  # none of them is sent to the first rank
            scores[:, : len(RANKS[0])] -= 20.0
        for rank in RANKS:
            kept = slice(rank.start, rank.stop)
            own = ExpertBiases(None, biases[0][kept], biases[1][kept]) if clamped else NO_BIASES
            w13, w2 = (held(each, rank) for each in matrices)
            mixture = Mixture(w13, w2, COUNT, routing, own, activation, rank.start)
            have = ops.moe(x, scores, mixture).double()
            wide13, wide2 = (held(each, rank) for each in wide)
            want = TorchOps().moe(x.double(), scores.double(), in_double(mixture, w13=wide13, w2=wide2))
            error = float((have - want).norm() / want.norm()) if want.any() else float(have.abs().max())
            assert error < 1e-2, f"{tokens} tokens, experts {rank}: {error:.2e}"


@pytest.mark.parametrize("tokens", [2, 24])
def test_a_graph_serves_any_routing(ops: Ops, tokens: int) -> None:
    """Replayed when all, some or none of the tokens are sent to the rank: bitwise what an eager call gives."""
    rank = RANKS[0]
    w13, w2 = (held(each, rank) for each in make_matrices(None)[0])
    mixture = Mixture(w13, w2, COUNT, PLAIN, first=rank.start)
    x, scores = torch.randn(tokens, HIDDEN, device="cuda").bfloat16(), distinct_scores(tokens, COUNT, torch.bfloat16)
    ops.moe(x, scores, mixture)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.moe(x, scores, mixture)
    for added in (0.0, -20.0, 20.0, 0.0, -20.0):
        x.copy_(torch.randn_like(x))
        scores.copy_(distinct_scores(tokens, COUNT, torch.bfloat16))
        scores[:, : len(rank)] += added
        graph.replay()
        eager = ops.moe(x, scores, mixture)
        assert torch.equal(captured, eager)
        if added:
            assert bool(eager.any()) == (added > 0)
