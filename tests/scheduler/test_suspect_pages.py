"""A device that computes NaN now and then: requests that get it fail, and no cached page passes it on."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from scheduler.simulation import Asked, World, expected_answer, random_traffic

WORLDS: list[dict[str, object]] = [
    {"page_size": 1, "num_pages": 1200},
    {"page_size": 1, "num_pages": 400, "overlap": False},
    {"page_size": 1, "num_pages": 120, "cache": "naive"},
    {"page_size": 4, "num_pages": 26, "chunk": 7, "batch_policy": "mixed", "num_slots": 16},
    {"page_size": 4, "num_pages": 400, "num_slots": 3, "chunk": 1, "schedule_policy": "lpm"},
    {"page_size": 4, "num_pages": 300, "chunk": 30, "num_slots": 16, "snapshots": 40},
    {"page_size": 2, "num_pages": 300, "chunk": 7, "window": 9, "num_window_pages": 150, "batch_policy": "mixed"},
]


class Faults:
    """Says of each row of a step at random that it computes NaN, until it is switched off."""

    def __init__(self, share: float) -> None:
        self._rng, self.share = random.Random(6), share

    def __call__(self, _: int) -> bool:
        return self._rng.random() < self.share


def step_with_nan(world: World, seq_id: int, bad_slots: set[int]) -> None:
    """Run a step in which the device computes NaN for this request; the device does so for all of `bad_slots`."""
    request = world.scheduler._requests.find(seq_id)
    assert request is not None
    bad_slots.add(request.slot)
    world.step()
    bad_slots.clear()


@pytest.mark.parametrize("options", WORLDS, ids=str)
def test_nan_does_not_outlast_the_fault(options: dict[str, object], request: pytest.FixtureRequest) -> None:
    """Afterwards every prompt is answered: at once, or at the second try where nobody had noticed what was cached.

    That is so after an abort, or after a stop token that was found a step late.
    """
    count: int = request.config.getoption("--simulated-requests") // 4
    faults, rng = Faults(0.01), random.Random(5)
    world = World(**options, computes_nan=faults)  # type: ignore[arg-type]
    requests: dict[int, Asked] = {}
    for seq_id in random_traffic(world, rng, count, requests):
        world.check_answer(seq_id, *requests[seq_id])
    world.scheduler.check_idle()
    failed = list(world.ends.values()).count("error")
    assert count / 50 < failed < count

    faults.share = 0.0
    again = 0
    for prompt, asked in requests.values():
        for _ in range(2):
            seq_id = len(world.ends)
            world.add(seq_id, prompt, max_tokens=asked.max_tokens, ignore_eos=asked.ignore_eos)
            world.run()
            if world.ends[seq_id] != "error":
                break
            again += 1
        assert world.ends[seq_id] != "error"
        assert world.answers[seq_id] == expected_answer(np.array(prompt), asked)
    assert again < failed / 10


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("chunk", [7, 1000])
def test_equal_prompts_under_load_recover(chunk: int, overlap: bool) -> None:
    """Two equal prompts come in every step, so the pages of the first are always in use by another."""
    rows = itertools.count()
    world = World(
        page_size=4,
        num_pages=400,
        num_slots=16,
        chunk=chunk,
        overlap=overlap,
        computes_nan=lambda _: next(rows) == 0,
    )
    prompt = list(range(30))
    entered = 0  # requests that entered before the first failure was known
    for seq_id in range(0, 200, 2):
        for choice in range(2):
            world.add(seq_id + choice, prompt, max_tokens=3, ignore_eos=True)
        is_known = "error" in world.ends.values()
        world.step()  # plans, then reads the tokens of a step
        if not is_known:
            entered = len(world.entered)
    world.run()
    failed = [seq_id for seq_id, reason in world.ends.items() if reason == "error"]
    assert failed[0] == world.entered[0]
    assert set(failed) <= set(world.entered[:entered])
    assert world.cached[world.entered[-1]] == 28, "the prefix is cached again"


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"snapshots": 20}, {"window": 9}], ids=str)
def test_a_failed_request_leaves_what_others_had_cached(options: dict[str, object]) -> None:
    faults = Faults(0.0)
    world = World(page_size=4, num_pages=400, chunk=8, computes_nan=faults, **options)  # type: ignore[arg-type]
    good = list(range(16))
    world.add(0, [*good, 49], max_tokens=2, ignore_eos=True)
    world.run()
    cached = world.scheduler.counts()["pages_cached"]
    for seq_id in (1, 2):
        faults.share = 1.0
        world.add(seq_id, [*good, *range(20, 40)], max_tokens=9, ignore_eos=True)
        world.run()
        assert world.scheduler.counts()["pages_cached"] == cached
        assert world.cached[seq_id] == len(good)
    faults.share = 0.0
    world.add(3, [*good, *range(20, 40)], max_tokens=9, ignore_eos=True)
    world.run()
    assert world.cached[3] == len(good)
    assert [world.ends[seq_id] for seq_id in range(4)] == ["length", "error", "error", "length"]


@pytest.mark.parametrize("options", [{"snapshots": 20}, {"window": 5, "num_window_pages": 12}], ids=str)
def test_nan_that_a_request_adds_to_proven_pages_goes_with_the_next_failure(options: dict[str, object]) -> None:
    """Sequence 2 computes NaN and is aborted before it has a token.

    By then its state is saved after pages of sequence 0, or these have its windowed pages.
    """
    bad_slots: set[int] = set()
    world = World(page_size=4, num_pages=400, chunk=8, overlap=False, computes_nan=bad_slots.__contains__, **options)  # type: ignore[arg-type]
    good = list(range(16))
    world.add(0, [*good, *range(20, 36)], max_tokens=2, ignore_eos=True)
    world.run()
    world.add(1, [49] * 60, max_tokens=2, ignore_eos=True)  # evicts the windowed pages of `good`
    world.run()
    world.add(2, [*good, *range(36, 49)], max_tokens=2, ignore_eos=True)
    world.step()
    step_with_nan(world, 2, bad_slots)
    world.step()  # saves the state after `good`
    world.scheduler.end(2, "abort")
    for seq_id in (3, 4, 5):
        world.add(seq_id, [*good, 49], max_tokens=1, ignore_eos=True)
        world.run()
    assert [world.ends[seq_id] for seq_id in range(6)] == ["length", "length", "abort", "error", "length", "length"]
    assert [world.cached[seq_id] for seq_id in range(2, 6)] == [0, 16, 0, 16]


def test_nan_in_windowed_pages_of_a_prompt_under_way_goes_with_the_first_failure() -> None:
    """Sequence 2 gives its windowed pages to cached pages of sequence 0 long before its own logits tell of NaN."""
    bad_slots: set[int] = set()
    world = World(
        page_size=4,
        num_pages=400,
        chunk=8,
        batch_policy="mixed",
        overlap=False,
        window=17,
        num_window_pages=16,
        computes_nan=bad_slots.__contains__,
    )
    good = list(range(16))
    world.add(0, [*good, *range(20, 36)], max_tokens=2, ignore_eos=True)
    world.run()
    world.add(1, [49] * 80, max_tokens=2, ignore_eos=True)  # evicts the windowed pages of `good`
    world.run()
    world.add(2, [*good, *range(20, 50), *range(40)], max_tokens=2, ignore_eos=True)
    world.step()
    step_with_nan(world, 2, bad_slots)
    for seq_id in (3, 4):
        world.add(seq_id, [*good, 49 - seq_id], max_tokens=1, ignore_eos=True)
        while seq_id not in world.ends:
            world.step()
    assert 2 not in world.ends
    assert (world.ends[3], world.ends[4]) == ("error", "length")
    assert [world.cached[seq_id] for seq_id in (2, 3, 4)] == [0, 16, 0]
    world.run()
    assert world.ends[2] == "error"


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("options", [{"snapshots": 20}, {"window": 17, "num_window_pages": 12}], ids=str)
def test_what_a_request_adds_to_cached_pages_is_trusted_once_another_has_begun_there(
    options: dict[str, object], is_read: bool
) -> None:
    """Then a request that begins there and fails does not take it from the cache."""
    faults = Faults(0.0)
    world = World(page_size=4, num_pages=400, chunk=8, overlap=False, computes_nan=faults, **options)  # type: ignore[arg-type]
    good = list(range(16))
    prompts = [[*good, *range(20, 36)], [49] * 60, [*good, *range(36, 49)], [*good, 49], [*good, 48], [*good, 47]]
    for seq_id, prompt in enumerate(prompts):
        if seq_id == 3 and not is_read:
            continue  # sequence 2 has added to pages of sequence 0
        faults.share = float(seq_id == 4)
        world.add(seq_id, prompt, max_tokens=2, ignore_eos=True)
        world.run()
    assert [world.cached[seq_id] for seq_id in (2, 4, 5)] == [0, 16, 16 if is_read else 0]
    assert (world.ends[4], world.ends[5]) == ("error", "length")


@pytest.mark.parametrize("token", ["none", "in the same step", "before"])
def test_pages_of_a_failed_request_stay_as_long_as_others_read_them(token: str) -> None:
    """Sequence 0 fails in its answer, while sequence 1 reads its prompt's pages, and has a token from them or not."""
    bad_slots: set[int] = set()
    world = World(
        page_size=4, num_pages=400, chunk=32, batch_policy="mixed", overlap=False, computes_nan=bad_slots.__contains__
    )
    prompt, has_token = list(range(16)), token != "none"
    world.add(0, prompt, max_tokens=40, ignore_eos=True)
    world.step()
    world.add(1, [*prompt, *range(20, 30 if has_token else 99)], max_tokens=40 if has_token else 1, ignore_eos=True)
    if token != "in the same step":
        world.step()
        assert len(world.answers[1]) == has_token
    step_with_nan(world, 0, bad_slots)
    assert world.cached[1] == 16
    assert len(world.answers[1]) == {"none": 0, "in the same step": 1, "before": 2}[token]
    assert world.ends[0] == "error"
    world.add(2, [*prompt, 49], max_tokens=1, ignore_eos=True)
    world.run()
    assert (world.ends[1], world.ends[2]) == ("length", "length")
    assert world.cached[2] == (16 if has_token else 0)
    world.add(3, [*prompt, 49], max_tokens=1, ignore_eos=True)
    world.run()
    assert world.cached[3] == 16
