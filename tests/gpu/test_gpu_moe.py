"""The mixture of experts on the kernels of csrc/ against torch in float64, on random shapes and routings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.kernel.base import ClampedSwiGLU, ExpertBiases, Mixture, Norm, Ops, Routing, SharedExpert
from minisgl.kernel.torch_ops import TorchOps

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}  # relative to the norm of the result


@pytest.fixture(scope="module")
def ops() -> Ops:
    from minisgl.kernel.cuda_ops import CudaOps

    return CudaOps(torch.device("cuda", 0))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def layer(experts: int, hidden: int, intermediate: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    w13 = torch.randn(experts, 2 * intermediate, hidden, device="cuda") * hidden**-0.5
    w2 = torch.randn(experts, hidden, intermediate, device="cuda") * intermediate**-0.5
    return w13.to(dtype), w2.to(dtype)


def make_mixture(
    routing: Routing, experts: int, hidden: int, intermediate: int, dtype: torch.dtype, **more: Any
) -> Mixture:
    return Mixture(*layer(experts, hidden, intermediate, dtype), experts, routing, **more)


def in_double(mixture: Mixture, **more: Any) -> Mixture:
    """Return the mixture in float64, without a shared expert."""
    biases = ExpertBiases(*(None if bias is None else bias.double() for bias in mixture.biases))
    wide = {name: each.double() for name in ("w13", "w2") if isinstance(each := getattr(mixture, name), Tensor)}
    return mixture._replace(biases=biases, shared=None, **wide | more)


def relative_error(out: Tensor, reference: Tensor) -> float:
    return float((out.double() - reference).norm() / reference.norm())


def distinct_scores(tokens: int, experts: int, dtype: torch.dtype) -> Tensor:
    """Scores without ties among the largest 128, so that the chosen experts are the same in any precision."""
    order, distinct = torch.rand(tokens, experts, device="cuda").argsort(dim=1), min(experts, 128)
    return ((order - (experts - distinct)).clamp_min(0) * (8.0 / distinct)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(
    ("experts", "top_k", "hidden", "intermediate"),
    [(128, 8, 2048, 768), (128, 8, 2048, 96), (8, 2, 64, 200), (60, 4, 1032, 176), (5, 5, 128, 64), (128, 1, 256, 8)],
)
def test_moe(
    ops: Ops, dtype: torch.dtype, renormalize: bool, experts: int, top_k: int, hidden: int, intermediate: int
) -> None:
    mixture = make_mixture(Routing(top_k, renormalize=renormalize), experts, hidden, intermediate, dtype)
    for tokens in (1, 2, 7, 33, 128, 129, 500, 2100):
        x = torch.randn(tokens, hidden, device="cuda").to(dtype)
        scores = distinct_scores(tokens, experts, dtype)
        out = ops.moe(x, scores, mixture)
        reference = TorchOps().moe(x.double(), scores.double(), in_double(mixture))
        error = relative_error(out, reference)
        assert error < TOLERANCE[dtype], f"{tokens} tokens: {error:.2e}"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("float32_router", [False, True])
@pytest.mark.parametrize(
    "routing",
    [
        Routing(8, renormalize=True, score="sigmoid", groups=8, top_groups=4, scale=2.5),
        Routing(8, renormalize=True, score="sigmoid"),
        Routing(6, renormalize=False, scale=16.0),
    ],
    ids=["deepseek-v3", "glm-4.5", "scaled"],
)
def test_other_routings(ops: Ops, dtype: torch.dtype, float32_router: bool, routing: Routing) -> None:
    """The kernels compute the experts that a routing other than the plain one chooses, in small steps and in large."""
    biases = ExpertBiases(choice=torch.randn(64, device="cuda") * 0.01)
    mixture = make_mixture(routing, 64, 512, 96, dtype, biases=biases)
    assert ops.moe_graph_safe(mixture)
    for tokens in (1, 3, 40, 129, 900):
        x = torch.randn(tokens, 512, device="cuda").to(dtype)
        scores = distinct_scores(tokens, 64, torch.float32 if float32_router else dtype) / 4
        out = ops.moe(x, scores, mixture)
        reference = TorchOps().moe(x.double(), scores.double(), in_double(mixture))
        error = relative_error(out, reference)
        assert error < TOLERANCE[dtype], f"{tokens} tokens: {error:.2e}"


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_tiling(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tilings, also those for other GPUs and numbers of tokens, with remainders of K and of the outputs."""
    from minisgl.kernel.experts import cuda_moe, dense_moe
    from minisgl.kernel.experts.cuda_routing import CudaRouting
    from minisgl.kernel.launch.compile import Compiler

    compiler = Compiler(torch.device("cuda", 0))
    tilings = {*dense_moe.tilings(80), *dense_moe.tilings(compiler.arch)}
    for tiling in tilings:
        monkeypatch.setattr(cuda_moe.CudaMoe, "_tilings", lambda *_, tiling=tiling: (tiling, tiling))
        for hidden, intermediate in [(1032, 200), (512, 96)]:
            mixture = make_mixture(Routing(3, renormalize=True), 6, hidden, intermediate, dtype)
            x = torch.randn(300, hidden, device="cuda").to(dtype)
            scores = distinct_scores(300, 6, dtype)
            out = cuda_moe.CudaMoe(compiler, CudaRouting(compiler))(x, scores, mixture)
            reference = TorchOps().moe(x.double(), scores.double(), in_double(mixture))
            error = relative_error(out, reference)
            assert error < TOLERANCE[dtype], f"{tiling}, {hidden} x {intermediate}: {error:.2e}"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("experts", "top_k", "hidden", "intermediate"), [(32, 4, 2880, 2880), (6, 2, 64, 200), (16, 4, 360, 1440)]
)
def test_biases_and_clamped_swiglu(
    ops: Ops, dtype: torch.dtype, experts: int, top_k: int, hidden: int, intermediate: int
) -> None:
    """All ranks except the first have no second bias, as in gpt-oss."""
    w13_bias, w2_bias = (torch.randn(experts, width, device="cuda").to(dtype) for width in (2 * intermediate, hidden))
    activation = ClampedSwiGLU(1.702, 1.5)  # a limit so low that many values are clamped
    mixture = make_mixture(
        Routing(top_k, renormalize=True), experts, hidden, intermediate, dtype, activation=activation
    )
    assert ops.moe_graph_safe(mixture)
    for tokens in (1, 2, 7, 33, 129, 500, 2100):
        x = torch.randn(tokens, hidden, device="cuda").to(dtype)
        scores = distinct_scores(tokens, experts, dtype)
        for biases in (ExpertBiases(w13=w13_bias, w2=w2_bias), ExpertBiases(w13=w13_bias)):
            biased = mixture._replace(biases=biases)
            out = ops.moe(x, scores, biased)
            reference = TorchOps().moe(x.double(), scores.double(), in_double(biased))
            error = relative_error(out, reference)
            assert error < TOLERANCE[dtype], f"{tokens} tokens: {error:.2e}"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("norm_dtype", [None, torch.float32, "x"])
