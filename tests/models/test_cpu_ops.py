"""The CPU's operations against the torch reference."""

from __future__ import annotations

import pytest
import torch

from minisgl.distributed import SingleRank
from minisgl.kernel.base import Heads, Norm
from minisgl.kernel.cpu_ops import CpuOps, multiplies_bfloat16
from minisgl.kernel.torch_ops import DenseWeight, TorchOps
from minisgl.layers.embedding import LMHead, VocabEmbedding
from minisgl.layers.layer_config import RopeConfig
from minisgl.layers.linear import bind_weights
from minisgl.layers.rotary import cos_sin_table

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REFERENCE = TorchOps()
NATIVE = pytest.param(True, marks=pytest.mark.skipif(not multiplies_bfloat16(), reason="no bfloat16 instructions"))


def close(have: torch.Tensor, want: torch.Tensor) -> None:
    """Equal within one rounding of the dtype."""
    assert have.dtype == want.dtype
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[have.dtype]
    torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("float32_weight", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype, float32_weight: bool, rows: int) -> None:
    weight = torch.rand(72).to(dtype) + 0.5
    norm = Norm(weight.float() if float32_weight else weight, 1e-5)
    for size in (1, 9000):  # float16 holds these values, but not the length of a row
        x = (size * torch.randn(rows, 72)).to(dtype)
        before = x.clone()
        close(CpuOps(bfloat16_products=False).rms_norm(x, norm), REFERENCE.rms_norm(x, norm))
        assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", ["", "q", "qk"])
def test_norm_rope_store(dtype: torch.dtype, normed: str) -> None:
    heads, kv_heads, dim = 6, 2, 16
    ops = CpuOps(bfloat16_products=False)
    q_norm, k_norm = (Norm(torch.rand(dim).to(dtype) + 0.5, 1e-6) if name in normed else None for name in "qk")
    for theta in (1e4, 1e6):
        made = Heads(heads, kv_heads, cos_sin_table(dim, 100, RopeConfig(theta)), q_norm, k_norm)
        steps = torch.tensor([3, 90, 0]), torch.tensor([4, 91, 1]), torch.arange(100)  # on one table
        for positions in steps:
            qkv = torch.randn(len(positions), (heads + 2 * kv_heads) * dim).to(dtype)
            before = qkv.clone()
            have, want = torch.full((2, 2, 30, 4, kv_heads, dim), 7.0, dtype=dtype)
            slots = torch.randperm(120)[: len(positions)]
            close(
                ops.norm_rope_store(qkv, made, positions, slots, *have),
                REFERENCE.norm_rope_store(qkv, made, positions, slots, *want),
            )
            close(have, want)
            assert torch.equal(qkv, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bfloat16_products", [False, NATIVE])
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 33])
def test_linear_products_match_float32(dtype: torch.dtype, bfloat16_products: bool, rows: int) -> None:
    ops = CpuOps(bfloat16_products=bfloat16_products)
    x, weight, bias, residual = (torch.randn(shape) / 8 for shape in ((rows, 96), (80, 96), (80,), (rows, 80)))
    want = x.to(dtype).float() @ weight.to(dtype).float().T
    x, weight, bias, residual = (tensor.to(dtype) for tensor in (x, weight, bias, residual))
    bound = ops.bind(weight)
    assert bound.tensor.is_mkldnn == (bfloat16_products and dtype == torch.bfloat16)
    norm = Norm(torch.rand(96).to(dtype), 1e-6)
    for one in (DenseWeight(ops, weight), bound):
        close(one.linear(x), want.to(dtype))
        close(one.linear(x, bias), (want + bias.float()).to(dtype))
        close(one.linear(x, None, residual.clone()), (want + residual.float()).to(dtype))
        close(one.linear(x, bias, residual.clone()), (want + bias.float() + residual.float()).to(dtype))
        out = torch.empty((rows, 80), dtype=dtype)
        assert one.norm_linear(x, norm, bias, out) is out
        close(out, REFERENCE.norm_linear(x, norm, weight, bias))
        close(one.norm_linear(x, None), REFERENCE.linear(x, weight))
        gated = REFERENCE.norm_gated_linear(x, norm, weight, bias, activation="silu")
        close(one.norm_gated_linear(x, norm, bias, activation="silu"), gated)


@pytest.mark.skipif(not multiplies_bfloat16(), reason="no bfloat16 instructions")
def test_a_tied_head_is_packed_and_its_embedding_is_not() -> None:
    tp = SingleRank()
    embedding = VocabEmbedding(30, 16, tp=tp, dtype=torch.bfloat16)
    head = LMHead(30, 16, tied_to=embedding, tp=tp, dtype=torch.bfloat16)
    bind_weights(torch.nn.ModuleList([embedding, head]), CpuOps(bfloat16_products=True))
    assert head.weight.is_mkldnn
    assert not embedding.weight.is_mkldnn
