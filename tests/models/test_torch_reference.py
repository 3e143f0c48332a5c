"""The torch operations and attention against transformers' modules and the plain formula."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.attention.backends.cpu_backend import CpuAttention
from minisgl.attention.backends.torch_backend import TorchAttention
from minisgl.attention.base import AttentionInputs, AttentionSpec, add_sinks
from minisgl.kernel.base import Heads, Mixture, Norm, Routing
from minisgl.kernel.torch_ops import TorchOps, activate_and_mul
from minisgl.kvcache.kv_pool import KVPool
from minisgl.kvcache.layout import KVLayout, paged_kv
from minisgl.layers.layer_config import RopeConfig
from minisgl.layers.rotary import cos_sin_table, paired_rows
from minisgl.models.load_config import parse_config

DTYPES = [torch.float32, torch.bfloat16]
OPS = TorchOps()


def llama3(factor: float, low: float = 1.0, high: float = 4.0, original: int = 8192) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def yarn(factor: float | None, original: int = 32768, **more: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **more}


@pytest.mark.parametrize(
    ("theta", "scaling", "head_dim", "positions"),
    [
        (1e4, {"rope_type": "default"}, 128, 4096),  # Llama 2
        (1e6, {"rope_type": "default"}, 128, 40960),  # Qwen3
        (5e5, llama3(8.0), 128, 131072),  # Llama 3.1
        (5e5, llama3(32.0), 64, 131072),  # Llama 3.2
        (1e4, llama3(4.0, 2.0, 3.0, 100), 16, 400),
        (1e4, {"rope_type": "linear", "factor": 8.0}, 128, 16384),
        (1e4, {"rope_type": "linear", "factor": 2.5}, 64, 5000),
        (1e4, {"rope_type": "dynamic", "factor": 3.7}, 64, 4096),  # up to its original length
        (1e6, yarn(4.0), 128, 131072),  # Qwen2.5 and Qwen3
        (1e4, yarn(40.0, 4096, mscale=1.0, mscale_all_dim=0.707, beta_fast=32, beta_slow=1), 64, 163840),
        (1e4, yarn(16.0, 4096, attention_factor=1.25), 128, 65536),
        (1e4, yarn(None, 1000), 32, 3000),  # the factor is the quotient of the lengths
        (15e4, yarn(32.0, 4096, truncate=False), 64, 131072),
        (1e4, yarn(2.0, 100, beta_fast=3.0, beta_slow=3.0, truncate=False), 16, 200),  # no ramp
        (1e4, yarn(2.0, 3, beta_fast=64.0), 16, 200),  # all are divided
    ],
)
def test_rotary_table_is_that_of_transformers(
    theta: float, scaling: dict[str, Any], head_dim: int, positions: int
) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=positions,
        rope_parameters={"rope_theta": theta, **scaling},
    )
    rope = parse_config(config.to_dict()).attention.rope
    tail = torch.arange(max(0, positions - 3000), positions)  # rounded frequencies differ most at the last positions
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), tail.unsqueeze(0))
    want = torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), dim=-1)
    torch.testing.assert_close(cos_sin_table(head_dim, positions, rope)[tail], want, rtol=0, atol=1e-6)


def test_heads_that_are_rotated_in_part() -> None:
    """Whatever is not rotated is paired with its like and turned by 0."""
    rope = RopeConfig(10000.0, partial_factor=0.5)
    rows = [row for kept in paired_rows([range(8, 24)], 8, rope) for row in kept]
    assert rows == [8, 9, 12, 13, 10, 11, 14, 15, 16, 17, 20, 21, 18, 19, 22, 23]
    cos, sin = cos_sin_table(8, 5, rope).chunk(2, dim=1)
    whole = cos_sin_table(4, 5, RopeConfig(10000.0))
    assert torch.equal(torch.cat((cos[:, :2], sin[:, :2]), dim=1), whole)
    assert torch.equal(cos[:, 2:], torch.ones(5, 2))
    assert torch.equal(sin[:, 2:], torch.zeros(5, 2))
    assert paired_rows([range(8, 24)], 8, RopeConfig(10000.0)) == [range(8, 24)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_that_of_transformers(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(72, eps=1e-5).to(dtype)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    x = torch.randn(9, 72).to(dtype)
    with torch.no_grad():
        before = x.clone()
        assert torch.equal(OPS.rms_norm(x, Norm(norm.weight, 1e-5)), norm(x))
        assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    gate, up = torch.randn(2, 5, 48).to(dtype)
    have, want = activate_and_mul(torch.cat((gate, up), dim=-1), "silu"), torch.nn.functional.silu(gate) * up
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
    q_norm, k_norm = (Norm(weight, 1e-6) if norms else None for weight in weights)
    q = OPS.norm_rope_store(qkv, Heads(heads, kv_heads, table, q_norm, k_norm), positions, slots, k_cache, v_cache)
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
@pytest.mark.parametrize(
    ("window", "has_sinks"),
    [(None, False), (1, False), (5, False), (40, False), (1000, False), (None, True), (5, True)],
)
@pytest.mark.parametrize("make_backend", [TorchAttention, CpuAttention])
def test_attention_is_the_formula(
    make_backend: Callable[[AttentionSpec], TorchAttention],
    dtype: torch.dtype,
    query_lens: list[int],
    kv_lens: list[int],
    window: int | None,
    has_sinks: bool,
) -> None:
    heads, kv_heads, dim, page_size = 6, 2, 16, 4
    generator = torch.Generator().manual_seed(1)
    pool = KVPool(KVLayout(page_size, (paged_kv(kv_heads, dim, dtype),) * 2), 200, torch.device("cpu"))
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
    sinks = torch.linspace(-2, 4, heads, dtype=dtype) if has_sinks else None
    spec = AttentionSpec(heads, kv_heads, dim, page_size, dtype, window, has_sinks=has_sinks)
    plan = make_backend(spec).plan(inputs)
    plan.forward(0, q, pool, sinks)  # another layer leaves nothing behind
    have = plan.forward(1, q, pool, sinks)
    sink = torch.full((heads, 1), -torch.inf) if sinks is None else sinks.unsqueeze(1)

    want = []
    at = 0
    for row, (queries, length) in enumerate(zip(query_lens, kv_lens, strict=True)):
        k = pool.keys(1)[pages[row].long()].flatten(0, 1)[:length].double().repeat_interleave(3, dim=1)
        v = pool.values(1)[pages[row].long()].flatten(0, 1)[:length].double().repeat_interleave(3, dim=1)
        for i in range(queries):
            seen = length - queries + i + 1
            begin = 0 if window is None else max(0, seen - window)
            scores = torch.einsum("hd,lhd->hl", q[at].double(), k[begin:seen]) * dim**-0.5
            shares = torch.cat((scores, sink.double()), dim=1).softmax(-1)[:, :-1]
            want.append(torch.einsum("hl,lhd->hd", shares, v[begin:seen]))
            at += 1
    assert have.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(have.double(), torch.stack(want), rtol=tolerance, atol=tolerance)


def test_sinks_added_to_an_output_are_those_of_the_softmax() -> None:
    """Backends that return the log-sum-exp need it; some sinks are far above and far below the scores."""
    torch.manual_seed(0)
    scores, values, sinks = torch.randn(7, 5, 9), torch.randn(9, 16), torch.tensor([-90.0, -1.0, 0.0, 3.0, 90.0])
    have = add_sinks(scores.softmax(-1) @ values, scores.logsumexp(-1), sinks)
    with_sinks = torch.cat((scores, sinks.expand(7, 5).unsqueeze(-1)), dim=-1)
    torch.testing.assert_close(have, with_sinks.softmax(-1)[..., :-1] @ values)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("query_lens", [[1, 1, 1, 1, 1], [1, 9, 1, 1, 1], [1, 9, 9, 9, 9]])
@pytest.mark.parametrize("heads", [2, 4, 6])
def test_attention_in_place_is_that_of_gathered_pages(heads: int, query_lens: list[int], window: int | None) -> None:
    """Rows whose pages follow one another, in order and not, shared and scattered."""
    page_size, kv_lens = 16, [630, 640, 600, 90, 400]
    device = torch.device("cpu")
    pool = KVPool(KVLayout(page_size, (paged_kv(2, 16, torch.float32),)), 200, device)
    pool.keys(0).normal_()
    pool.values(0).normal_()
    in_order = torch.arange(40, dtype=torch.int32)
    shared = torch.cat((in_order[:25], 60 + in_order[:15]))
    reversed_order = 159 - in_order
    scattered = 199 - 3 * in_order
    inputs = AttentionInputs(
        query_lens=np.array(query_lens, np.int32),
        kv_lens=np.array(kv_lens, np.int32),
        query_starts=torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32),
        kv_lens_device=torch.tensor(kv_lens, dtype=torch.int32),
        page_table=torch.stack((in_order, shared, reversed_order, scattered, shared)),
    )
    q = torch.randn(sum(query_lens), heads, 16)
    want, *found = (
        make_backend(AttentionSpec(heads, 2, 16, page_size, torch.float32, window)).plan(inputs).forward(0, q, pool)
        for make_backend in (
            TorchAttention,
            partial(CpuAttention, as_vectors=False),
            partial(CpuAttention, as_vectors=True),
        )
    )
    for have in found:
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 200])
def test_moe_is_that_of_transformers(dtype: torch.dtype, renormalize: bool, tokens: int) -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=64, moe_intermediate_size=32, num_experts=16, num_experts_per_tok=3, norm_topk_prob=renormalize
    )
    torch.manual_seed(0)
    block = Qwen3MoeSparseMoeBlock(config).requires_grad_(False)
    for parameter in block.parameters():
        parameter.normal_(std=0.2)
    block = block.to(dtype)
    x = torch.randn(tokens, 64).to(dtype)
    before = x.clone()
    logits = torch.nn.functional.linear(x, block.gate.weight)
    experts = block.experts
    have = OPS.moe(x, logits, Mixture(experts.gate_up_proj, experts.down_proj, 16, Routing(3, renormalize)))
    want = block(x.unsqueeze(0))[0]
    assert torch.equal(x, before)
    assert have.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)
