"""Experts that stay quantized against float64 of their values: every format, few rows and many."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu.test_gpu_moe import in_double
from minisgl.distributed import SingleRank
from minisgl.kernel.base import ClampedSwiGLU, ExpertActivation, ExpertBiases, ExpertKind, Mixture, Norm, Ops, Routing
from minisgl.kernel.torch_ops import TorchOps
from minisgl.layers.mlp import Experts
from minisgl.models.base import Model
from minisgl.models.load_config import load_model_config
from minisgl.models.weights.loading import LoadOptions, load_model
from minisgl.quantization.expert_layout import PackedExperts
from minisgl.quantization.levels import MIDDLE, LevelFormat, Levels
from models.quantized import save_mxfp4, save_quantized

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}  # relative to the norm of the result
ROWS = (1, 2, 7, 8, 33, 64, 129, 500, 2100)
FORMATS = (
    LevelFormat("fp8", 128),
    LevelFormat("fp8"),
    LevelFormat("int8"),
    LevelFormat("int4", 128, zeros=True),
    LevelFormat("int4", 64),
    LevelFormat("int4", 32, zeros=True),
    LevelFormat("mxfp4", 32),
)


@pytest.fixture(scope="module")
def ops() -> Ops:
    from minisgl.kernel.cuda_ops import CudaOps

    found = CudaOps(torch.device("cuda", 0))
    for form, dtype in product(FORMATS, TOLERANCE):
        if found.keeps_experts(form, 512, 512, dtype):
            found._moe.begin_compiling(dtype, ExpertKind(16, 4, "silu", form))
    if not found.keeps_experts(LevelFormat("fp8"), 768, 1024, torch.bfloat16):
        pytest.skip("needs compute capability 9.0")
    return found


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random_levels(form: LevelFormat, width: int, size: int) -> Levels:
    """A matrix of values of some 1 / sqrt(size) in this format, with scales that differ."""
    spread = {"fp8": 100, "int8": 40, "int4": 4, "mxfp4": 3}[form.kind]
    groups = (width, form.groups(size))
    scales = (torch.rand(groups, device="cuda") + 0.5) / (spread * size**0.5)
    if form.kind == "mxfp4":
        scales = torch.exp2(scales.log2().round() + torch.randint(-1, 2, groups, device="cuda"))
        return Levels(form, torch.randint(0, 16, (width, size), dtype=torch.uint8, device="cuda"), scales)
    if form.kind == "fp8":
        numbers = torch.randn(width, size, device="cuda") * spread
        return Levels(form, numbers.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), scales)
    middle = MIDDLE[form.kind]
    codes = torch.randint(0, 2 * middle, (width, size), dtype=torch.uint8, device="cuda")
    zeros = torch.randint(5, 11, groups, dtype=torch.uint8, device="cuda") if form.zeros else None
    return Levels(form, codes, scales, zeros)


def experts(
    form: LevelFormat, count: int, width: int, size: int, dtype: torch.dtype, *, gated: bool
) -> tuple[PackedExperts, Tensor]:
    """Packed matrices of `count` experts and their values in float64."""
    packed = PackedExperts.empty(form, (count, width, size), dtype, torch.device("cuda", 0), gated=gated)
    values = torch.empty((count, width, size), dtype=torch.float64, device="cuda")
    halves = [slice(0, width // 2), slice(width // 2, width)] if gated else [slice(0, width)]
    for expert in range(count):
        for rows in halves:
            levels = random_levels(form, rows.stop - rows.start, size)
            packed.fill(expert, rows, levels)
            values[expert, rows] = levels.dequantize().double()
    return packed, values


def scores_without_ties(tokens: int, count: int, dtype: torch.dtype) -> Tensor:
    """Scores by which the chosen experts are the same in any precision; the first expert is never chosen."""
    order = torch.rand(tokens, count, device="cuda").argsort(dim=1)
    scores = (order * (8.0 / count)).to(dtype)
    scores[:, 0] = -8
    return scores


def check(
    ops: Ops,
    form: LevelFormat,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    routing: Routing,
    activation: ExpertActivation = "silu",
    *,
    biased: bool = False,
    expert_scale: Tensor | None = None,
) -> None:
    count, hidden, intermediate = sizes
    w13, wide13 = experts(form, count, 2 * intermediate, hidden, dtype, gated=True)
    w2, wide2 = experts(form, count, hidden, intermediate, dtype, gated=False)
    biases = [
        torch.randn(count, width, device="cuda").to(dtype) if biased else None for width in (2 * intermediate, hidden)
    ]
    more: dict[str, Any] = {"activation": activation, "expert_scale": expert_scale}
    mixture = Mixture(w13, w2, count, routing, ExpertBiases(None, *biases), **more)
    assert ops.moe_graph_safe(mixture)
    for tokens in ROWS:
        x = torch.randn(tokens, hidden, device="cuda").to(dtype)
        scores = scores_without_ties(tokens, count, dtype)
        if tokens == 33:  # all tokens to the same experts
            scores = scores[:1].repeat(tokens, 1)
        residual = None if tokens == 2 else torch.randn(tokens, hidden, device="cuda").to(dtype)
        have = ops.moe(x, scores, mixture, residual)
        want = TorchOps().moe(x.double(), scores.double(), in_double(mixture, w13=wide13, w2=wide2))
        if residual is not None:
            want += residual.double()
        error = float((have.double() - want).norm() / want.norm())
        assert error < TOLERANCE[dtype], f"{tokens} tokens: {error:.2e}"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_every_format(ops: Ops, form: LevelFormat, dtype: torch.dtype) -> None:
    if form.kind == "mxfp4" and dtype == torch.float16:
        assert not ops.keeps_experts(form, 512, 512, dtype)
        return
    check(ops, form, dtype, (16, 512, 384), Routing(4, renormalize=True))


@pytest.mark.parametrize("form", [LevelFormat("fp8", 128), LevelFormat("int4", 64), LevelFormat("mxfp4", 32)], ids=str)
@pytest.mark.parametrize(("count", "top_k"), [(32, 4), (128, 8), (64, 2), (256, 8)])
def test_experts_chosen_with_the_router(ops: Ops, form: LevelFormat, count: int, top_k: int) -> None:
    """The result has the bits that norm and router in one launch and the choice of experts in another give."""
    dtype, hidden, intermediate = torch.bfloat16, 512, 256
    made = [
        experts(form, held, width, size, dtype, gated=gated)[0]
        for held in (count, 16)
        for width, size, gated in ((2 * intermediate, hidden, True), (hidden, intermediate, False))
    ]
    mixture = Mixture(*made[:2], count, Routing(top_k, renormalize=True))
    scaled = mixture._replace(
        routing=Routing(top_k, renormalize=False), expert_scale=torch.rand(count, device="cuda") + 0.5
    )
    held = mixture._replace(w13=made[2], w2=made[3], first=8)
    norm = Norm((torch.rand(hidden, device="cuda") + 0.5).to(dtype), 1e-6)
    router = (torch.randn(count, hidden, device="cuda") * hidden**-0.5).to(dtype)
    biases = None, torch.randn(count, device="cuda").to(dtype), (torch.arange(count, device="cuda") * 8).to(dtype)
    for tokens, bias, each in product((5, 17, 33, 64, 129, 256), biases, (mixture, scaled, held)):
        x = torch.randn(tokens, hidden, device="cuda").to(dtype) * 3
        normed, out = ops.norm_moe(x, norm, router, bias, None, each, x)
        want, logits = ops.norm_router(x, norm, router, bias)
        assert torch.equal(normed, want)
        assert torch.equal(out, ops.moe(want, logits, each, x))


def test_another_routing(ops: Ops) -> None:
    """Experts are chosen before, in groups, and the last block of rows is not whole."""
    routing = Routing(8, renormalize=True, score="sigmoid", groups=8, top_groups=4, scale=2.5)
    check(ops, LevelFormat("fp8", 128), torch.bfloat16, (40, 384, 256), routing)


def test_gelu_and_scaled_experts(ops: Ops) -> None:
    """Gemma 4's experts."""
    scale, sizes = torch.rand(16, device="cuda") + 0.5, (16, 512, 384)
    for form in (LevelFormat("fp8", 128), LevelFormat("int4", 32, zeros=True)):
        check(ops, form, torch.bfloat16, sizes, Routing(4, renormalize=True), "gelu_tanh", expert_scale=scale)


