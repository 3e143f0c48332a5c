"""Attention fused with norm, rotation and store against the same steps in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from minisgl.attention.base import AttentionSpec
from minisgl.kernel.base import DecodeInputs, Heads, Norm
from minisgl.kernel.torch_ops import TorchOps

if TYPE_CHECKING:
    from minisgl.attention.fused import FusedDecode

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


@lru_cache
def fused_decode(spec: AttentionSpec) -> FusedDecode:
    from minisgl.attention.fused import FusedDecode

    return FusedDecode([spec], DEVICE)


@dataclass(frozen=True)
class Step:
    """State that a decode step finds on the device: rows of `lengths` tokens, the last of which is new."""

    spec: AttentionSpec
    lengths: list[int]
    slots: Tensor
    all_lengths: Tensor  # [slots]
    page_table: Tensor  # [slots, pages]
    caches: list[Tensor]  # K and V
    qkv: Tensor
    heads: Heads
    sinks: Tensor | None  # [heads]

    def inputs(self) -> DecodeInputs:
        """Return the places of the new tokens, for code that stores and attends by itself."""
        tokens = self.all_lengths.unsqueeze(1).expand(-1, max(self.lengths))  # any will do
        return TorchOps().decode_inputs(
            self.slots, tokens, self.all_lengths, self.page_table, self.spec.page_size, pages=True
        )

    def forward(self, window: int | None = None, fused: FusedDecode | None = None) -> Tensor:
        """Attend with the fused kernel, which stores the new K and V in `caches`."""
        kv_lens = self.all_lengths[self.slots]
        spec = replace(self.spec, window=window)
        rows = (fused or fused_decode(spec)).rows(spec, self.slots, kv_lens, self.page_table)
        return rows.forward(self.qkv, self.heads, self.caches[0], self.caches[1], self.sinks)


def make_step(spec: AttentionSpec, lengths: list[int], *, norm: bool = True, v_eps: float | None = None) -> Step:
    torch.manual_seed(0)
    rows, slots_in_all, width = len(lengths), len(lengths) + 3, -(-max(lengths) // spec.page_size)
    pages = torch.randperm(rows * width, device=DEVICE).int().view(rows, width)
    slots = torch.randperm(slots_in_all, device=DEVICE)[:rows]
    page_table = torch.zeros((slots_in_all, width), dtype=torch.int32, device=DEVICE)
    page_table[slots] = pages
    all_lengths = torch.ones(slots_in_all, dtype=torch.int32, device=DEVICE)
    all_lengths[slots] = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    cache = (rows * width, spec.page_size, spec.num_kv_heads, spec.head_dim)
    caches = [torch.randn(cache, device=DEVICE, dtype=spec.dtype).to(spec.kv_dtype) for _ in range(2)]
    qkv = torch.randn(rows, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, device=DEVICE)
    angles = torch.outer(torch.arange(max(lengths)), torch.rand(spec.head_dim // 2))
    table = torch.cat([angles.cos(), angles.sin()], dim=1).to(DEVICE)
    norm_dtype = spec.norm_dtype or spec.dtype
    norms = [Norm(torch.randn(spec.head_dim, device=DEVICE).to(norm_dtype), 1e-6) if norm else None for _ in "qk"]
    kv_heads = spec.num_kv_heads
    if not spec.stores_kv:
        qkv, kv_heads = qkv[:, : spec.num_heads * spec.head_dim].contiguous(), 0
    heads = Heads(spec.num_heads, kv_heads, table, *norms, v_eps=v_eps)
    sinks = (2 * torch.randn(spec.num_heads, device=DEVICE)).to(spec.dtype) if spec.has_sinks else None
    return Step(spec, lengths, slots, all_lengths, page_table, caches, qkv.to(spec.dtype), heads, sinks)


BF16, F16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize("fp8_kv", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (40, 8), (16, 2), (8, 8)])
@pytest.mark.parametrize("lengths", [[640], [30000, 5], [640, 1, 9000] * 4, [300, 20] * 10, [640, 33, 20000] * 30])
def test_rows_are_rounded_to_fp8_as_by_a_launch_of_its_own(
    lengths: list[int], heads: int, kv_heads: int, fp8_kv: bool
) -> None:
    from minisgl.kernel.cuda_ops import CudaOps

    step = make_step(AttentionSpec(heads, kv_heads, 128, 64, BF16, fp8_kv=fp8_kv), lengths)
    rows = fused_decode(step.spec).rows(step.spec, step.slots, step.all_lengths[step.slots], step.page_table)
    if not rows.rounds:
        pytest.skip("a block of the cluster has a part of a head")
    want = CudaOps(DEVICE)._fp8.quantize(step.forward().flatten(1), None, 128)
    have = rows.forward_rounded(step.qkv, step.heads, step.caches[0], step.caches[1])
    count = len(lengths)
    assert torch.equal(have.codes[:count].view(torch.uint8), want.codes[:count].view(torch.uint8))
    assert torch.equal(have.scales[:, :count], want.scales[:, :count])


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
        # three query heads a KV head of 64 dimensions (SmolLM2), in each way that rows are divided
        ([1], 9, 3, 64, 64, None, False),
        ([640], 9, 3, 64, 64, None, False),
        ([300, 20, 16, 17, 1000, 129, 1], 9, 3, 64, 16, None, False),
        ([300, 20, 1000] * 5, 9, 3, 64, 64, 33, False),
        ([640, 33, 1] * 10, 9, 3, 64, 1, None, False),
        ([640, 33, 1] * 20, 9, 3, 64, 64, None, False),
        ([640, 33, 1] * 29, 9, 3, 64, 64, None, True),
        ([300, 20, 777, 1] * 64, 9, 3, 64, 64, None, False),
        ([8000], 9, 3, 64, 64, None, False),
        ([8000, 3, 700] * 15, 9, 3, 64, 64, None, False),
        # long rows, which are cut
        ([30000], 16, 8, 128, 64, None, True),
        ([30000, 1, 9000], 40, 8, 128, 16, None, True),
        ([7000, 8193, 100, 20000, 6145, 1, 3000, 12288], 64, 8, 128, 64, None, True),
        ([12000] * 8 + [5] * 8, 32, 4, 64, 1, None, False),
        ([100] * 30 + [20000], 8, 8, 128, 64, None, True),
        ([16000, 50, 700] * 14, 16, 2, 128, 64, None, True),
        ([9000, 640] * 100, 16, 8, 64, 64, None, True),
        ([20000, 3, 700, 9999], 40, 8, 128, 64, None, True),
        ([10000] + [300] * 19, 16, 8, 128, 64, None, True),
        ([640, 7, 9000] * 20, 16, 8, 128, 64, None, True),
        ([12000] + [200] * 55, 8, 8, 128, 16, None, True),
        ([30000], 16, 8, 128, 64, 10000, True),
        # rows around 4,096 tokens, from which on they are cut if there are many
        ([4095, 4096, 4097, 4098, 4112, 4113, 5000, 6144, 8193] * 4, 16, 8, 128, 64, None, True),
        ([4097, 5000, 100, 8192, 33] * 12, 32, 8, 128, 64, None, True),
        ([7000, 6145, 5000] + [640] * 69, 32, 8, 128, 64, None, True),
        ([5000] * 40 + [4097, 1] * 30, 16, 8, 128, 16, None, True),
        ([5000] * 30 + [300] * 170, 16, 8, 64, 64, None, True),
        # rows around 2,048 tokens, from which on they are cut if there are few; which cluster takes a split varies
        ([2047, 2048, 2049, 2050, 2064, 2065, 3000, 4097, 8193] * 6, 16, 2, 128, 64, None, True),
        ([5000] * 64, 16, 2, 128, 64, None, True),
        ([32000] + [500] * 63, 16, 2, 128, 64, None, True),
        ([7000, 4100, 3000, 2100] + [640, 1] * 18, 16, 2, 128, 64, None, True),
        ([9000, 30, 5000, 2500] * 12, 10, 2, 128, 16, None, True),
        ([6000, 100] * 8, 32, 8, 128, 64, 5000, True),
        ([3000] * 60, 2, 2, 128, 64, None, True),
        ([2600, 700] * 22, 6, 2, 128, 1, None, False),
        ([4000] * 20 + [50] * 20, 14, 2, 64, 64, None, True),
        # wide heads
        ([640], 16, 8, 256, 64, None, True),
        ([4444, 1, 30], 8, 4, 256, 16, None, True),
        ([300, 4000] * 40, 16, 8, 256, 64, 1024, True),
        ([30000, 1, 9000], 32, 4, 256, 64, None, True),
        ([20000] + [300] * 19, 8, 1, 256, 32, None, False),
        ([700, 33] * 100, 4, 1, 256, 64, 512, True),
        ([1], 8, 1, 512, 64, None, True),
        ([640], 16, 2, 512, 64, None, True),
        ([4444, 1, 30, 16, 17], 8, 2, 512, 16, None, False),
        ([300, 4000] * 40, 16, 4, 512, 64, None, True),
        ([30000, 1, 9000], 8, 1, 512, 64, None, True),
        ([700, 33] * 100, 4, 1, 512, 1, 512, True),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, F16])
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
    spec = AttentionSpec(heads, kv_heads, head_dim, page_size, dtype)
    compare(make_step(spec, lengths, norm=norm), window)


@pytest.mark.parametrize("fp8_kv", [False, True])
@pytest.mark.parametrize(("lengths", "window"), [([1], None), ([640, 513, 1, 16], 512), ([9000, 40] * 30, None)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 1, 256), (8, 2, 512), (16, 8, 64)])
def test_queries_of_a_layer_that_shares_kv(
    lengths: list[int], window: int | None, heads: int, kv_heads: int, head_dim: int, fp8_kv: bool
) -> None:
    """The new token is already in the pages, as in Gemma 4, and nothing is stored."""
    spec = AttentionSpec(heads, kv_heads, head_dim, 64, BF16, fp8_kv=fp8_kv, scale=1 / 16, stores_kv=False)
    compare(make_step(spec, lengths), window)


@pytest.mark.parametrize("head_dim", [64, 256, 512])
def test_norm_of_v(head_dim: int) -> None:
    spec = AttentionSpec(16, 2, head_dim, 64, BF16, norm_dtype=torch.float32)
    compare(make_step(spec, [1, 640, 9000], v_eps=1e-6), None)


@pytest.mark.parametrize("head_dim", [128, 256, 512])
def test_norms_in_float32_and_another_scale(head_dim: int) -> None:
    """The scale, as in Gemma, does not follow from the head size, and the norms' weights are wider than q and k."""
    spec = AttentionSpec(32, 16, head_dim, 64, BF16, scale=168**-0.5, norm_dtype=torch.float32)
    compare(make_step(spec, [640, 7, 9000]), None)


