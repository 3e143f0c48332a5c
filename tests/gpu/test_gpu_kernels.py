"""The kernels of csrc/ against torch in higher precision, on random shapes."""

from __future__ import annotations

import pytest
import torch

from minisgl.kernel.base import Heads, Norm, Ops
from minisgl.kernel.torch_ops import TorchOps

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}  # of the norm of the result


@pytest.fixture(scope="module")
def ops() -> Ops:
    from minisgl.kernel.cuda_ops import CudaOps

    return CudaOps(torch.device("cuda", 0))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def close(out: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype) -> None:
    error = (out.double() - reference.double()).norm() / reference.double().norm()
    assert error < TOLERANCE[dtype], f"relative error {error:.2e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 1024), (3, 5120), (257, 2048), (5, 72), (4, 12288)])
def test_rms_norm(ops: Ops, dtype: torch.dtype, tokens: int, size: int) -> None:
    x = torch.randn(tokens, size, device="cuda").to(dtype)
    weight = torch.randn(size, device="cuda").to(dtype)
    close(ops.rms_norm(x, Norm(weight, 1e-6)), TorchOps().rms_norm(x.double(), Norm(weight.double(), 1e-6)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 3072), (77, 17408), (3, 8)])
def test_silu_and_mul(ops: Ops, dtype: torch.dtype, tokens: int, size: int) -> None:
    gate_up = torch.randn(tokens, 2 * size, device="cuda").to(dtype) * 4
    close(ops.silu_and_mul(gate_up), TorchOps().silu_and_mul(gate_up.double()), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "norm"), [(1, 16, 8, True), (33, 40, 8, False), (7, 3, 1, True)]
)
def test_norm_rope_store(
    ops: Ops, dtype: torch.dtype, head_dim: int, tokens: int, heads: int, kv_heads: int, norm: bool
) -> None:
    pages, page_size = 20, 16
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device="cuda").to(dtype)
    positions = torch.randint(0, 500, (tokens,), device="cuda")
    angles = torch.outer(torch.arange(500), torch.rand(head_dim // 2))
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).cuda()
    kv_slots = torch.randperm(pages * page_size, device="cuda")[:tokens]
    weights = [torch.randn(head_dim, device="cuda").to(dtype) if norm else None for _ in range(2)]

    def run(which: Ops, kind: torch.dtype) -> list[torch.Tensor]:
        caches = [torch.full((pages, page_size, kv_heads, head_dim), 7.0, device="cuda", dtype=kind) for _ in range(2)]
        q_norm, k_norm = (None if weight is None else Norm(weight.to(kind), 1e-6) for weight in weights)
        table = cos_sin.to(torch.float64 if kind == torch.float64 else torch.float32)
        made = Heads(heads, kv_heads, table, q_norm, k_norm)
        return [which.norm_rope_store(qkv.to(kind), made, positions, kv_slots, *caches), *caches]

    for out, reference in zip(run(ops, dtype), run(TorchOps(), torch.float64), strict=True):
        close(out, reference, dtype)
