"""Attention fused with norm, rotation and store against the same steps in float64."""

from __future__ import annotations

import pytest
import torch

from minisgl.attention.base import AttentionShape
from minisgl.kernel.base import Heads, Norm
from minisgl.kernel.torch_ops import TorchOps

pytestmark = pytest.mark.gpu

MAX_LEN = 4500


@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "head_dim", "page_size", "window", "norm"),
    [
        ([1], 16, 8, 128, 64, None, True),
        ([640], 16, 8, 128, 64, None, True),
        ([4444, 1], 16, 8, 128, 64, None, True),
        ([1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 100, 700, 1300], 16, 8, 128, 16, None, True),
        ([5, 640, 33, 1] * 20, 40, 8, 128, 64, None, True),
        ([300, 20, 1000], 32, 8, 128, 1, None, False),
        ([300, 20, 1000], 32, 4, 128, 8, None, False),
        ([300, 20, 16, 17, 1000, 129], 32, 8, 128, 16, 33, False),
        ([300, 4000] * 70, 8, 8, 64, 32, None, False),
        ([300, 4000] * 40, 14, 2, 64, 32, 500, True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_decode(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    window: int | None,
    norm: bool,
    dtype: torch.dtype,
) -> None:
    from minisgl.attention.fused import FusedDecode

    torch.manual_seed(0)
    device = torch.device("cuda", 0)
    rows, slots_in_all = len(lengths), len(lengths) + 3
    max_pages = -(-MAX_LEN // page_size)
    used = [-(-length // page_size) for length in lengths]
    pages = torch.randperm(sum(used), device=device).int()
    slots = torch.randperm(slots_in_all, device=device)[:rows]
    page_table = torch.full((slots_in_all, max_pages), 0, dtype=torch.int32, device=device)
    all_lengths = torch.ones(slots_in_all, dtype=torch.int32, device=device)
    at = 0
    for slot, length, count in zip(slots.tolist(), lengths, used, strict=True):
        page_table[slot, :count] = pages[at : at + count]
        all_lengths[slot] = length
        at += count
    shape = (sum(used), page_size, kv_heads, head_dim)
    caches = [torch.randn(shape, device=device).to(dtype) for _ in range(2)]
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim, device=device).to(dtype)
    angles = torch.outer(torch.arange(MAX_LEN), torch.rand(head_dim // 2))
    table = torch.cat([angles.cos(), angles.sin()], dim=1).to(device)
    norms = [Norm(torch.randn(head_dim, device=device).to(dtype), 1e-6) if norm else None for _ in range(2)]
    before = [cache.clone() for cache in caches]

    made = TorchOps().decode_inputs(
        slots, all_lengths.unsqueeze(1).expand(-1, MAX_LEN), all_lengths, page_table, page_size, pages=True
    )
    reference_caches = [cache.clone() for cache in before]
    q = TorchOps().norm_rope_store(
        qkv, Heads(heads, kv_heads, table, *norms), made.positions, made.kv_slots, *reference_caches
    )
    want = torch.empty(rows, heads, head_dim, dtype=torch.float64, device=device)
    for row, length in enumerate(lengths):
        k, v = (cache[made.page_table[row, : used[row]].long()].flatten(0, 1)[:length] for cache in reference_caches)
        if window is not None:
            k, v = k[-window:], v[-window:]
        k, v = (x.double().repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
        scores = torch.einsum("hd,nhd->hn", q[row].double(), k) * head_dim**-0.5
        want[row] = torch.einsum("hn,nhd->hd", scores.softmax(-1), v)

    fused = FusedDecode(AttentionShape(heads, kv_heads, head_dim, page_size, dtype, window is not None), device)
    have = fused.rows(slots, all_lengths, page_table).forward(
        qkv, Heads(heads, kv_heads, table, *norms), *caches, window
    )
    for cache, reference in zip(caches, reference_caches, strict=True):
        error = (cache.double() - reference.double()).norm() / reference.double().norm()
        assert error < 1e-4, f"stored with a relative error of {error:.2e}"
    error = (have.double() - want).norm() / want.norm()
    assert error < (6e-3 if dtype == torch.bfloat16 else 1e-3), f"relative error {error:.2e}"
    worst = (have.double() - want).abs().max()
    assert worst < 0.1, f"a value is {worst:.2e} off"
