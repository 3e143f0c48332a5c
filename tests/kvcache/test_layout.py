"""Bytes of pages and slots in a layout, and the tensors that a pool makes of it."""

from __future__ import annotations

import os

import pytest
import torch

from minisgl.config import ConfigError, EngineConfig
from minisgl.engine.memory import MemoryBudget, describe_states, pool_pages, slots_that_fit, snapshots_that_fit
from minisgl.kvcache.kv_pool import KVPool
from minisgl.kvcache.layout import KVLayout, Store, paged_kv

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
CPU = torch.device("cpu")


def test_a_page_holds_the_tokens_of_all_layers() -> None:
    wide, narrow = paged_kv(8, 128, BF16), paged_kv(2, 256, FP8)
    assert KVLayout(16, (wide,)).pool_bytes(1) == 16 * 2 * 8 * 128 * 2
    assert KVLayout(16, (wide, narrow, narrow)).pool_bytes(1) == 16 * (2 * 8 * 128 * 2 + 2 * 2 * 2 * 256)
    assert KVLayout(16, (narrow,) * 3, paged_kv(2, 256, BF16)).pool_bytes(1) == 16 * 2 * 2 * 256 * (3 + 2)
    latent = (Store((576,), BF16),)  # one tensor a layer, as latent attention has it
    assert KVLayout(64, (latent,) * 2).pool_bytes(1) == 64 * 576 * 2 * 2


def test_stores_by_slot_are_subtracted_before_pages_are_counted() -> None:
    """A hybrid: three layers with a float32 state to one with K and V."""
    state = Store((32, 128, 128), torch.float32, per="slot")
    layout = KVLayout(16, ((state,), (state,), (state,), paged_kv(2, 256, BF16)))
    assert layout.pool_bytes(1) == 16 * 2 * 2 * 256 * 2, "states take nothing of a page"
    assert layout.state_bytes(num_slots=7) == 3 * 8 * (2 << 20), "the scratch slot has a state too"
    device = 3 * 8 * (2 << 20) + 100 * layout.pool_bytes(1) + 5
    budget = MemoryBudget(device - layout.state_bytes(7), total=device, free=device)
    config = EngineConfig(model_path="")
    assert pool_pages(config, pool_bytes=layout.pool_bytes, useful_pages=1000, budget=budget) == 100
    pool = KVPool(layout, 10, CPU, num_slots=7)
    assert [tuple(tensor.shape) for tensor in pool.states(1)] == [(8, 32, 128, 128)]
    assert sum(pool.states(layer)[0].nbytes for layer in range(3)) == layout.state_bytes(7)
    assert pool.states(0)[0].data_ptr() != pool.states(1)[0].data_ptr()
    assert tuple(pool.keys(3).shape) == (11, 16, 2, 256)


def test_states_limit_the_running_requests() -> None:
    layout = KVLayout(16, ((Store((1 << 20,), torch.float32, per="slot"),), paged_kv(2, 256, BF16)))
    assert slots_that_fit(256, layout, budget=4096 << 20) == 256
    assert slots_that_fit(256, layout, budget=1024 << 20) == 127, "half of it in states of 4 MiB, one of them scratch"
    assert slots_that_fit(256, layout, budget=1 << 20) == 1
    described = describe_states(layout, 127, 256, 9)
    assert "keep 4.0 MiB of each running request, so 127 requests run at a time and not 256; up to 9" in described


def test_snapshots_take_a_share_of_what_the_states_leave() -> None:
    layout = KVLayout(16, ((Store((1 << 20,), torch.float32, per="slot"),), paged_kv(2, 256, BF16)))
    budget = 100 * layout.slot_bytes + 5
    assert snapshots_that_fit(None, 19, layout, budget) == 20, "a quarter of 80"
    assert snapshots_that_fit(None, 3, layout, budget) == 12, "no more than 4 for each running request"
    assert snapshots_that_fit(None, 200, layout, budget) == 0
    assert [snapshots_that_fit(wanted, 19, layout, budget) for wanted in (0, 80)] == [0, 80]
    with pytest.raises(ConfigError, match=r"^--state-snapshots 81 would take 0\.32 GiB of 0\.31 GiB"):
        snapshots_that_fit(81, 19, layout, budget)


