"""Effects of a windowed group on requests: how many run at once, and which prefixes they find."""

from __future__ import annotations

import random

import pytest

from minisgl.kvcache.window import windowed_pages
from scheduler.simulation import World, random_prompt

WINDOW, PAGE = 8, 4  # a query reaches back two pages


def ask(world: World, seq_id: int, prompt: list[int], max_tokens: int = 2) -> int:
    """Return how many tokens of a prompt were found in the cache, once it is answered."""
    world.add(seq_id, prompt, max_tokens=max_tokens, ignore_eos=True)
    while world.loop.has_work:
        world.step()
    return world.cached[seq_id]


def others(world: World, seq_ids: range) -> None:
    """Use up all windowed pages of the cache, and not all others."""
    for seq_id in seq_ids:
        assert ask(world, seq_id, [seq_id % 50, *range(47)]) == 0
    assert world.scheduler.counts()["window_pages_evicted"] > 0
    assert world.scheduler.counts()["pages_evicted"] == 0


def test_a_prefix_that_lost_its_window_is_of_use_again_when_it_was_computed_again() -> None:
    world = World(page_size=PAGE, num_pages=400, window=WINDOW, num_window_pages=12, chunk=16)
    shared = list(range(49, 9, -1))
    assert ask(world, 1, [*shared, 1, 2, 3]) == 0
    assert ask(world, 2, [*shared, 4, 5, 6]) == 40
    others(world, range(10, 14))
    assert ask(world, 3, [*shared, 7, 8, 9]) == 0, "its pages are found, and those of the window are not"
    assert ask(world, 4, [*shared, 10, 11]) == 40, "those of the third were put beside the first one's"
    world.scheduler.check_idle()


@pytest.mark.parametrize(("page_size", "num_window_pages"), [(1, 30), (PAGE, 12)])
def test_a_conversation_continues_from_its_last_whole_page(page_size: int, num_window_pages: int) -> None:
    """The window before the end is kept, though the host learns of the end after it launched a further step."""
    world = World(page_size=page_size, num_pages=400, window=WINDOW, num_window_pages=num_window_pages, chunk=16)
    known, cached = list(range(30)), 0
    for seq_id in range(9):
        assert ask(world, seq_id, known, max_tokens=3) == cached
        known += world.answers[seq_id]
        cached = (len(known) - 1) // page_size * page_size  # the last token was sampled, not computed
        known += [seq_id] * 4
    assert world.scheduler.counts()["window_pages_given_back"] > 60 // page_size


@pytest.mark.parametrize("overlap", [True, False])
def test_requests_run_at_once_as_their_windows_fit(overlap: bool) -> None:
    """A long prompt holds three windowed pages, and a chunk takes four: of 16, so three beside one another."""
    world = World(
        page_size=PAGE, num_pages=400, window=WINDOW, num_window_pages=16, chunk=16, cache="naive", overlap=overlap
    )
    for seq_id in range(6):
        world.add(seq_id, [seq_id] * 60, max_tokens=20, ignore_eos=True)
    running = 0
    while world.loop.has_work:
        world.step()
        counts = world.scheduler.counts()
        running = max(running, counts["requests_running"])
        assert counts["window_pages"] - counts["window_pages_free"] <= 3 * counts["requests_running"]
    assert running == 3
    assert world.scheduler.retractions == 0
    assert world.scheduler.counts()["window_pages_given_back"] > 6 * 15


def test_short_prompts_that_outgrow_the_windowed_pages_are_retracted() -> None:
    world = World(page_size=1, num_pages=400, window=12, num_window_pages=40, chunk=8)
    for seq_id in range(6):
        world.add(seq_id, [seq_id, 1], max_tokens=40, ignore_eos=True)
    while world.loop.has_work:
        world.step()
    assert world.scheduler.retractions > 0
    assert world.scheduler.counts()["pages_evicted"] == 0, "there were enough full pages"
    assert all(len(answer) == 40 for answer in world.answers.values())
    world.scheduler.check_idle()


@pytest.mark.parametrize("seed", range(24))
def test_the_smallest_pools_hold_what_prompts_were_promised(seed: int) -> None:
    """Many prompts are prefilled a chunk at a time; one page too few would end the server with OutOfPages."""
    rng = random.Random(seed)
    page_size, window, chunk = rng.choice([1, 4, 8]), rng.randint(2, 12), rng.choice([3, 16])
    world = World(
        page_size=page_size,
        num_pages=100,
        chunk=chunk,
        window=window,
        num_window_pages=windowed_pages(100, 0.0, window, page_size, chunk) + rng.choice([0, 1]),
        batch_policy="mixed",
        overlap=rng.random() < 0.5,
    )
    for seq_id in range(16):
        prompt = random_prompt(rng, families=3, longest=40)
        world.add(seq_id, prompt, max_tokens=rng.randint(1, 20), ignore_eos=True)
        world.step()
    world.run()
    assert set(world.ends.values()) == {"length"}
