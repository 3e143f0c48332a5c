"""The attention backends on a GPU: eager and captured, against the torch backend in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl.attention.backend_choice import CANDIDATES, make_backend
from minisgl.attention.backends.torch_backend import TorchAttention
from minisgl.attention.base import AttentionBackend, AttentionInputs, AttentionSpec
from minisgl.attention.model_attention import LayerAttention, ModelAttention
from minisgl.attention.self_test import ROLES, Role, self_test_error
from minisgl.core import Int32Array
from minisgl.kvcache.kv_pool import KVPool
from minisgl.kvcache.layout import KVLayout

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
HEADS = [(8, 8), (16, 8), (32, 8), (40, 8), (16, 2)]
BF16, F16 = torch.bfloat16, torch.float16
PAGE_SIZES = [1, 16, 64]
LONGEST = 1500
TOLERANCE = 6e-3  # relative to the norm of the result: bf16 has 8 bits


class World:
    """A pool of random keys and values, rows whose pages are anywhere in it, and the answers in float32."""

    def __init__(
        self,
        heads: tuple[int, int],
        page_size: int,
        rows: int,
        *,
        window: int | None = None,
        head_dim: int = 128,
        dtype: torch.dtype = BF16,
    ) -> None:
        self.spec = AttentionSpec(heads[0], heads[1], head_dim, page_size, dtype, window)
        self.generator = torch.Generator(DEVICE).manual_seed(rows * 1000 + page_size)
        self.random = np.random.default_rng(rows * 1000 + page_size)
        width = -(-LONGEST // page_size)
        pages = 2 * max(rows * width // 4, width)
        self.pool = KVPool(KVLayout(page_size, (self.spec.kv_stores(),) * 2), pages, DEVICE)
        self.exact = KVPool(KVLayout(page_size, (self.spec.kv_stores(torch.float32),) * 2), pages, DEVICE)
        for half in (self.pool.keys, self.pool.values):
            half(1).normal_(generator=self.generator)
        self.exact.keys(1).copy_(self.pool.keys(1))
        self.exact.values(1).copy_(self.pool.values(1))
        # Pages may be shared between rows; entries after a row's length are never read.
        self.table = torch.randint(0, pages, (rows, width), dtype=torch.int32, device=DEVICE, generator=self.generator)

    def inputs(self, query_lens: Int32Array, kv_lens: Int32Array) -> AttentionInputs:
        rows = len(query_lens)
        width = -(-int(kv_lens.max()) // self.spec.page_size)
        return AttentionInputs(
            query_lens=query_lens,
            kv_lens=kv_lens,
            query_starts=torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32, device=DEVICE),
            kv_lens_device=torch.from_numpy(kv_lens).to(DEVICE),
            page_table=self.table[:rows, :width].contiguous(),
        )

    def queries(self, tokens: int) -> Tensor:
        shape = (tokens, self.spec.num_heads, self.spec.head_dim)
        return torch.randn(shape, device=DEVICE, generator=self.generator).to(self.spec.dtype)

    def check(self, have: Tensor, q: Tensor, inputs: AttentionInputs) -> None:
        want = TorchAttention(self.spec).plan(inputs).forward(1, q.float(), self.exact)
        assert have.shape == want.shape
        worst = ((have.float() - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)).max()
        assert worst < TOLERANCE, f"relative error {worst:.1e}"


def make(name: str, spec: AttentionSpec) -> AttentionBackend:
    """Make the backend; skip what cannot run here or would first be compiled for a minute."""
    candidate, capability = CANDIDATES[name], torch.cuda.get_device_capability(DEVICE)
    why = candidate.unsupported(spec, capability)
    if why:
        pytest.skip(why)
    if not all(candidate.ready(spec, capability, role) for role in ROLES):
        pytest.skip(f"{name}: kernels for this shape are not compiled")
    return make_backend(name, spec, DEVICE)


def attention(name: str, spec: AttentionSpec) -> ModelAttention:
    """Return a layer without the window and one with it; a name with a comma is that of prefills and of decodes."""
    prefill, _, decode = name.partition(",")
    layers = {}
    for each in (replace(spec, window=None), spec):
        backend = make(prefill, each)
        layers[each] = LayerAttention(name, each, backend, make(decode, each) if decode else backend)
    return ModelAttention([layers[replace(spec, window=None)], layers[spec]])


BACKENDS = ["fa", "fi", "fa,fi", "varlen", "torch"]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 100])
def test_steps(name: str, heads: tuple[int, int], page_size: int, window: int | None) -> None:
    check_steps(World(heads, page_size, rows=40, window=window), name)


@pytest.mark.parametrize("name", ["fa", "varlen"])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_three_query_heads_a_kv_head_of_64_dimensions(
    name: str, page_size: int, window: int | None, dtype: torch.dtype
) -> None:
    """SmolLM2's attention."""
    check_steps(World((9, 3), page_size, 40, window=window, head_dim=64, dtype=dtype), name)