@pytest.mark.parametrize(("hidden", "intermediate"), [(2880, 1440), (96, 160)])
def test_mxfp4_with_biases_and_clamped_swiglu(ops: Ops, hidden: int, intermediate: int) -> None:
    """gpt-oss's experts on a rank of two, whose columns end inside a chunk; many values are clamped."""
    form, activation = LevelFormat("mxfp4", 32), ClampedSwiGLU(1.702, 1.5)
    check(ops, form, torch.bfloat16, (8, hidden, intermediate), Routing(4, renormalize=True), activation, biased=True)


def test_a_graph_serves_any_routing(ops: Ops) -> None:
    """Captured once, replayed with other tokens and scores: bitwise what an eager call gives."""
    w13, _ = experts(LevelFormat("mxfp4", 32), 32, 512, 256, torch.bfloat16, gated=True)
    w2, _ = experts(LevelFormat("mxfp4", 32), 32, 256, 256, torch.bfloat16, gated=False)
    x = torch.randn(24, 256, device="cuda").bfloat16()
    scores, mixture = scores_without_ties(24, 32, torch.bfloat16), Mixture(w13, w2, 32, Routing(4, renormalize=True))
    ops.moe(x, scores, mixture)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.moe(x, scores, mixture)
    for _ in range(5):
        x.copy_(torch.randn_like(x))
        scores.copy_(scores_without_ties(24, 32, torch.bfloat16))
        graph.replay()
        assert torch.equal(captured, ops.moe(x, scores, mixture))


