"""A KV pool in 8 bits: its size, what is stored in it, what attention reads from it, and where it is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from minisgl.attention.backend_choice import CANDIDATES, make_attention
from minisgl.attention.backends.cpu_backend import CpuAttention
from minisgl.attention.backends.torch_backend import TorchAttention
from minisgl.attention.base import AttentionInputs, AttentionSpec
from minisgl.config import ConfigError
from minisgl.kernel.base import Heads, Ops
from minisgl.kernel.cpu_ops import CpuOps
from minisgl.kernel.torch_ops import TorchOps
from minisgl.kvcache.kv_pool import KVPool
from minisgl.kvcache.layout import KVLayout
from minisgl.layers.layer_config import RopeConfig
from minisgl.layers.rotary import cos_sin_table

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
SPEC = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=16, page_size=4, dtype=torch.bfloat16, fp8_kv=True)
OPS = [TorchOps(), CpuOps(bfloat16_products=False)]


def make_layout(dtype: torch.dtype, upcast: torch.dtype | None = None) -> KVLayout:
    return KVLayout(SPEC.page_size, (SPEC.kv_stores(dtype),) * 3, SPEC.kv_stores(upcast) if upcast else ())


def make_pool(dtype: torch.dtype) -> KVPool:
    return KVPool(make_layout(dtype), 50, CPU)


@pytest.mark.parametrize(("dtype", "upcast"), [(torch.bfloat16, None), (FP8, None), (FP8, torch.bfloat16)])
def test_a_page_takes_what_is_reckoned_for_it(dtype: torch.dtype, upcast: torch.dtype | None) -> None:
    layout = make_layout(dtype, upcast)
    pool = KVPool(layout, 50, CPU)
    tensors = [half(layer) for half in (pool.keys, pool.values) for layer in range(3)]
    taken = sum(tensor.nbytes for tensor in tensors) + sum(half.nbytes for half in pool.upcast_buffer or ())
    assert taken == 51 * layout.pool_bytes(1)
    assert {tensor.dtype for tensor in tensors} == {dtype}


@pytest.mark.parametrize("ops", OPS, ids=lambda ops: type(ops).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_nearest_value_is_stored_and_what_is_too_large_saturates(ops: Ops, dtype: torch.dtype) -> None:
    finite = torch.arange(256, dtype=torch.uint8).view(FP8).double()
    finite = finite[finite.isfinite()].unique()
    tokens, table = 70, cos_sin_table(16, 100, RopeConfig(1e4))
    heads = Heads(6, 2, table, None, None)
    qkv = (torch.randn(tokens, 10 * 16) * torch.logspace(-4, 3, tokens).unsqueeze(1)).to(dtype)
    qkv[:5, -3:] = torch.tensor([448.0, -449.0, 60000.0]).to(dtype)
    positions, slots = torch.arange(tokens), torch.randperm(200)[:tokens]
    stored, exact = make_pool(FP8), make_pool(dtype)
    q, want_q = (
        ops.norm_rope_store(qkv, heads, positions, slots, pool.keys(1), pool.values(1)) for pool in (stored, exact)
    )
    assert torch.equal(q, want_q)
    for half in (KVPool.keys, KVPool.values):
        have, want = (half(pool, 1).flatten(0, 1)[slots].double() for pool in (stored, exact))
        assert want.abs().max() > 1000
        nearest = (want.unsqueeze(-1) - finite).abs().min(dim=-1).values
        assert torch.equal((have - want).abs(), nearest)
        assert not half(stored, 0).double().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("query_lens", [[1], [1, 1, 1, 1], [1, 7, 1, 30]], ids=str)
@pytest.mark.parametrize("make_backend", [TorchAttention, CpuAttention])
@pytest.mark.parametrize("window", [None, 20])
def test_attention_is_that_over_the_stored_values(
    make_backend: Callable[[AttentionSpec], TorchAttention],
    query_lens: list[int],
    dtype: torch.dtype,
    window: int | None,
) -> None:
    rows = len(query_lens)
    stored, wide = make_pool(FP8), make_pool(dtype)
    for half in (KVPool.keys, KVPool.values):
        half(wide, 2).normal_()
        half(stored, 2).copy_(half(wide, 2))
        half(wide, 2).copy_(half(stored, 2))
    kv_lens = np.array([45, 31, 3, 40][:rows], np.int32)
    inputs = AttentionInputs(
        query_lens=np.array(query_lens, np.int32),
        kv_lens=kv_lens,
        query_starts=torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32),
        kv_lens_device=torch.from_numpy(kv_lens),
        page_table=torch.randperm(50).int()[: rows * 12].view(rows, 12),
    )
    q = torch.randn(sum(query_lens), SPEC.num_heads, SPEC.head_dim).to(dtype)
    backend = make_backend(replace(SPEC, dtype=dtype, window=window))
    have, want = (backend.plan(inputs).forward(2, q, pool) for pool in (stored, wide))
    assert torch.equal(have, want)


def test_a_backend_without_fp8_pages_names_the_flag() -> None:
    capable = replace(SPEC, num_heads=16, num_kv_heads=8, head_dim=128)
    assert "--kv-cache-dtype fp8_e4m3" in (CANDIDATES["fi"].unsupported(capable, (9, 0)) or "")
    assert CANDIDATES["torch"].unsupported(capable, (9, 0)) is None


def test_an_older_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8_e4m3 needs .* 8\.9 or later, not 8\.6"):
        make_attention("auto", [SPEC], torch.device("cuda", 0))