@pytest.mark.parametrize("heads", [(16, 2), (8, 1)])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_prompts_of_heads_of_512_dimensions(heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Gemma 4's full attention, which no package has."""
    check_steps(World(heads, 64, 40, head_dim=512, dtype=dtype), "torch")


@pytest.mark.parametrize("name", ["varlen", "torch"])
def test_a_long_prefix_costs_no_scores(name: str) -> None:
    """A chunk after 30,000 cached tokens takes a small part of the 2 bytes per score."""
    page_size, cached, queries = 64, 30_000, 2_048
    spec = AttentionSpec(32, 8, 128, page_size, BF16)
    pages = -(-(cached + queries) // page_size)
    pool = KVPool(KVLayout(page_size, (spec.kv_stores(),)), pages, DEVICE)
    inputs = AttentionInputs(
        query_lens=np.array([queries], dtype=np.int32),
        kv_lens=np.array([cached + queries], dtype=np.int32),
        query_starts=torch.tensor([0, queries], dtype=torch.int32, device=DEVICE),
        kv_lens_device=torch.tensor([cached + queries], dtype=torch.int32, device=DEVICE),
        page_table=torch.randperm(pages, device=DEVICE).int().unsqueeze(0),
    )
    backend = make_backend(name, spec, DEVICE)
    q = torch.randn(queries, 32, 128, device=DEVICE, dtype=BF16)
    backend.plan(inputs).forward(0, q, pool)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    backend.plan(inputs).forward(0, q, pool)
    torch.cuda.synchronize()
    scores = 2 * 32 * queries * (cached + queries)
    assert torch.cuda.max_memory_allocated() - before < scores // 3


@pytest.mark.parametrize(
    ("heads", "head_dim", "query_lens", "kv_lens"),
    [
        ((16, 8), 256, [117, 277], [1450, 319]),
        ((16, 4), 256, [100, 192], [1400, 395]),
        ((32, 8), 128, [8, 200], [1406, 223]),
        ((32, 8), 64, [131, 90], [303, 1152]),
    ],
)
def test_parts_of_unlike_rows_stay_in_their_memory(
    heads: tuple[int, int], head_dim: int, query_lens: list[int], kv_lens: list[int]
) -> None:
    """FlashAttention 3 writes nothing beyond what it allocated for the parts of rows whose keys are divided."""
    world = World(heads, 64, rows=2, head_dim=head_dim)
    inputs = world.inputs(np.array(query_lens, dtype=np.int32), np.array(kv_lens, dtype=np.int32))
    q = world.queries(sum(query_lens))
    plan = make("fa", world.spec).plan(inputs)
    size, untouched = 1 << 24, 0x5A5A5A5A  # int32s from whose beginning everything large is allocated
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        arena = torch.full((size,), untouched, dtype=torch.int32, device=DEVICE)
        address = arena.data_ptr()
        del arena
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = plan.forward(1, q, world.pool)
        allocated = torch.cuda.max_memory_allocated() - before
        result = out.cpu()
        del out
        arena = torch.empty(size, dtype=torch.int32, device=DEVICE)
    assert arena.data_ptr() == address
    written = 4 * int((arena != untouched).nonzero().max() + 1)
    assert written <= allocated
    world.check(result.to(DEVICE), q, inputs)


@pytest.mark.parametrize("name", ["fa", "fi", "varlen"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_self_test_passes_what_works(name: str, role: Role) -> None:
    specs = AttentionSpec(16, 8, 128, 64, BF16), AttentionSpec(16, 8, 128, 1, BF16, window=100)
    for spec in specs if name != "varlen" else (*specs, AttentionSpec(9, 3, 64, 16, F16, fp8_kv=True)):
        assert self_test_error(partial(make, name), spec, DEVICE, role) is None


def check_steps(world: World, name: str) -> None:
    layers = attention(name, world.spec)
    rng = world.random
    for rows, longest_query in [(1, 1), (40, 1), (1, 700), (5, 300), (40, 30), (40, 200), (33, 2)]:
        query_lens = rng.integers(1, longest_query + 1, rows).astype(np.int32)
        kv_lens = (query_lens + rng.integers(0, LONGEST - longest_query, rows)).astype(np.int32)
        kv_lens[::3] = query_lens[::3]  # nothing cached
        inputs = world.inputs(query_lens, kv_lens)
        q = world.queries(int(query_lens.sum()))
        plans = layers.plan(inputs)
        plans[0].forward(0, q, world.pool)
        world.check(plans[1].forward(1, q, world.pool), q, inputs)


@contextmanager
def side_stream() -> Iterator[None]:
    """Run on a separate stream, as the engine does, because no graph can be captured on the default stream."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
        torch.cuda.current_stream().synchronize()


class Graph:
    """A captured decode, as the engine captures it: lengths and pages come from the device alone."""

    def __init__(self, world: World, layers: ModelAttention, rows: int) -> None:
        self.rows = rows
        self.lengths = torch.ones(rows, dtype=torch.int32, device=DEVICE)
        self.q = world.queries(rows)
        self.attention = layers.capture_decode(rows)
        inputs = AttentionInputs(
            query_lens=np.ones(rows, dtype=np.int32),
            kv_lens=np.full(rows, LONGEST, dtype=np.int32),
            query_starts=torch.arange(rows + 1, dtype=torch.int32, device=DEVICE),
            kv_lens_device=self.lengths,
            page_table=world.table[:rows],
        )

        def run() -> Tensor:
            self.plans = self.attention.plan(inputs)
            self.plans[0].forward(0, self.q, world.pool)
            return self.plans[1].forward(1, self.q, world.pool)

        run()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
            self.out = run()

    def replay(self, q: Tensor, lengths: Int32Array) -> Tensor:
        """Replay as many rows as there are lengths; the others are padding."""
        padded = np.ones(self.rows, dtype=np.int32)
        padded[: len(lengths)] = lengths
        self.q[: len(q)] = q
        self.lengths.copy_(torch.from_numpy(padded).pin_memory(), non_blocking=True)
        self.attention.prepare(lengths - 1)
        self.graph.replay()
        return self.out[: len(lengths)]


@pytest.mark.parametrize("name", ["fa", "fi", "fa,fi"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("heads", [(16, 8), (40, 8), (16, 2)])
@pytest.mark.parametrize("window", [None, 100])
def test_replays_with_other_lengths(name: str, heads: tuple[int, int], page_size: int, window: int | None) -> None:
    world = World(heads, page_size, rows=300, window=window)
    layers = attention(name, world.spec)
    rng = world.random
    with side_stream():
        graphs = [Graph(world, layers, rows) for rows in (300, 24, 1)]
        for graph in graphs:
            rows = graph.rows
            lengths = rng.integers(1, LONGEST // 2, rows).astype(np.int32)
            for step in range(12):
                live = lengths[: max(1, rows - step % 3)]
                q = world.queries(len(live))
                have = graph.replay(q, live).clone()
                world.check(have, q, world.inputs(np.ones_like(live), live))
                # Most rows grow by one token; some are replaced by other rows.
                lengths = np.minimum(lengths + 1, LONGEST).astype(np.int32)
                changed = rng.random(rows) < 0.1
                lengths[changed] = rng.integers(1, LONGEST + 1, int(changed.sum()))


def test_plans_are_redone_only_when_rows_gain_or_lose_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World((16, 8), 64, rows=4)
    layers = attention("fi", world.spec)
    import minisgl.attention.backends.fi as fi

    plans = 0
    original: Callable[..., None] = fi.fast_decode_plan

    def counted(*args: object, **options: object) -> None:
        nonlocal plans
        plans += 1
        original(*args, **options)

    monkeypatch.setattr(fi, "fast_decode_plan", counted)
    with side_stream():
        graph = Graph(world, layers, 4)
        plans = 0
        for length in range(600, 600 + 256):
            graph.replay(graph.q, np.full(4, length, dtype=np.int32))
    assert 1 <= plans <= 6


def test_two_plans_in_flight_do_not_mix() -> None:
    """The host runs ahead: a plan written for the next replay must not reach the one before it."""
    world = World((16, 8), 16, rows=8)
    layers = attention("fi", world.spec)
    rng = world.random
    with side_stream():
        graph = Graph(world, layers, 8)
        steps = [rng.integers(1, LONGEST + 1, 8).astype(np.int32) for _ in range(20)]
        q = world.queries(8)
        busy = torch.randn(4096, 4096, device=DEVICE)
        outs = []
        for lengths in steps:
            busy = busy @ busy
            busy /= busy.norm()
            outs.append(graph.replay(q, lengths).clone())
        for lengths, out in zip(steps, outs, strict=True):
            world.check(out, q, world.inputs(np.ones(8, dtype=np.int32), lengths))
