"""A KV cache in 8 bits on a GPU: what kernels store and read against float64, and the engine against transformers
whose cache rounds likewise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu.test_gpu_fused_decode import Step, make_step
from minisgl import LLM, SamplingParams
from minisgl.attention.backend_choice import CANDIDATES, make_backend
from minisgl.attention.backends.torch_backend import TorchAttention
from minisgl.attention.base import AttentionInputs, AttentionSpec
from minisgl.kernel.base import Heads, Norm
from minisgl.kernel.torch_ops import TorchOps
from minisgl.kvcache.kv_pool import KVPool
from minisgl.kvcache.layout import KVLayout
from minisgl.verify.oracle import cache_argument
from support.small_models import save_qwen3

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
FP8 = torch.float8_e4m3fn
BF16, F16 = torch.bfloat16, torch.float16


def make_pool(spec: AttentionSpec, pages: int, dtype: torch.dtype, upcast: torch.dtype | None = None) -> KVPool:
    layers = (spec.kv_stores(dtype),) * 2
    return KVPool(KVLayout(spec.page_size, layers, spec.kv_stores(upcast) if upcast else ()), pages, DEVICE)


def check_stored(have: Tensor, want: Tensor) -> None:
    """Check that values are equal, or one step apart where the kernel's sums are rounded across a boundary."""
    a, b = (tensor.float() for tensor in (have, want))
    differs = a != b
    assert differs.float().mean() < 2e-3
    assert ((a - b).abs() <= 0.126 * b.abs() + 2**-9)[differs].all()