@pytest.mark.parametrize("kind", ["deepseek-v2", "deepseek-v3", "qwen3.5", "qwen3-next"])
def test_a_shared_expert_among_the_others(
    ops: Ops, dtype: torch.dtype, norm_dtype: torch.dtype | str | None, kind: str
) -> None:
    """The shared expert counts as one or two routed experts; the router's launch computes its gate's logit."""
    parts, has_gate = (2, False) if kind == "deepseek-v2" else (1, kind.startswith("qwen"))
    count = 512 if kind == "qwen3-next" else 64  # the gate's logit is one more
    routing = Routing(6, renormalize=has_gate)
    if kind == "deepseek-v3":
        routing = Routing(8, renormalize=True, score="sigmoid", groups=8, top_groups=4, scale=2.5)
    hidden, size = 1032, 176
    shared = SharedExpert(*(one[0].contiguous() for one in layer(1, hidden, parts * size, dtype)), has_gate)
    mixture = make_mixture(routing, count, hidden, size, dtype, shared=shared)
    router = torch.randn(count, hidden, device="cuda") * 0.1
    gate = torch.randn(1, hidden, device="cuda").mul_(0.1).to(dtype) if has_gate else None
    router = router.to(dtype) if has_gate else router
    norm = None
    if norm_dtype is not None:
        factor = torch.rand(hidden, device="cuda") + 0.5
        norm = Norm(factor if norm_dtype == torch.float32 else factor.to(dtype), 1e-6)
    for tokens in (1, 2, 7, 33, 64):
        few = tokens <= (16 if has_gate else 64)
        assert ops.merges_shared(tokens, mixture) == few
        x, residual = (torch.randn(tokens, hidden, device="cuda").to(dtype) for _ in range(2))
        normed, logits = ops.norm_router(x, norm, router, None, gate)
        plain = x if norm is None else TorchOps().rms_norm(x, norm)
        assert relative_error(normed, plain.double()) < TOLERANCE[dtype]
        products = [normed.double() @ one.double().t() for one in (router, *([] if gate is None else [gate]))]
        assert relative_error(logits, torch.cat(products, dim=1)) < (TOLERANCE[dtype] if has_gate else 1e-5)
        scores = distinct_scores(tokens, count, router.dtype) / 4
        out = ops.moe(normed, torch.cat((scores, logits[:, count:]), dim=1), mixture, residual)
        reference = TorchOps().moe(normed.double(), scores.double(), in_double(mixture))
        gates, ups = (normed.double() @ shared.w13.double().t()).chunk(2, dim=1)
        block = (torch.nn.functional.silu(gates) * ups) @ shared.w2.double().t()
        weight = logits[:, count:].double().sigmoid() if has_gate else 1.0
        reference = reference + weight * block + residual.double()
        error = relative_error(out, reference)
        assert error < TOLERANCE[dtype], f"{tokens} tokens: {error:.2e}"


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gelu_and_scaled_experts(ops: Ops, dtype: torch.dtype) -> None:
    """Gemma 4's experts, whose weights are multiplied by a scale of each."""
    scale, routing = torch.rand(128, device="cuda") + 0.5, Routing(8, renormalize=True)
    mixture = make_mixture(routing, 128, 704, 704, dtype, activation="gelu_tanh", expert_scale=scale)
    for tokens in (1, 2, 33, 129, 2100):
        x = torch.randn(tokens, 704, device="cuda").to(dtype)
        scores = distinct_scores(tokens, 128, dtype)
        out = ops.moe(x, scores, mixture)
        reference = TorchOps().moe(x.double(), scores.double(), in_double(mixture))
        error = relative_error(out, reference)
        assert error < TOLERANCE[dtype], f"{tokens} tokens: {error:.2e}"