def test_layers_of_all_kinds_share_one_memory() -> None:
    """Layers of Gemma 4 run one after another, as in a decode; long rows are split, so all layers use the records."""
    from minisgl.attention.fused import FusedDecode

    wide = AttentionSpec(8, 1, 512, 64, BF16)
    kinds = [replace(wide, head_dim=256, window=512), wide, replace(wide, stores_kv=False)]
    kinds.append(replace(kinds[0], window=10000, stores_kv=False))
    fused = FusedDecode(kinds, DEVICE)
    steps = [make_step(replace(spec, window=None), [30000, 1, 9000]) for spec in kinds]
    for _ in range(2):
        for spec, step in zip(kinds, steps, strict=True):
            compare(step, spec.window, fused)


def compare(step: Step, window: int | None, fused: FusedDecode | None = None) -> None:
    """Run a step, and the same by itself in float64."""
    spec, lengths, made = step.spec, step.lengths, step.inputs()
    heads, kv_heads, head_dim, page_size = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.page_size
    reference_caches = [cache.clone() for cache in step.caches]
    q = TorchOps().norm_rope_store(step.qkv, step.heads, made.positions, made.out_cache_loc, *reference_caches)
    want = torch.empty(len(lengths), heads, head_dim, dtype=torch.float64, device=DEVICE)
    for row, length in enumerate(lengths):
        pages = made.page_table[row, : -(-length // page_size)].long()
        k, v = (cache[pages].flatten(0, 1)[:length] for cache in reference_caches)
        if window is not None:
            k, v = k[-window:], v[-window:]
        k, v = (x.to(q.dtype).double().repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
        scores = torch.einsum("hd,nhd->hn", q[row].double(), k) * spec.softmax_scale
        want[row] = torch.einsum("hn,nhd->hd", scores.softmax(-1), v)

    have = step.forward(window, fused)
    for cache, reference in zip(step.caches, reference_caches, strict=True):
        if not spec.stores_kv:
            assert torch.equal(cache.view(torch.uint8), reference.view(torch.uint8))
            continue
        error = relative_error(cache, reference)
        assert error < 1e-4, f"stored with a relative error of {error:.2e}"
    error = (have.double() - want).norm() / want.norm()
    assert error < (6e-3 if spec.dtype == BF16 else 1e-3), f"relative error {error:.2e}"
    worst = (have.double() - want).abs().max()
    assert worst < 0.1, f"a value is {worst:.2e} off"


def relative_error(have: Tensor, want: Tensor) -> float:
    """Compare caches [pages, ...] in float64, some pages at a time: tests beside this one need the memory, too."""
    off = total = 0.0
    for a, b in zip(have.split(1024), want.split(1024), strict=True):
        off += float((a.double() - b.double()).square().sum())
        total += float(b.double().square().sum())
    return (off / total) ** 0.5


@pytest.mark.parametrize("rows", [1, 4, 8, 16, 20, 28, 40, 60, 72, 128, 160, 256])
def test_a_row_depends_on_no_other(rows: int) -> None:
    """A row's bits do not depend on the other rows' lengths, and are the same in a second run."""
    spec = AttentionSpec(16, 8, 128, 64, BF16)
    step = make_step(spec, [12345, *[640] * (rows - 1)])
    first = step.forward()
    assert torch.equal(step.forward(), first)
    for lengths in ([1] * (rows - 1), [12345] * (rows - 1), [12345, *[100] * (rows - 2)] if rows > 1 else []):
        step.all_lengths[step.slots[1:]] = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        assert torch.equal(step.forward()[0], first[0])
