"""Attention sinks on a GPU, by the fused kernel and by every backend, against the same softmax in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu.test_gpu_fused_decode import make_step
from minisgl.attention.backend_choice import CANDIDATES, make_backend
from minisgl.attention.base import AttentionInputs, AttentionSpec
from minisgl.attention.self_test import Role, self_test_error
from minisgl.kernel.torch_ops import TorchOps
from minisgl.kvcache.kv_pool import KVPool
from minisgl.kvcache.layout import KVLayout

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
BF16, F16 = torch.bfloat16, torch.float16
GPT_OSS = AttentionSpec(64, 8, 64, 64, BF16, has_sinks=True)


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """Attend with one query [heads, d] to k and v [n, kv_heads, d] and to a sink, in float64."""
    group = q.shape[0] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("hd,nhd->hn", q.double(), k) * scale
    weights = torch.cat([scores, sinks.double().unsqueeze(1)], dim=1).softmax(-1)[:, :-1]
    return torch.einsum("hn,nhd->hd", weights, v)


def rows_of(pool: Tensor, pages: Tensor, length: int, window: int | None) -> Tensor:
    """Return the last positions [n, kv_heads, d] of a row that a query at its end sees, in float32."""
    moved = pool.view(torch.uint8) if pool.itemsize == 1 else pool
    found = moved[pages.long()].view(pool.dtype).flatten(0, 1)[:length].float()
    return found if window is None else found[-window:]


def check(have: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    error = (have.double() - want).norm() / want.norm()
    assert error < (6e-3 if dtype == BF16 else 1e-3), f"relative error {error:.2e}"
    worst = (have.double() - want).abs().max()
    assert worst < 0.1, f"a value is {worst:.2e} off"


@pytest.mark.parametrize(
    ("lengths", "spec", "window"),
    [
        ([1], GPT_OSS, None),
        ([640], GPT_OSS, None),
        ([640], GPT_OSS, 128),
        ([1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 100, 700, 1300], replace(GPT_OSS, page_size=16), 128),
        ([5, 640, 33, 1] * 5, GPT_OSS, None),
        ([5, 640, 33, 1] * 16, GPT_OSS, 128),
        ([5, 640, 33, 1] * 16, GPT_OSS, None),
        ([5, 640, 33, 1] * 20, GPT_OSS, None),
        ([300, 4000] * 60, replace(GPT_OSS, page_size=1), 128),
        ([300, 20, 777, 1] * 64, replace(GPT_OSS, num_heads=32, num_kv_heads=4), None),
        ([300, 20, 777, 1], replace(GPT_OSS, num_heads=8, num_kv_heads=1), None),
        ([300, 20, 777, 1] * 30, AttentionSpec(16, 8, 128, 64, BF16, has_sinks=True), None),
        # long rows, which are cut: the sink counts once
        ([30000], GPT_OSS, None),
        ([30000], GPT_OSS, 10000),
        ([7000, 8193, 100, 20000, 6145, 1, 3000, 12288], GPT_OSS, None),
        ([12000] + [200] * 55, GPT_OSS, None),
        ([9000, 640] * 100, GPT_OSS, None),
        ([30000, 1, 9000], AttentionSpec(40, 8, 128, 16, BF16, has_sinks=True), None),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("fp8_kv", [False, True])
def test_fused_decode(
    lengths: list[int], spec: AttentionSpec, window: int | None, dtype: torch.dtype, fp8_kv: bool
) -> None:
    spec = replace(spec, dtype=dtype, fp8_kv=fp8_kv)
    step = make_step(spec, lengths, norm=False)
    made, stored = step.inputs(), [cache.clone() for cache in step.caches]
    q = TorchOps().norm_rope_store(step.qkv, step.heads, made.positions, made.out_cache_loc, *stored)
    have = step.forward(window)
    want = []
    for row, length in enumerate(lengths):
        k, v = (rows_of(cache, made.page_table[row], length, window) for cache in step.caches)
        assert step.sinks is not None
        want.append(attend(q[row], k, v, step.sinks, spec.softmax_scale))
    check(have, torch.stack(want), dtype)


@pytest.mark.parametrize("name", ["fa", "fi", "varlen", "torch"])
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("fp8_kv", [False, True])
def test_backends(name: str, window: int | None, dtype: torch.dtype, fp8_kv: bool) -> None:
    """Chunks, decodes and both together, of rows long enough to be split."""
    spec = replace(GPT_OSS, window=window, dtype=dtype, fp8_kv=fp8_kv)
    candidate, capability = CANDIDATES[name], torch.cuda.get_device_capability(DEVICE)
    roles: tuple[Role, ...] = ("prefill", "decode")
    if why := candidate.unsupported(spec, capability):
        pytest.skip(why)
    if not all(candidate.ready(spec, capability, role) for role in roles):
        pytest.skip(f"{name}: kernels for this shape are not compiled")
    for role in roles:
        if why := self_test_error(partial(make_backend, name, device=DEVICE), spec, DEVICE, role):
            assert "does not run here" in why, why
            pytest.skip(why)  # another backend is chosen then
    backend = make_backend(name, spec, DEVICE)
    torch.manual_seed(0)
    width = 200
    layout = KVLayout(64, (spec.kv_stores(),), spec.kv_stores(dtype) if backend.upcasts else ())
    pool = KVPool(layout, 6 * width, DEVICE)
    for half in (pool.keys(0), pool.values(0)):
        half.copy_(torch.randn(half.shape, device=DEVICE))
    table = torch.randperm(6 * width, device=DEVICE).int().view(6, width)
    sinks = torch.linspace(-3, 6, spec.num_heads, device=DEVICE).to(dtype)
    for query_lens, kv_lens in [
        ([1], [12000]),
        ([1] * 6, [1, 64, 700, 12000, 129, 5]),
        ([300, 1, 40], [9000, 3000, 40]),
    ]:
        rows, starts = len(query_lens), np.cumsum([0, *query_lens])
        inputs = AttentionInputs(
            query_lens=np.array(query_lens, dtype=np.int32),
            kv_lens=np.array(kv_lens, dtype=np.int32),
            query_starts=torch.from_numpy(starts.astype(np.int32)).to(DEVICE),
            kv_lens_device=torch.tensor(kv_lens, dtype=torch.int32, device=DEVICE),
            page_table=table[:rows].contiguous(),
        )
        q = torch.randn(int(starts[-1]), spec.num_heads, spec.head_dim, device=DEVICE).to(dtype)
        have, want = backend.plan(inputs).forward(0, q, pool, sinks), []
        for row, (queries, length) in enumerate(zip(query_lens, kv_lens, strict=True)):
            k, v = (rows_of(half, table[row], length, None) for half in (pool.keys(0), pool.values(0)))
            for query in range(queries):
                end = length - queries + query + 1
                begin = 0 if window is None else max(0, end - window)
                one = q[int(starts[row]) + query]
                want.append(attend(one, k[begin:end], v[begin:end], sinks, spec.softmax_scale))
        check(have, torch.stack(want), dtype)
