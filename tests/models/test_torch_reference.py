"""The torch operations and attention against transformers' modules and the plain formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl.attention.base import AttentionInputs
from minisgl.attention.torch_backend import TorchAttention
from minisgl.kernel.torch_ops import TorchOps
from minisgl.kvcache.pool import KVPool
from minisgl.layers.rotary import cos_sin_table
from minisgl.models.config import Llama3Scaling, RopeConfig

DTYPES = [torch.float32, torch.bfloat16]
OPS = TorchOps()


@pytest.mark.parametrize(
    ("rope", "head_dim", "positions"),
    [
        (RopeConfig(10000.0), 128, 4096),  # Llama 2
        (RopeConfig(1000000.0), 128, 40960),  # Qwen3
        (RopeConfig(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192)), 128, 131072),  # Llama 3.1
        (RopeConfig(500000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192)), 64, 131072),  # Llama 3.2
        (RopeConfig(10000.0, Llama3Scaling(4.0, 2.0, 3.0, 100)), 16, 400),
    ],
)
def test_rotary_table_is_that_of_transformers(rope: RopeConfig, head_dim: int, positions: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.scaling:
        parameters |= {
            "rope_type": "llama3",
            "factor": rope.scaling.factor,
            "low_freq_factor": rope.scaling.low_freq_factor,
            "high_freq_factor": rope.scaling.high_freq_factor,
            "original_max_position_embeddings": rope.scaling.original_max_positions,
        }
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=positions,
        rope_parameters=parameters,
    )
    tail = torch.arange(max(0, positions - 3000), positions)  # where rounding of the frequencies shows most
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), tail.unsqueeze(0))
    want = torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), dim=-1)
    torch.testing.assert_close(cos_sin_table(head_dim, positions, rope)[tail], want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_that_of_transformers(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(72, eps=1e-5).to(dtype)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    x, residual = torch.randn(2, 9, 72).to(dtype)
    with torch.no_grad():
        before = x.clone()
        assert torch.equal(OPS.rms_norm(x, norm.weight, 1e-5), norm(x))
        assert torch.equal(x, before)
        want = norm(x + residual), x + residual
        have = OPS.add_rms_norm(x, residual, norm.weight, 1e-5)
    assert torch.equal(have[0], want[0])
    assert torch.equal(have[1], want[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    gate, up = torch.randn(2, 5, 48).to(dtype)
    have, want = OPS.silu_and_mul(torch.cat((gate, up), dim=-1)), torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(have, want, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [False, True])
def test_norm_rope_store(dtype: torch.dtype, norms: bool) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    tokens, heads, kv_heads, dim = 7, 6, 2, 16
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    positions = torch.tensor([3, 4, 5, 90, 0, 1, 17])
    slots = torch.tensor([40, 41, 3, 0, 22, 9, 10])
    table = cos_sin_table(dim, 100, RopeConfig(10000.0))
    k_cache, v_cache = torch.full((2, 11, 4, kv_heads, dim), 7.0, dtype=dtype)
    weights = torch.rand(2, dim).to(dtype) + 0.5 if norms else (None, None)
    q = OPS.norm_rope_store(
        qkv,
        positions,
        table,
        slots,
        k_cache,
        v_cache,
        num_heads=heads,
        num_kv_heads=kv_heads,
        q_weight=weights[0],
        k_weight=weights[1],
        eps=1e-6,
    )
    want_q, want_k, want_v = qkv.view(tokens, -1, dim).split((heads, kv_heads, kv_heads), dim=1)
    if norms:
        norm = LlamaRMSNorm(dim, 1e-6).to(dtype).requires_grad_(False)
        norm.weight.copy_(weights[0])
        want_q = norm(want_q)
        norm.weight.copy_(weights[1])
        want_k = norm(want_k)
    cos = torch.cat((table[positions, : dim // 2],) * 2, dim=-1)
    sin = torch.cat((table[positions, dim // 2 :],) * 2, dim=-1)
    want_q, want_k = apply_rotary_pos_emb(want_q.float(), want_k.float(), cos, sin)
    assert torch.equal(q, want_q.to(dtype))
    assert torch.equal(k_cache.flatten(0, 1)[slots], want_k.to(dtype))
    assert torch.equal(v_cache.flatten(0, 1)[slots], want_v)
    untouched = torch.ones(44, dtype=torch.bool)
    untouched[slots] = False
    assert (k_cache.flatten(0, 1)[untouched] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("query_lens", "kv_lens"),
    [
        ([1], [1]),
        ([1, 1, 1, 1, 1, 1], [3, 90, 41, 88, 1, 20]),
        ([5], [5]),
        ([5], [60]),
        ([1, 8, 1, 2, 30], [70, 9, 4, 2, 30]),
    ],
)
def test_attention_is_the_formula(dtype: torch.dtype, query_lens: list[int], kv_lens: list[int]) -> None:
    heads, kv_heads, dim, page_size = 6, 2, 16, 4
    generator = torch.Generator().manual_seed(1)
    pool = KVPool(
        num_layers=2,
        num_pages=200,
        page_size=page_size,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    pool.keys(1).normal_(generator=generator)
    pool.values(1).normal_(generator=generator)
    pages = torch.randperm(200, generator=generator).int()[: len(kv_lens) * 25].view(len(kv_lens), 25)
    q = torch.randn(sum(query_lens), heads, dim, generator=generator).to(dtype)
    inputs = AttentionInputs(
        query_lens=np.array(query_lens, np.int32),
        kv_lens=np.array(kv_lens, np.int32),
        query_starts=torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32),
        kv_lens_device=torch.tensor(kv_lens, dtype=torch.int32),
        page_table=pages,
    )
    backend = TorchAttention(page_size)
    have = backend.forward(1, q, pool, backend.plan(inputs))

    want = []
    at = 0
    for row, (queries, length) in enumerate(zip(query_lens, kv_lens, strict=True)):
        k = pool.keys(1)[pages[row].long()].flatten(0, 1)[:length].double().repeat_interleave(3, dim=1)
        v = pool.values(1)[pages[row].long()].flatten(0, 1)[:length].double().repeat_interleave(3, dim=1)
        for i in range(queries):
            seen = length - queries + i + 1
            scores = torch.einsum("hd,lhd->hl", q[at].double(), k[:seen]) * dim**-0.5
            want.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), v[:seen]))
            at += 1
    assert have.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(have.double(), torch.stack(want), rtol=tolerance, atol=tolerance)
