"""Every page, slot, lock, promise and snapshot has exactly one owner after each step, in random small worlds."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from minisgl.core import pages_for
from minisgl.kvcache.radix import RadixCache
from minisgl.kvcache.window import pages_behind
from minisgl.sampling_params import Grammar, SamplingParams
from minisgl.scheduler.requests.request import RequestState
from scheduler.simulation import ALWAYS_IN_TURNS, Asked, SimulatedMatcher, World, check_windows, random_prompt

MOST_IDLE = 3  # steps in a row that launch nothing and end nothing, while steps in flight are completed


def random_world(rng: random.Random) -> World:
    """Return a world that just holds its longest request, or not much more."""
    page_size, longest = rng.choice([1, 1, 2, 4, 16, 256]), rng.randint(2, 80)
    chunk, fewest = rng.choice([1, 2, 7, 30, 1000]), pages_for(longest, page_size)
    num_pages = rng.choice([fewest, fewest + 1, 2 * fewest - 1, 2 * fewest, 5 * fewest])
    options: dict[str, object] = {
        "page_size": page_size,
        "max_seq_len": longest,
        "chunk": chunk,
        "num_pages": num_pages,
        "num_slots": rng.choice([1, 2, 5, 16]),
        "batch_policy": rng.choice(["mixed", "prefill-first"]),
        "schedule_policy": rng.choice(["sjf", "fcfs", "lpm"]),
        "cost": rng.choice([None, ALWAYS_IN_TURNS]),
        "overlap": rng.random() < 0.6,
    }
    failures, share = random.Random(rng.random()), rng.choice([0, 0, 0, 0.05])
    options |= {"fails": lambda _: failures.random() < share, "fails_at_launch": rng.random() < 0.5}
    kind = rng.choice(["radix", "naive", "snapshots", "window"])
    if kind == "naive":
        options["cache"] = "naive"
    if kind == "snapshots":
        options |= {"snapshots": rng.choice([1, 3, 20]), "snapshot_distance": rng.choice([1, 4, 16])}
    if kind == "window":
        window = rng.choice([1, 3, 9, 40])
        least = pages_behind(window, page_size) + 2 + pages_for(chunk, page_size)
        options |= {"window": window, "num_window_pages": min(least + rng.choice([0, 1, 5, 100]), num_pages)}
    return World(**options)  # type: ignore[arg-type]


def random_request(rng: random.Random, longest: int) -> tuple[list[int], dict[str, object]]:
    prompt = random_prompt(rng, families=3, longest=longest - 1)
    params: dict[str, object] = {"max_tokens": rng.randint(1, longest - len(prompt)), "ignore_eos": rng.random() < 0.5}
    match rng.randrange(6):
        case 0:
            params |= {"prompt_logprobs": 1, "max_tokens": rng.choice([0, params["max_tokens"]])}
        case 1:
            params["grammar"] = Grammar("regex", str(rng.randint(1, 40)))
    return prompt, params


def check_accounts(world: World) -> None:
    scheduler, table = world.scheduler, world.scheduler._table
    pages, requests = scheduler._pages, scheduler._requests
    cache, allocator = pages._pool.cache, pages._pool.allocator
    allocator.check()
    cache.check()
    check_windows(pages)

    rows = {slot: request for slot, request in enumerate(table.requests) if request is not None}
    assert sorted([*rows, *table._free]) == list(range(world.num_slots))
    assert sorted([*requests.running, *requests._retiring]) == sorted(rows)
    for request in requests._by_seq_id.values():
        assert (rows.get(request.slot) is request) == (request.state is RequestState.RUNNING)
        assert (request in list(requests.waiting)) == (request.state is not RequestState.RUNNING)
    assert len(requests._by_seq_id) == len(requests.waiting) + len(requests.running)

    cached = set(cache.owned_pages().tolist())
    owned = [*allocator.free_pages().tolist(), *cached]
    locks: Counter[object] = Counter()
    for slot, request in rows.items():
        row = table.row_pages(slot).tolist()
        assert request.prefix is not None
        assert cached & set(row) <= set(request.prefix.pages.tolist()) <= cached, "a row reads what is not locked"
        owned += set(row) - cached
        node = request.prefix.node
        while node is not None:
            locks[node] += 1
            node = node.parent
        assert len(row) == pages_for(int(table.cached_len[slot]), world.page_size)
        assert table.cached_len[slot] <= table.device_len[slot] <= table.max_len[slot]
    assert sorted(owned) == list(range(world.num_pages))
    if isinstance(cache, RadixCache):
        assert all(node.locks == locks[node] for node in cache._nodes())
    assert pages._reserved == sum(request.reserved_pages for request in rows.values()) <= pages._pool.available
    if scheduler._snapshots is not None:
        scheduler._snapshots.store.check()
        assert set(scheduler._snapshots.store.pages()) <= cached
    if pages._windows is not None:
        windows = pages._windows
        lent = [windows._cached[slot, windows._start[slot] : windows._lent[slot]] for slot in rows]
        held = np.bincount(np.concatenate([*lent, np.empty(0, np.int32)]), minlength=world.num_pages)
        assert held.tolist() == windows.pool._locks.tolist()


@pytest.mark.parametrize("seed", range(80))
def test_accounts_balance_after_each_step(seed: int) -> None:
    """And some step is always launched or some request ends, whatever comes, is aborted, fails or is retracted."""
    rng = random.Random(seed)
    world, requests = random_world(rng), dict[int, Asked]()
    depth, aborts, flushes = rng.choice([2, 10, 40]), rng.choice([0, 0.05, 0.3]), rng.choice([0, 0.05])
    idle = 0
    while len(requests) < 30 or world.loop.has_work:
        open_sequences = sorted(requests.keys() - world.ends.keys())
        while len(requests) < 30 and len(open_sequences) < depth and rng.random() < 0.7:
            seq_id, priority = len(requests), rng.choice([0, 0, 1])
            prompt, params = random_request(rng, world.max_seq_len)
            requests[seq_id] = prompt, SamplingParams(**params)  # type: ignore[arg-type]
            world.add(seq_id, prompt, priority=priority, salt=rng.choice([b"", b"", b"a"]), **params)
            open_sequences.append(seq_id)
        if open_sequences and rng.random() < aborts:
            for seq_id in rng.sample(open_sequences, rng.choice([1, 1, len(open_sequences)])):
                world.scheduler.end(seq_id, "abort")
        if rng.random() < flushes:
            world.scheduler.flush_cache()
        before = world.scheduler._next_step, len(world.ends)
        world.step()
        check_accounts(world)
        moved = before != (world.scheduler._next_step, len(world.ends)) or not world.loop.has_work
        idle = 0 if moved or is_compiling(world) else idle + 1
        assert idle <= MOST_IDLE
    world.scheduler.check_idle()
    assert world.ends.keys() == requests.keys()
    for seq_id, asked in requests.items():
        world.check_answer(seq_id, *asked)


def test_a_promise_covers_no_page_of_another_request() -> None:
    """A scored prompt without an answer is promised a page for its last token, whose K and V it never computes.

    A decode needs the only page besides the promised ones when the prompt has one token left.
    """
    world = World(page_size=1, num_pages=13, max_seq_len=13, num_slots=2, chunk=2, batch_policy="mixed")
    world.add(0, [1, 2], max_tokens=11, ignore_eos=True)
    world.step()
    world.step()
    world.add(1, [3] * 6, max_tokens=0, prompt_logprobs=0)
    while world.loop.has_work:
        world.step()
        check_accounts(world)
    assert world.ends == {0: "length", 1: "length"}


def is_compiling(world: World) -> bool:
    """Return True if a grammar is being compiled, without being counted as a poll."""
    matchers = [request.matcher for request in world.scheduler._requests.waiting]
    return any(isinstance(matcher, SimulatedMatcher) and matcher.polls >= 0 for matcher in matchers)
