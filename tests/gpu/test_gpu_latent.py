"""Latent attention (MLA) on a GPU: attention over latents, what is stored of them, and the choice of experts that the
models with it have, each against float64.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu.test_gpu_moe import in_double
from minisgl.attention.backend_choice import CANDIDATES, make_backend
from minisgl.attention.base import AttentionInputs, AttentionSpec, ExpandingPlan
from minisgl.core import Int32Array
from minisgl.kernel.base import ExpertBiases, LatentDims, LatentRows, Mixture, Norm, Routing
from minisgl.kernel.torch_ops import TorchOps, route
from minisgl.kvcache.kv_pool import KVPool
from minisgl.kvcache.layout import KVLayout

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
RANK, ROPE = 512, 64
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3}  # relative to the norm of the result


class Latents:
    """A pool of random latents, and rows whose pages are anywhere in it."""

    def __init__(
        self, heads: int, page_size: int, dtype: torch.dtype, longest: int, expanded: tuple[int, int] = (0, 0)
    ) -> None:
        latent = LatentDims(RANK, ROPE, *expanded)  # keys and values that no backend expands have no size
        self.spec = AttentionSpec(heads, 1, RANK + ROPE, page_size, dtype, scale=192**-0.5, latent=latent)
        self.generator = torch.Generator(DEVICE).manual_seed(heads + page_size)
        self.width = -(-longest // page_size)
        self.pool = KVPool(KVLayout(page_size, (self.spec.kv_stores(),)), 2 * self.width, DEVICE)
        self.pool.keys(0).normal_(generator=self.generator)

    def inputs(self, query_lens: Int32Array, kv_lens: Int32Array) -> AttentionInputs:
        starts = torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32, device=DEVICE)
        shape = (len(query_lens), self.width)
        table = torch.randint(0, 2 * self.width, shape, dtype=torch.int32, device=DEVICE, generator=self.generator)
        return AttentionInputs(query_lens, kv_lens, starts, torch.from_numpy(kv_lens).to(DEVICE), table)

    def queries(self, tokens: int) -> Tensor:
        shape = (tokens, self.spec.num_heads, RANK + ROPE)
        return torch.randn(shape, device=DEVICE, generator=self.generator).to(self.spec.dtype)

    def exact(self, q: Tensor, inputs: AttentionInputs) -> Tensor:
        """[T, heads, RANK] in float64."""
        out, start = [], 0
        for row, (count, length) in enumerate(zip(inputs.query_lens, inputs.kv_lens, strict=True)):
            pages = inputs.page_table[row, : -(-int(length) // self.spec.page_size)]
            keys = self.pool.keys(0)[pages.long()].flatten(0, 1)[:length, 0].double()
            scores = torch.einsum("qhd,kd->hqk", q[start : start + count].double(), keys) * self.spec.softmax_scale
            seen = torch.ones(count, length, dtype=torch.bool, device=DEVICE).tril(int(length) - int(count))
            shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out.append(torch.einsum("hqk,kd->qhd", shares, keys[:, :RANK]))
            start += int(count)
        return torch.cat(out)

    def check(self, have: Tensor, q: Tensor, inputs: AttentionInputs) -> None:
        want = self.exact(q, inputs)
        assert have.shape == want.shape
        worst = ((have.double() - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)).max()
        assert worst < TOLERANCE[self.spec.dtype], f"relative error {worst:.1e}"


def lengths(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize("name", ["latent", "torch"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("heads", [8, 16, 20, 128])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_attention(name: str, page_size: int, heads: int, dtype: torch.dtype) -> None:
    world = Latents(heads, page_size, dtype, longest=1500)
    why = CANDIDATES[name].unsupported(world.spec, torch.cuda.get_device_capability(DEVICE))
    if why:
        pytest.skip(why)
    backend = make_backend(name, world.spec, DEVICE)
    decode = lengths(1, 1, 1, 1, 1), lengths(1, 1500, 64, 65, 700)
    mixed = lengths(1, 300, 1, 64, 17), lengths(900, 300, 1, 1000, 17)
    for query_lens, kv_lens in (decode, mixed):
        inputs, q = world.inputs(query_lens, kv_lens), world.queries(int(query_lens.sum()))
        world.check(backend.plan(inputs).forward(0, q, world.pool), q, inputs)


@pytest.mark.parametrize("heads", [16, 20])
@pytest.mark.parametrize("rows", [1, 32, 300])
def test_captured_decodes_follow_the_lengths(heads: int, rows: int) -> None:
    world = Latents(heads, 16, torch.bfloat16, longest=4000)
    why = CANDIDATES["latent"].unsupported(world.spec, torch.cuda.get_device_capability(DEVICE))
    if why:
        pytest.skip(why)
    backend, ones = make_backend("latent", world.spec, DEVICE), np.ones(rows, dtype=np.int32)
    inputs, q = world.inputs(ones, np.full(rows, 4000, dtype=np.int32)), world.queries(rows)
    backend.plan(inputs).forward(0, q, world.pool)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.plan(inputs).forward(0, q, world.pool)
    for longest in (1, 100, 4000):
        kv_lens = np.random.default_rng(longest).integers(1, longest + 1, rows, dtype=np.int32)
        inputs.kv_lens_device.copy_(torch.from_numpy(kv_lens))
        graph.replay()
        world.check(out, q, AttentionInputs(ones, kv_lens, inputs.query_starts, *inputs_on_device(inputs)))


@pytest.mark.parametrize("heads", [16, 20])
def test_captured_steps_follow_the_rows(heads: int) -> None:
    world, rows, tokens = Latents(heads, 16, torch.bfloat16, longest=2000), 6, 300
    full = np.full(rows, tokens, dtype=np.int32), np.full(rows, 2000, dtype=np.int32)
    inputs, q = world.inputs(*full), world.queries(tokens)
    inputs = dataclasses.replace(inputs, graph_tokens=tokens)
    backend = make_backend("latent", world.spec, DEVICE)
    inputs.query_starts.fill_(tokens)[0] = 0
    backend.plan(inputs).forward(0, q, world.pool)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.plan(inputs).forward(0, q, world.pool)
    for query_lens, kv_lens in (
        (lengths(1, 33, 65, 1, 100, 100), lengths(900, 33, 2000, 1, 164, 100)),
        (lengths(300, 0, 0, 0, 0, 0), lengths(1000, 0, 0, 0, 0, 0)),
        (lengths(100, 1, 199, 0, 0, 0), lengths(100, 1, 199, 0, 0, 0)),
    ):
        inputs.kv_lens_device.copy_(torch.from_numpy(kv_lens))
        inputs.query_starts[1:].copy_(torch.from_numpy(query_lens.cumsum()))
        graph.replay()
        now = AttentionInputs(query_lens, kv_lens, inputs.query_starts, *inputs_on_device(inputs))
        world.check(out, q, now)


CHUNKS = {
    "beside decodes": (lengths(1, 300, 1, 64, 17), lengths(900, 300, 1, 1000, 17)),
    "of odd lengths": (lengths(65, 97, 129, 255), lengths(65, 1033, 1000, 256)),
    "behind cached tokens": (lengths(200, 64), lengths(1500, 129)),
    "long": (lengths(1500), lengths(1500)),
}


@pytest.mark.parametrize("buffer_bytes", [1 << 27, 1])  # one block of keys, or several of 1,024
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize(("heads", "dims"), [(16, (128, 128)), (20, (192, 256))])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_expanded_chunks(
    dtype: torch.dtype,
    heads: int,
    dims: tuple[int, int],
    chunks: str,
    buffer_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("minisgl.attention.latent.prefill._BUFFER_BYTES", buffer_bytes)
    world, (nope, value) = Latents(heads, 16, dtype, longest=1500, expanded=dims), dims
    if torch.cuda.get_device_capability(DEVICE) != (9, 0):
        pytest.skip("long chunks are expanded on Hopper alone")
    inputs = world.inputs(*CHUNKS[chunks])
    tokens = int(inputs.query_lens.sum())
    plan = make_backend("latent", world.spec, DEVICE).plan(inputs)
    assert isinstance(plan, ExpandingPlan)
    projected = torch.randn(tokens, heads * (nope + ROPE) + 8, device=DEVICE, generator=world.generator).to(dtype)
    q_nope = projected[:, : heads * nope].view(tokens, heads, nope)
    q_rope = projected[:, heads * nope : -8].view(tokens, heads, ROPE)
    weight = torch.randn(heads, nope + value, RANK, device=DEVICE, generator=world.generator).mul_(RANK**-0.5).to(dtype)
    out = torch.full((tokens, heads, value), torch.nan, dtype=dtype, device=DEVICE)
    plan.forward_expanded(0, q_nope, q_rope, weight, world.pool, out)
    query = torch.cat([torch.einsum("thn,hnr->thr", q_nope.double(), weight[:, :nope].double()), q_rope.double()], -1)
    want = torch.einsum("thr,hvr->thv", world.exact(query, inputs), weight[:, nope:].double())
    expanded = torch.ones(tokens, dtype=torch.bool, device=DEVICE)
    if plan.absorbed is not None:
        expanded[plan.absorbed.tokens] = False
        few = query[plan.absorbed.tokens].to(dtype)
        absorbed = world.exact(query, inputs)[plan.absorbed.tokens]
        have = plan.absorbed.plan.forward(0, few, world.pool).double()
        assert (have - absorbed).norm() < 2 * TOLERANCE[dtype] * absorbed.norm()
    assert torch.equal(out.isnan().flatten(1).any(1), ~expanded)
    errors = (out.double() - want)[expanded].flatten(1).norm(dim=1) / want[expanded].flatten(1).norm(dim=1)
    assert errors.max() < 2 * TOLERANCE[dtype], f"relative error {errors.max():.1e} at {int(errors.argmax())}"


def inputs_on_device(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    return inputs.kv_lens_device, inputs.page_table


@pytest.mark.parametrize("cache", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("norm", [None, torch.float32])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [1, 16, 128])
def test_norm_rope_store(heads: int, dtype: torch.dtype, norm: torch.dtype | None, cache: torch.dtype | None) -> None:
    from minisgl.kernel.cuda_ops import CudaOps

    torch.manual_seed(0)
    for tokens in (1, 3, 200):
        q = torch.randn(tokens, heads * (128 + ROPE), device=DEVICE).to(dtype)
        row = torch.randn(tokens, 40 + RANK + ROPE, device=DEVICE).to(dtype)[:, 40:]
        q_rope = q[:, heads * 128 :].view(tokens, heads, ROPE)
        weight = torch.rand(RANK, device=DEVICE).to(norm or dtype) + 0.5
        cos_sin = torch.randn(500, ROPE, device=DEVICE)
        positions, places = torch.randperm(500, device=DEVICE)[:tokens], torch.randperm(512, device=DEVICE)[:tokens]
        results = []
        for ops, wide in ((CudaOps(DEVICE), False), (TorchOps(), True)):
            pool = torch.zeros(32, 16, 1, RANK + ROPE, device=DEVICE).to(cache or (torch.double if wide else dtype))
            query = torch.zeros(tokens, heads, RANK + ROPE, device=DEVICE, dtype=torch.double if wide else dtype)
            given = [each.double() if wide else each for each in (q_rope, row, weight)]
            rows = LatentRows(given[1], Norm(given[2], 1e-6), cos_sin, positions, places, pool)
            ops.norm_rope_store_latent(rows, given[0], query[..., RANK:])
            results.append((pool.double(), query.double()))
        (pool, query), (exact_pool, exact_query) = results
        tolerance = 0.04 if cache else TOLERANCE[dtype]
        assert (pool - exact_pool).norm() < tolerance * exact_pool.norm()
        assert (query - exact_query).norm() < TOLERANCE[dtype] * exact_query.norm()


@pytest.mark.parametrize("norm", [None, torch.float32])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "nope", "value"), [(1, 128, 128), (16, 128, 128), (20, 192, 256)])
def test_absorbed_products(heads: int, nope: int, value: int, dtype: torch.dtype, norm: torch.dtype | None) -> None:
    from minisgl.kernel.cuda_ops import CudaOps

    torch.manual_seed(0)
    weight = (torch.randn(heads, nope + value, RANK, device=DEVICE) * nope**-0.5).to(dtype)
    norm_weight = torch.rand(RANK, device=DEVICE).to(norm or dtype) + 0.5
    cos_sin = torch.randn(500, ROPE, device=DEVICE)
    for tokens in (1, 2, 7, 8, 9, 70):
        q_size = heads * (nope + ROPE)
        projected = torch.randn(tokens, q_size + RANK + ROPE, device=DEVICE).to(dtype)
        latents = torch.randn(tokens, heads, RANK, device=DEVICE).to(dtype)
        positions, places = torch.randperm(500, device=DEVICE)[:tokens], torch.randperm(512, device=DEVICE)[:tokens]
        results = []
        for ops, wide in ((CudaOps(DEVICE), False), (TorchOps(), True)):
            x, up, w, c = (each.double() if wide else each for each in (projected, weight, norm_weight, latents))
            q_nope, q_rope = x[:, : heads * nope].view(tokens, heads, nope), x[:, heads * nope : q_size]
            pool = torch.zeros(32, 16, 1, RANK + ROPE, device=DEVICE, dtype=x.dtype)
            q_rope = q_rope.view(tokens, heads, ROPE)
            rows = LatentRows(x[:, q_size:], Norm(w, 1e-6), cos_sin, positions, places, pool)
            query = ops.latent_query(rows, q_nope, q_rope, up[:, :nope])
            results.append([each.double() for each in (query, pool, ops.latent_values(c, up[:, nope:]))])
        for have, want in zip(*results, strict=True):
            assert (have - want).norm() < TOLERANCE[dtype] * want.norm()


@pytest.mark.parametrize("norm_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("experts", "hidden"), [(64, 2048), (256, 7168), (7, 256), (32, 2880)])
def test_norm_and_router(experts: int, hidden: int, dtype: torch.dtype, norm_dtype: torch.dtype | None) -> None:
    from minisgl.kernel.cuda_ops import CudaOps

    torch.manual_seed(0)
    norm = Norm((torch.rand(hidden, device=DEVICE) + 0.5).to(norm_dtype or dtype), 1e-6)
    weight = torch.randn(experts, hidden, device=DEVICE) * hidden**-0.5
    for tokens in (1, 3, 17, 64, 65):
        x = torch.randn(tokens, hidden, device=DEVICE).to(dtype) * 3
        for bias in (None, torch.randn(experts, device=DEVICE)):
            normed, logits = CudaOps(DEVICE).norm_router(x, norm, weight, bias)
            torch.testing.assert_close(normed, TorchOps().rms_norm(x, norm), rtol=1e-2, atol=1e-3)
            products = normed.double() @ weight.t().double() + (0 if bias is None else bias)
            torch.testing.assert_close(logits.double(), products, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("experts", "hidden"), [(32, 2880), (128, 2048), (256, 1056), (8, 64), (4, 64), (60, 2048)])
def test_norm_and_router_of_the_same_dtype(
    experts: int, hidden: int, dtype: torch.dtype, norm_dtype: torch.dtype | None
) -> None:
    from minisgl.kernel.cuda_ops import CudaOps

    torch.manual_seed(0)
    ops = CudaOps(DEVICE)
    norm = Norm((torch.rand(hidden, device=DEVICE) + 0.5).to(norm_dtype or dtype), 1e-6)
    weight = (torch.randn(experts, hidden, device=DEVICE) * hidden**-0.5).to(dtype)
    for tokens in (1, 16, 17, 64, 100, 128, 256, 300):
        x = torch.randn(tokens, hidden, device=DEVICE).to(dtype) * 3
        for bias in (None, torch.randn(experts, device=DEVICE).to(dtype)):
            normed, logits = ops.norm_router(x, norm, weight, bias)
            torch.testing.assert_close(normed, TorchOps().rms_norm(x, norm), rtol=1e-2, atol=1e-3)
            products = normed.double() @ weight.t().double() + (0 if bias is None else bias.double())
            assert logits.dtype == dtype
            assert (logits.double() - products).norm() < TOLERANCE[dtype] * products.norm()


ROUTINGS = [
    (256, Routing(8, renormalize=True, score="sigmoid", groups=8, top_groups=4, scale=2.5)),
    (384, Routing(8, renormalize=True, score="sigmoid", scale=2.8)),
    (160, Routing(6, renormalize=False, groups=8, top_groups=3, group_scores=1, scale=16.0)),
    (64, Routing(6, renormalize=False, group_scores=1)),
    (7, Routing(7, renormalize=True)),
]


@pytest.mark.parametrize(("experts", "routing"), ROUTINGS)
@pytest.mark.parametrize("biased", [False, True])
def test_choice_of_experts(experts: int, routing: Routing, biased: bool) -> None:
    from minisgl.kernel.experts.cuda_routing import CudaRouting
    from minisgl.kernel.launch.compile import Compiler

    torch.manual_seed(0)
    bias = torch.randn(experts, device=DEVICE) * 0.3 if biased else None
    for tokens in (1, 5, 1000):
        logits = torch.randn(tokens, experts, device=DEVICE) * 2
        weights, chosen = CudaRouting(Compiler(DEVICE))(logits, routing, bias)
        exact, right = route(logits, routing, bias)
        order, right_order = chosen.argsort(-1), right.argsort(-1)
        assert torch.equal(chosen.gather(1, order).long(), right.gather(1, right_order))
        torch.testing.assert_close(weights.gather(1, order), exact.gather(1, right_order), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_experts_that_are_chosen_so(dtype: torch.dtype) -> None:
    from minisgl.kernel.cuda_ops import CudaOps

    torch.manual_seed(0)
    experts, hidden, size = 64, 256, 96
    w13 = (torch.randn(experts, 2 * size, hidden, device=DEVICE) * hidden**-0.5).to(dtype)
    w2 = (torch.randn(experts, hidden, size, device=DEVICE) * size**-0.5).to(dtype)
    biases = ExpertBiases(choice=torch.randn(experts, device=DEVICE) * 0.3)
    routing = Routing(6, renormalize=True, score="sigmoid", groups=8, top_groups=4, scale=2.5)
    mixture = Mixture(w13, w2, experts, routing, biases)
    for tokens in (1, 5, 33, 129, 700):
        x = torch.randn(tokens, hidden, device=DEVICE).to(dtype)
        logits = torch.randn(tokens, experts, device=DEVICE) * 2
        residual = torch.randn(tokens, hidden, device=DEVICE).to(dtype)
        have = CudaOps(DEVICE).moe(x, logits, mixture, residual).double()
        want = TorchOps().moe(x.double(), logits, in_double(mixture), residual.double())
        assert (have - want).norm() < (1e-2 if dtype == torch.bfloat16 else 2e-3) * want.norm(), tokens
