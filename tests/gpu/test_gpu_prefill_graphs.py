"""Steps that prefill, replayed from graphs, against the same steps launched operation by operation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl import LLM
from minisgl.core import Batch
from minisgl.engine.cuda_graphs.graphs import PrefillGraphs
from minisgl.engine.engine import Engine
from support.prefill_graphs import capture_all_prefills
from support.small_models import save_qwen3

pytestmark = pytest.mark.gpu

VOCAB = 5000
SLOTS = 40
TOLERANCE = 0.02  # relative to the norm: padding changes the kernels of products, and bf16 has 8 bits

# Rows of (first position, tokens, samples).
DECODES = [(37 * index % 1500, 1, True) for index in range(33)]
STEPS = {
    **{f"one prompt of {tokens}": [(0, tokens, True)] for tokens in (2, 63, 64, 65, 200, 256, 257, 1999)},
    "all the room": [(0, 1000, True), (0, 1048, True)],
    "a chunk that ends nothing": [(128, 100, False)],
    "a chunk of one token": [(77, 1, False)],
    "behind cached pages": [(64, 64, True), (640, 3, True), (5, 120, True)],
    "decodes and a chunk": [*DECODES, (512, 95, False)],
    "decodes and prompts": [*DECODES[:9], (0, 30, True), (64, 89, True), (1000, 300, False)],
    "every slot": [(index, 1 + index % 7, index % 3 > 0) for index in range(SLOTS)],
}


@pytest.fixture(scope="module", params=["fa", "auto"])
def engine(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Make an engine with random weights, keys, values and tokens, and pages of each slot all over the pool."""
    path = save_qwen3(tmp_path_factory.mktemp("qwen3"), weights=False, vocab_size=VOCAB, max_position_embeddings=2048)
    pages = SLOTS * 2048 // 16
    with LLM(
        str(path),
        device="cuda",
        use_dummy_weight=True,
        page_size=16,
        num_page_override=pages,
        max_running_req=SLOTS,
        attention_backend=request.param,
    ) as llm:
        engine = llm._engine
        capture_all_prefills(engine)
        state, pool = engine._runner.state, pool_of(engine)

        def fill() -> None:
            torch.manual_seed(0)
            pool[:, :pages].normal_()
            state.tokens[:SLOTS].random_(0, VOCAB)
            state.page_table[:SLOTS] = torch.randperm(pages, device=state.device).view(SLOTS, -1).int()
            state.lengths[:SLOTS] = 1

        engine._queue.call(fill)
        yield engine


def pool_of(engine: Engine) -> Tensor:
    """Return all layers' keys and values [2 * layers, pages, page_size, kv_heads, head_dim], the last page scratch."""
    one = engine._runner.kv.keys(0)
    storage = one.untyped_storage()  # all are alike, so they are one allocation
    stores = storage.nbytes() // one.nbytes
    assert stores == 2 * len(engine._runner.kv._layers)
    return torch.empty(0, dtype=one.dtype, device=one.device).set_(storage, 0, (stores, *one.shape))


def plan(rows: list[tuple[int, int, bool]]) -> Batch:
    start_pos, query_lens, needs_sample = (np.array(column) for column in zip(*rows, strict=True))
    slots = np.random.default_rng(len(rows)).permutation(SLOTS)[: len(rows)]
    return Batch(
        step=0,
        slots=slots.astype(np.int32),
        start_pos=start_pos.astype(np.int32),
        query_lens=query_lens.astype(np.int32),
        needs_sample=needs_sample,
        new_pages=np.zeros((0, 3), dtype=np.int32),
    )


def graphs_of(engine: Engine, batch: Batch) -> PrefillGraphs:
    assert engine._graphs is not None
    graphs = engine._graphs.prefill(batch)
    assert graphs is not None
    return graphs


def assert_close(have: Tensor, want: Tensor) -> None:
    assert have.shape == want.shape
    assert have.isfinite().all()
    if have.numel():
        assert float((have.float() - want.float()).norm() / want.float().norm()) < TOLERANCE


@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS)
def test_a_replay_is_the_eager_step(engine: Engine, rows: list[tuple[int, int, bool]]) -> None:
    batch, pool = plan(rows), pool_of(engine)
    pages = pool.shape[1] - 1
    before = engine._queue.call(pool.clone)  # on the engine's stream, as all that writes the pool
    eager = engine._queue.call(lambda: engine._runner.forward(batch))
    want = engine._queue.call(pool.clone)
    engine._queue.call(lambda: pool.copy_(before))
    graphed = engine._queue.call(lambda: graphs_of(engine, batch).forward(batch))
    have = engine._queue.call(pool.clone)
    engine._queue.call(lambda: pool.copy_(before))
    assert_close(graphed.logits, eager.logits)
    assert torch.equal(graphed.slots, eager.slots)
    assert have.isfinite().all()
    have, want, before = have[:, :pages], want[:, :pages], before[:, :pages]
    written = (want != before).any(dim=-1)  # a whole vector never stays the same
    assert int(written.sum()) == written.shape[0] * batch.num_tokens * written.shape[3]
    assert torch.equal(have[~written], before[~written])
    assert_close(have[written], want[written])


def test_steps_in_flight_do_not_mix(engine: Engine) -> None:
    """The host runs ahead: what it sends for the next replay must not reach the one before it."""
    batches = [plan(rows) for rows in STEPS.values()] * 3
    pool = pool_of(engine)
    before = engine._queue.call(pool.clone)

    def one(batch: Batch) -> Tensor:
        pool.copy_(before)
        return graphs_of(engine, batch).forward(batch).logits.clone()

    want = [engine._queue.call(lambda batch=batch: one(batch)) for batch in batches]
    engine._queue.launch(lambda: torch.cuda._sleep(100_000_000))  # the device is late
    have = [engine._queue.launch(lambda batch=batch: one(batch)) for batch in batches]
    engine._queue.call(lambda: pool.copy_(before))
    for ours, theirs in zip(have, want, strict=True):
        assert torch.equal(ours(), theirs)