def test_states_are_copied_in_order_and_in_all_layers() -> None:
    inputs, memory = Store((3, 8), BF16, per="slot"), Store((2, 4, 4), torch.float32, per="slot")
    layout = KVLayout(4, ((inputs, memory), paged_kv(1, 8, BF16), (inputs, memory)))
    pool = KVPool(layout, 5, CPU, num_slots=2, num_snapshots=3)
    assert sum(state.nbytes for layer in (0, 2) for state in pool.states(layer)) == layout.state_bytes(2, 3)
    for number, state in enumerate((*pool.states(0), *pool.states(2))):
        state.copy_((torch.arange(6) + 10 * number).view(-1, *[1] * (state.ndim - 1)))
    pool.keys(1).fill_(1)
    pool.keys(1)[1] = 2
    keys = pool.keys(1).clone()
    pool.copy_states([(1, 3), (0, 1), (3, 0), (5, 4)])
    assert torch.equal(pool.keys(1), keys), "pages are no states"
    for number, state in enumerate((*pool.states(0), *pool.states(2))):
        rows = state.float().flatten(1)
        assert (rows == rows[:, :1]).all()
        assert (rows[:, 0] - 10 * number).tolist() == [1, 0, 2, 1, 5, 5]


def test_layers_of_one_pool_may_differ() -> None:
    layout = KVLayout(4, (paged_kv(2, 16, BF16), paged_kv(1, 32, torch.float32), paged_kv(2, 16, BF16)))
    pool = KVPool(layout, 10, CPU)
    tensors = [half(layer) for layer in range(3) for half in (pool.keys, pool.values)]
    assert [tuple(tensor.shape) for tensor in tensors[::2]] == [(11, 4, 2, 16), (11, 4, 1, 32), (11, 4, 2, 16)]
    assert sum(tensor.nbytes for tensor in tensors) == 11 * layout.pool_bytes(1)
    for number, tensor in enumerate(tensors):
        assert not tensor.any()
        tensor.fill_(number + 1)
    assert [int(tensor.max()) for tensor in tensors] == [1, 2, 3, 4, 5, 6], "no two share memory"
    assert all(tensor.is_contiguous() for tensor in tensors)


@pytest.mark.parametrize("windowed", [(), (0,), (0, 1)])
def test_a_pool_takes_the_bytes_counted_for_its_pages(windowed: tuple[int, ...]) -> None:
    layers, upcast = (paged_kv(2, 16, FP8),) * 2, paged_kv(2, 16, BF16)
    layout = KVLayout(4, layers, upcast, frozenset(windowed), window=8 if windowed else None)
    pool = KVPool(layout, 10, CPU, num_window_pages=3)
    assert [len(pool.keys(layer)) for layer in range(2)] == [4 if layer in windowed else 11 for layer in range(2)]
    assert pool.upcast_buffer is not None
    tensors = [half(layer) for layer in range(2) for half in (pool.keys, pool.values)]
    scratch = layout.pool_bytes(1, 1)  # a page of each group
    assert sum(tensor.nbytes for tensor in (*tensors, *pool.upcast_buffer)) == layout.pool_bytes(10, 3) + scratch
    assert {len(half) for half in pool.upcast_buffer} == {4 if len(windowed) == 2 else 11}, "as many as one layer has"


def test_on_the_cpu_pages_take_no_memory_until_they_are_used() -> None:
    layout = KVLayout(16, (paged_kv(8, 128, BF16),) * 4)
    before = resident_bytes()
    pool = KVPool(layout, 1024, CPU)
    assert resident_bytes() - before < layout.pool_bytes(1024) // 4
    pool.keys(0).fill_(1)
    assert resident_bytes() - before > pool.keys(0).nbytes // 2, "the figure shows what is used"


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