@pytest.mark.parametrize("tokens", [16, 600])
def test_every_token_to_the_same_experts(ops: Ops, tokens: int) -> None:
    mixture = make_mixture(Routing(4, renormalize=True), 64, 256, 128, torch.bfloat16)
    x = torch.randn(tokens, 256, device="cuda").to(torch.bfloat16)
    scores = distinct_scores(1, 64, torch.bfloat16).repeat(tokens, 1)
    out = ops.moe(x, scores, mixture)
    reference = TorchOps().moe(x.double(), scores.double(), in_double(mixture))
    assert relative_error(out, reference) < TOLERANCE[torch.bfloat16]


def test_a_graph_serves_any_routing(ops: Ops) -> None:
    """Captured once, replayed with other tokens and scores: bitwise what an eager call gives."""
    mixture = make_mixture(Routing(4, renormalize=True), 32, 512, 256, torch.bfloat16)
    assert ops.moe_graph_safe(mixture)
    x = torch.randn(24, 512, device="cuda").to(torch.bfloat16)
    scores = distinct_scores(24, 32, torch.bfloat16)
    ops.moe(x, scores, mixture)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.moe(x, scores, mixture)
    for _ in range(5):
        x.copy_(torch.randn_like(x))
        scores.copy_(distinct_scores(24, 32, torch.bfloat16))
        graph.replay()
        assert torch.equal(captured, ops.moe(x, scores, mixture))


@pytest.mark.parametrize("value", [0.0, float("nan"), float("-inf")])
def test_scores_without_an_order_stay_inside(ops: Ops, value: float) -> None:
    mixture = make_mixture(Routing(2, renormalize=True), 16, 64, 32, torch.bfloat16)
    x = torch.randn(40, 64, device="cuda").to(torch.bfloat16)
    scores = torch.full((40, 16), value, device="cuda", dtype=torch.bfloat16)
    assert ops.moe(x, scores, mixture).shape == x.shape
    torch.cuda.synchronize()


def test_odd_shapes_run_in_torch(ops: Ops) -> None:
    mixture = make_mixture(Routing(2, renormalize=True), 4, 20, 12, torch.float32)
    assert not ops.moe_graph_safe(mixture)
    x = torch.randn(9, 20, device="cuda")
    scores = distinct_scores(9, 4, torch.float32)
    out = ops.moe(x, scores, mixture)
    reference = TorchOps().moe(x.double(), scores.double(), in_double(mixture))
    assert relative_error(out, reference) < 1e-5


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("experts", "top_k", "hidden"), [(32, 4, 2880), (128, 8, 2048), (256, 8, 1024), (32, 32, 96)])
def test_experts_chosen_with_the_router(ops: Ops, dtype: torch.dtype, experts: int, top_k: int, hidden: int) -> None:
    """The result has the bits that norm and router in one launch and the choice of experts in another give."""
    mixture = make_mixture(Routing(top_k, renormalize=True), experts, hidden, 64, dtype)
    norm = Norm(torch.rand(hidden, device="cuda") + 0.5, 1e-6)
    router = (torch.randn(experts, hidden, device="cuda") * hidden**-0.5).to(dtype)
    for tokens in (3, 16, 17, 64, 100, 256, 257):
        x = torch.randn(tokens, hidden, device="cuda").to(dtype) * 3
        normed, out = ops.norm_moe(x, norm, router, None, None, mixture, x)
        want, logits = ops.norm_router(x, norm, router, None)
        assert torch.equal(normed, want)
        assert torch.equal(out, ops.moe(want, logits, mixture, x))
