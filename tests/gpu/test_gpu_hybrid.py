"""Hybrids on a GPU: snapshots of states against transformers, token for token; prefills from graphs, bit for bit.

Prefills of Gated DeltaNets from a graph are compared with their launches one after another, each waiting for the end of
the one before it: with the same products, of as many rows, nothing may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor

from exact.conversations import converse
from exact.oracle import Oracle
from minisgl import LLM
from minisgl.core import Batch
from minisgl.engine.cuda_graphs.graphs import PrefillGraphs
from minisgl.engine.engine import Engine
from minisgl.engine.step_inputs import pad_inputs, step_inputs, views_like
from minisgl.layers.delta_net import GatedDeltaNet
from models.tiny import HYBRID
from support.prefill_graphs import capture_all_prefills
from support.tiny_tokenizer import save_byte_tokenizer

pytestmark = pytest.mark.gpu

SLOTS = 24
POSITIONS = 512
SIZES: dict[str, Any] = {
    **HYBRID,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
# Rows of (first position, tokens). Where no row has one token, the kernels for those have nothing to do.
STEPS = {
    "a prompt that fills its graph": [(0, 64)],
    "a short prompt": [(0, 2)],
    "a chunk behind another": [(100, 63)],
    "a chunk of two tiles": [(64, 128)],
    "chunks": [(0, 40), (64, 100), (3, 7)],
    "a decode and a prompt": [(7, 1), (0, 63)],
    "decodes and chunks": [*((20 + row, 1) for row in range(9)), (0, 90), (130, 70)],
    "a chunk of one token": [(77, 1)],
    "padding of one token": [(0, 63)],
    "many tokens": [(0, 450)],
}
Found: TypeAlias = tuple[Tensor, ...]  # states behind the last layer [T, H], and of each store [layers, rows, ...]


@pytest.mark.parametrize("kind", ["qwen3.5", "qwen3-next"])
def test_conversations_go_on_from_snapshots(kind: str, tmp_path: Path) -> None:
    found = converse(Oracle(kind, tmp_path), device="cuda")
    assert found.counts["snapshots_evicted"] >= 4
    assert found.retractions >= 1


@contextmanager
def hybrid_engine(folder: Path, **changes: Any) -> Iterator[Engine]:
    """Load a hybrid of random weights that forgets slowly, its states, keys, values and tokens random too."""
    from transformers import Qwen3_5TextConfig

    fields = {**SIZES, "vocab_size": 5000, "max_position_embeddings": POSITIONS, "dtype": "bfloat16", **changes}
    Qwen3_5TextConfig(**fields, architectures=["Qwen3_5ForCausalLM"]).save_pretrained(folder)
    save_byte_tokenizer(folder, 5000)
    pages = SLOTS * POSITIONS // 64
    with LLM(
        str(folder),
        device="cuda",
        use_dummy_weight=True,
        num_page_override=pages,
        max_running_req=SLOTS,
        state_snapshots=0,
    ) as llm:
        engine = llm._engine
        capture_all_prefills(engine)
        engine._queue.call(lambda: _fill(engine, pages))
        yield engine


def _fill(engine: Engine, pages: int) -> None:
    torch.manual_seed(0)
    runner = engine._runner
    for module in runner.model.modules():
        if isinstance(module, GatedDeltaNet):
            module.a_log.weight.uniform_(-6.0, -2.0)
            module.conv.weight.normal_(std=0.5)
    runner.state.tokens[:SLOTS].random_(0, 5000)
    runner.state.page_table[:SLOTS] = torch.randperm(pages, device=runner.state.device).view(SLOTS, -1).int()
    for states in runner.kv._states:
        states.normal_(std=0.1)


def step_of(rows: list[tuple[int, int]]) -> Batch:
    start_pos, query_lens = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    slots = np.random.default_rng(len(rows)).permutation(SLOTS)[: len(rows)].astype(np.int32)
    none = np.zeros((0, 3), dtype=np.int32)
    return Batch(0, slots, start_pos, query_lens, np.ones(len(rows), dtype=bool), none)


def graphs_of(engine: Engine, batch: Batch) -> PrefillGraphs:
    assert engine._graphs is not None
    graphs = engine._graphs.prefill(batch)
    assert graphs is not None
    return graphs


def replayed(engine: Engine, batch: Batch) -> Tensor:
    """Replay a step's graph and return the states after the last layer [T, H]."""
    graphs = graphs_of(engine, batch)
    graphs.forward(batch)
    return graphs._states[: batch.num_tokens]


def one_after_another(engine: Engine, batch: Batch) -> Tensor:
    """Launch the kernels of the step's graph, each after the end of the one before it."""
    from minisgl.kernel.launch.compile import Compiler

    runner, graphs = engine._runner, graphs_of(engine, batch)
    size = next(size for size in graphs._sizes if size >= batch.num_tokens)
    rows, longest = graphs._captured[size].rows, runner.state.max_seq_len
    host = pad_inputs(step_inputs(batch), size, rows, runner.state.scratch_slot, longest)
    inputs = views_like(torch.from_numpy(np.concatenate(host)).cuda(), host)
    lengths = (np.full(rows + 1, length, dtype=np.int32) for length in (size, longest))
    kernel = Compiler.kernel

    def late(compiler: Compiler, describe: Callable[..., Any], *args: Hashable) -> Callable[..., None]:
        launch = kernel(compiler, describe, *args)
        return lambda *sizes, **arguments: launch(*sizes, **{**arguments, "early": False})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compiler, "kernel", late)
        context = runner.context(inputs, *lengths, logits_indices=None, in_graph=True)
        return runner.model.model(context)[: batch.num_tokens]


def run(engine: Engine, batch: Batch, step: Callable[[Engine, Batch], Tensor], before: list[Tensor]) -> Found:
    """Return what a step leaves; the recurrent states become what they were, `before`."""
    stores = engine._runner.kv._states

    def call() -> Found:
        found = step(engine, batch).clone(), *(states[:, :SLOTS].clone() for states in stores)
        for states, saved in zip(stores, before, strict=True):
            states.copy_(saved)
        return found

    return engine._queue.call(call)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with hybrid_engine(tmp_path_factory.mktemp("hybrid")) as engine:
        yield engine


@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS)
def test_a_prefill_from_a_graph_is_its_launches_one_after_another(engine: Engine, rows: list[tuple[int, int]]) -> None:
    batch = step_of(rows)
    before = engine._queue.call(lambda: [states.clone() for states in engine._runner.kv._states])
    want = run(engine, batch, one_after_another, before)
    assert all(part.isfinite().all() for part in want)
    for _ in range(20):
        for have, wanted in zip(run(engine, batch, replayed, before), want, strict=True):
            assert torch.equal(have, wanted)
