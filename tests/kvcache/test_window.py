"""Windowed pages: how many there are, which stand beside the cache, what is evicted, what of a hit is usable."""

from __future__ import annotations

import random

import numpy as np
import pytest

from minisgl.core import Int32Array
from minisgl.kvcache.base import BrokenInvariant
from minisgl.kvcache.pages import OutOfPages
from minisgl.kvcache.window import ABSENT, WindowGroup, WindowPool, pages_behind, usual_ratio, windowed_pages
from minisgl.scheduler.requests.table import SlotTable
from minisgl.scheduler.requests.window_rows import WindowRows


def ids(*pages: int) -> Int32Array:
    return np.array(pages, dtype=np.int32)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window", [1, 3, 16, 17])
def test_a_query_sees_no_page_before_its_window(window: int, page_size: int) -> None:
    behind = pages_behind(window, page_size)
    distances = [pos // page_size - max(pos - window + 1, 0) // page_size for pos in range(100)]
    assert max(distances) == behind


def test_pools_are_shared_out_by_the_usual_length() -> None:
    assert usual_ratio(1024, 16, context_len=32768) == 65 / 256
    assert usual_ratio(1024, 16, context_len=1024) == 1.0, "no page of the context is ever behind the window"
    assert usual_ratio(128, 16, context_len=131072) == 9 / 256
    assert usual_ratio(128, 16, context_len=1024) == 9 / 32, "4 windows are more than an eighth of the context"
    assert windowed_pages(1000, 65 / 256, 1024, 16, 8192) == 254 + 512
    assert windowed_pages(3, 0.1, 16, 4, 64) == 3, "never more than of the full group"
    assert windowed_pages(100, 0.01, 16, 4, 8) == 6 + 2, "at least what a sequence needs alone"


@pytest.mark.parametrize("seed", range(3))
def test_pages_beside_the_cache_are_evicted_in_the_order_of_their_use(seed: int) -> None:
    """A list in the order of use says what must be left, after any mix of calls."""
    rng, pool = random.Random(seed), WindowPool(WindowGroup(8, num_pages=12), num_full_pages=30)
    order: list[int] = []  # cached pages with a windowed one, the least recently used first
    locks = dict.fromkeys(range(30), 0)
    held: list[int] = []

    def used(cached: list[int]) -> None:
        for page in cached:
            if page in order:
                order.append(order.pop(order.index(page)))

    for _ in range(800):
        match rng.randrange(8):
            case 0:
                count = rng.randrange(6)
                unlocked = [page for page in order if not locks[page]]
                assert pool.available == pool.allocator.num_free + len(unlocked)
                if count > pool.available:
                    with pytest.raises(OutOfPages):
                        pool.allocate(count)
                    continue
                for page in unlocked[: max(count - pool.allocator.num_free, 0)]:
                    order.remove(page)
                held += pool.allocate(count).tolist()
            case 1:  # some of a sequence's pages go beside the cache, where there are none
                cached = rng.sample(range(30), min(3, len(held)))
                given, held = held[: len(cached)], held[len(cached) :]
                left = pool.adopt(ids(*cached), ids(*given, *held[:1]))
                taken = [page for page in cached if page not in order]
                assert len(left) == len(given) - len(taken) + len(held[:1])
                order += taken
                held = left.tolist() + held[1:]
            case 2:
                cached = rng.sample(order, min(2, len(order)))
                pool.lock(ids(*cached))
                for page in cached:
                    locks[page] += 1
            case 3:  # two requests may let go of the same page at once
                cached = rng.sample([page for page in order for _ in range(locks[page])], min(3, sum(locks.values())))
                pool.unlock(ids(*cached))
                for page in cached:
                    locks[page] -= 1
                used(cached)
            case 4:
                cached = [page for page in rng.sample(range(30), 3) if not locks[page]]
                pool.drop(ids(*cached))
                order = [page for page in order if page not in cached]
            case 5:
                pool.free(ids(*held))
                held = []
            case 6:  # a sequence's pages take the place of those beside the cache
                unlocked = [page for page in range(30) if not locks[page]]
                cached = rng.sample(unlocked, min(3, len(held), len(unlocked)))
                assert not pool.is_locked(ids(*cached))
                pool.put(ids(*cached), ids(*held[: len(cached)]))
                held = held[len(cached) :]
                order = [page for page in order if page not in cached] + cached
            case 7:
                cached = rng.sample(range(30), 2)
                assert pool.is_locked(ids(*cached)) == any(locks[page] for page in cached)
                pool.drop_unlocked(ids(*cached))
                order = [page for page in order if page not in cached or locks[page]]
        assert (pool.cached_pages, pool.locked_pages) == (len(order), sum(count > 0 for count in locks.values()))
        present = pool.window_pages(ids(*range(30)))
        assert set(np.flatnonzero(present != ABSENT).tolist()) == set(order)
        pool.check(ids(*range(30)), ids(*held))
    assert pool.evicted > 20
    for page, count in locks.items():
        pool.unlock(ids(*[page] * count))
    pool.free(ids(*held))
    pool.check_idle(ids(*range(30)))
    pool.cleared()
    assert pool.allocator.num_free == pool.num_pages


def test_broken_invariants_raise() -> None:
    pool = WindowPool(WindowGroup(8, num_pages=4), num_full_pages=4)
    pool.adopt(ids(0, 1), pool.allocate(2))
    with pytest.raises(BrokenInvariant, match="absent"):
        pool.lock(ids(2))
    pool.lock(ids(0))
    with pytest.raises(BrokenInvariant, match="that is locked"):
        pool.drop(ids(0))
    with pytest.raises(BrokenInvariant, match="was not locked"):
        pool.unlock(ids(1))


def test_a_prefix_is_usable_as_far_as_the_window_before_its_end_is_there() -> None:
    rng = random.Random(0)
    for _ in range(300):
        page_size, window = rng.choice([1, 4]), rng.randint(1, 14)
        cached = np.arange(rng.randint(0, 12), dtype=np.int32)
        pool = WindowPool(WindowGroup(window, num_pages=12), num_full_pages=12)
        present = [rng.random() < 0.7 for _ in cached]
        pool.adopt(cached, np.where(present, pool.allocate(12)[: len(cached)], ABSENT))
        table = SlotTable(num_slots=1, max_seq_len=48, page_size=page_size)
        rows = WindowRows(pool, table, num_full_pages=12, max_prefill_tokens=4)

        def sees_all(pages: int) -> bool:
            query = pages * page_size  # noqa: B023
            return all(present[at // page_size] for at in range(max(query - window + 1, 0), query))  # noqa: B023

        assert rows.usable(cached) == max(pages for pages in range(len(cached) + 1) if sees_all(pages))