@pytest.mark.parametrize("dtype", [BF16, F16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 32])
@pytest.mark.parametrize("normed", [False, True])
def test_norm_rope_store(dtype: torch.dtype, head_dim: int, normed: bool) -> None:
    from minisgl.kernel.cuda_ops import CudaOps

    torch.manual_seed(0)
    tokens, spec = 300, AttentionSpec(6, 2, head_dim, 16, dtype, fp8_kv=True)
    qkv = torch.randn(tokens, 10 * head_dim, device=DEVICE)
    qkv[::7, -head_dim:] *= 1000  # values that saturate
    qkv = qkv.to(dtype)
    angles = torch.outer(torch.arange(400.0), torch.rand(head_dim // 2))
    norms = [Norm(torch.randn(head_dim, device=DEVICE).to(dtype), 1e-6) if normed else None for _ in "qk"]
    heads = Heads(6, 2, torch.cat([angles.cos(), angles.sin()], dim=1).to(DEVICE), *norms)
    positions = torch.randperm(400, device=DEVICE)[:tokens]
    slots = torch.randperm(800, device=DEVICE)[:tokens]
    have, want = (make_pool(spec, 50, FP8) for _ in range(2))
    q, want_q = (
        ops.norm_rope_store(qkv, heads, positions, slots, pool.keys(1), pool.values(1))
        for ops, pool in ((CudaOps(DEVICE), have), (TorchOps(), want))
    )
    torch.testing.assert_close(q, want_q, rtol=1e-2, atol=1e-2)
    assert want.values(1).float().abs().max() == 448
    check_stored(have.keys(1), want.keys(1))
    assert torch.equal(have.values(1).float(), want.values(1).float())
    assert not have.keys(0).float().any()


def attend(step: Step, q: Tensor, window: int | None) -> Tensor:
    """Attend in float64 to the contents of the caches, the new token included: [rows, heads, head_dim]."""
    spec = step.spec
    rows = []
    for row, length in enumerate(step.lengths):
        pages = step.page_table[step.slots[row], : -(-length // spec.page_size)].long()
        k, v = (cache.view(torch.uint8)[pages].view(FP8).flatten(0, 1)[:length].double() for cache in step.caches)
        if window is not None:
            k, v = k[-window:], v[-window:]
        k, v = (x.repeat_interleave(spec.group, dim=1) for x in (k, v))
        scores = torch.einsum("hd,nhd->hn", q[row].double(), k) * spec.head_dim**-0.5
        rows.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), v))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "head_dim", "page_size", "window", "norm"),
    [
        ([1], 16, 8, 128, 64, None, True),
        ([640], 16, 8, 128, 64, None, True),
        ([1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 100, 700, 1300], 16, 8, 128, 16, None, True),
        ([5, 640, 33, 1] * 20, 40, 8, 128, 64, None, True),
        ([300, 20, 1000], 32, 8, 128, 1, None, False),
        ([300, 20, 1000], 32, 4, 128, 8, None, False),
        ([300, 20, 16, 17, 1000, 129], 24, 8, 128, 16, 33, False),
        ([300, 4000] * 70, 8, 8, 64, 32, None, False),
        ([300, 4000] * 40, 14, 2, 64, 32, 500, True),
        ([1, 2, 15, 16, 17, 31, 900], 12, 2, 64, 4, None, False),
        ([640, 77] * 140, 16, 8, 128, 64, None, True),
        ([640, 5, 77, 1500] * 8, 16, 8, 128, 64, None, True),
        # long rows, which are cut
        ([30000], 16, 8, 128, 64, None, True),
        ([30000, 1, 9000], 40, 8, 128, 16, None, True),
        ([7000, 8193, 100, 20000, 6145, 1, 3000, 12288], 64, 8, 128, 64, None, True),
        ([12000] * 8 + [5] * 8, 32, 4, 64, 1, None, False),
        ([9000, 640] * 100, 16, 8, 64, 64, None, True),
        ([12000] + [200] * 55, 8, 8, 128, 16, None, True),
        ([30000], 16, 8, 128, 64, 10000, True),
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
    spec = AttentionSpec(heads, kv_heads, head_dim, page_size, dtype, fp8_kv=True)
    step = make_step(spec, lengths, norm=norm)
    made = step.inputs()
    reference = [cache.clone() for cache in step.caches]
    q = TorchOps().norm_rope_store(step.qkv, step.heads, made.positions, made.out_cache_loc, *reference)
    have = step.forward(window)
    for cache, want in zip(step.caches, reference, strict=True):
        check_stored(cache, want)
    want = attend(step, q, window)
    error = (have.double() - want).norm() / want.norm()
    assert error < (6e-3 if dtype == BF16 else 1e-3), f"relative error {error:.2e}"
    worst = (have.double() - want).abs().max()
    assert worst < 0.1, f"a value is {worst:.2e} off"


def test_the_new_token_counts_as_it_is_stored() -> None:
    """A decode of a single token returns its value as stored in the cache: rounded, and at most 448."""
    spec = AttentionSpec(16, 8, 128, 64, BF16, fp8_kv=True)
    step = make_step(spec, [1, 1])
    step.qkv[:, -8 * 128 :] *= 200
    have = step.forward().view(2, 8, 2, 128)
    values = step.caches[1].float()[step.page_table[step.slots, 0].long(), 0]
    assert values.abs().max() == 448
    assert torch.equal(have.float(), values.unsqueeze(2).expand_as(have))


@pytest.mark.parametrize("name", ["fa", "torch"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("heads", [(16, 8), (40, 8), (16, 2)])
@pytest.mark.parametrize("window", [None, 100])
def test_steps(name: str, heads: tuple[int, int], page_size: int, window: int | None) -> None:
    spec = AttentionSpec(heads[0], heads[1], 128, page_size, BF16, window, fp8_kv=True)
    why = CANDIDATES[name].unsupported(spec, torch.cuda.get_device_capability(DEVICE))
    if why:
        pytest.skip(why)
    backend = make_backend(name, spec, DEVICE)
    torch.manual_seed(0)
    rng, longest = np.random.default_rng(0), 1500
    pages = 20 * longest // page_size
    pool = make_pool(spec, pages, FP8, BF16 if backend.upcasts else None)
    exact = make_pool(spec, pages, torch.float32)
    for half in (KVPool.keys, KVPool.values):
        half(exact, 1).normal_()
        half(pool, 1).copy_(half(exact, 1))
        half(exact, 1).copy_(half(pool, 1))
    for rows, longest_query in [(1, 1), (40, 1), (1, 700), (5, 300), (40, 30), (33, 2)]:
        query_lens = rng.integers(1, longest_query + 1, rows).astype(np.int32)
        kv_lens = (query_lens + rng.integers(0, longest - longest_query, rows)).astype(np.int32)
        kv_lens[::3] = query_lens[::3]
        inputs = AttentionInputs(
            query_lens=query_lens,
            kv_lens=kv_lens,
            query_starts=torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32, device=DEVICE),
            kv_lens_device=torch.from_numpy(kv_lens).to(DEVICE),
            page_table=torch.randint(0, pages, (rows, -(-longest // page_size)), dtype=torch.int32, device=DEVICE),
        )
        q = torch.randn(int(query_lens.sum()), heads[0], 128, device=DEVICE).to(BF16)
        plan = backend.plan(inputs)
        plan.forward(0, q, pool)  # another layer leaves nothing behind
        have = plan.forward(1, q, pool)
        want = TorchAttention(spec).plan(inputs).forward(1, q.float(), exact)
        worst = ((have.float() - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)).max()
        assert worst < 6e-3, f"relative error {worst:.1e}"


VOCAB = 5000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("qwen3"), weights=True, vocab_size=VOCAB, num_layers=4)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, VOCAB, 200).tolist()
    return [
        (shared if index % 3 == 0 else []) + rng.integers(0, VOCAB, rng.integers(1, 300)).tolist()
        for index in range(40)
    ]


def regrets(folder: Path, answers: list[list[int]], make_cache: Any) -> Tensor:
    """Return the distance of each chosen token's logit from the oracle's best."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=BF16).cuda().eval()
    found = []
    for prompt, answer in zip(prompts() * 2, answers, strict=True):
        ids = torch.tensor([prompt + answer], device="cuda")
        with torch.inference_mode():
            logits = model(ids, **{cache_argument(model): make_cache()}, use_cache=True).logits
        logits = logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(answer, device="cuda")[:, None]).squeeze(1)
        found.append(logits.max(dim=1).values - chosen)
    return torch.cat(found)


@pytest.mark.parametrize(
    "options",
    [
        {"attention_backend": "auto"},
        {"attention_backend": "auto", "batch_policy": "mixed", "max_extend_tokens": 64, "page_size": 16},
        {"attention_backend": "fa", "max_extend_tokens": 100},
        {"attention_backend": "fa,fused", "cuda_graph_max_bs": 0},
        {"attention_backend": "torch", "cuda_graph_max_bs": 0},
    ],
    ids=lambda options: ",".join(f"{key}={value}" for key, value in options.items()),
)
def test_greedy_agrees_with_transformers_and_a_rounded_cache(folder: Path, options: dict[str, Any]) -> None:
    from transformers import DynamicCache

    class RoundedCache(DynamicCache):
        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            k, v = (x.clamp(-448, 448).to(FP8).to(x.dtype) for x in (key_states, value_states))
            return super().update(k, v, *args, **kwargs)

    params = SamplingParams(max_tokens=48, ignore_eos=True)
    with LLM(str(folder), device="cuda", num_page_override=2000, kv_cache_dtype="fp8_e4m3", **options) as llm:
        answers = [answer["token_ids"] for _ in range(2) for answer in llm.generate(prompts(), params)]
        llm.check_idle()
    found = regrets(folder, answers, RoundedCache)
    without = regrets(folder, answers, DynamicCache)
    print(f"regret: worst {found.max():.3f}, mean {found.mean():.5f}; exact {without.max():.3f}, {without.mean():.5f}")
    # Roundings of bf16 become steps of e4m3 where they cross a boundary: 0.28 at worst, 0.0034 on average were seen,
    # and 0.66 and 0.022 against an oracle that rounds nothing.
    assert found.max() < 0.45
    assert found.mean() < 0.3 * without.mean()