@pytest.mark.parametrize("name", ["fp8 blocks of bf16", "awq", "compressed int4", "mxfp4"])
def test_experts_of_a_checkpoint(ops: Ops, tmp_path: Path, name: str) -> None:
    """Loading packs them on the GPU, and products multiply the values that the checkpoint means."""
    if name == "mxfp4":
        save_mxfp4(tmp_path, hidden_size=256, intermediate_size=256)
        quantized = plain = tmp_path
    else:
        quantized, plain = save_quantized(tmp_path, "qwen3-moe", name, hidden_size=256, moe_intermediate_size=256)

    def load(folder: Path, dtype: torch.dtype, **options: Any) -> Model:
        config, device = load_model_config(folder), torch.device("cuda", 0)
        return load_model(config, folder, LoadOptions(**options), tp=SingleRank(), dtype=dtype, device=device)

    packed = load(quantized, torch.bfloat16, keeps=ops.keeps, keeps_experts=ops.keeps_experts)
    dense = load(plain, torch.float32)
    layers = zip(packed.modules(), dense.modules(), strict=True)
    pairs = [(have, want) for have, want in layers if isinstance(have, Experts) and isinstance(want, Experts)]
    for have, want in pairs:
        assert (have.packed is not None) == (name != "compressed int4")  # its down_proj is not quantized
        for tokens in (1, 30, 300):
            x = torch.randn(tokens, 256, device="cuda").bfloat16()
            scores = torch.rand(tokens, len(have.w13), device="cuda").argsort(dim=1).bfloat16()
            y = ops.moe(x, scores, have.mixture)
            reference = TorchOps().moe(x.double(), scores.double(), in_double(want.mixture))
            assert float((y.double() - reference).norm() / reference.norm()) < TOLERANCE[torch.bfloat16]
    assert pairs
