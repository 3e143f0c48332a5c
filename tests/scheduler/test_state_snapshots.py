"""Snapshots of a hybrid's states, and requests that go on from them, on a simulated device that knows every state."""

from __future__ import annotations

import random

import numpy as np
import pytest

from minisgl.core import Batch
from minisgl.sampling_params import SamplingParams
from scheduler.simulation import World, expected_answer

ANSWER = {"max_tokens": 2, "ignore_eos": True}


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50) for _ in range(count)]


def make_world(**options: object) -> World:
    """Pages of 4 tokens; snapshots are 8 tokens apart."""
    settings = {"num_pages": 200, "max_seq_len": 200, "chunk": 1000, "snapshots": 10, "snapshot_distance": 8}
    return World(**settings | options)  # type: ignore[arg-type]


def ask(world: World, *prompts: list[int], **params: object) -> list[int]:
    """Run prompts at the same time; return how many tokens each found in the cache, and check the answers."""
    first = len(world.answers)
    for row, prompt in enumerate(prompts):
        world.add(first + row, prompt, **ANSWER | params)
    world.run()
    for row, prompt in enumerate(prompts):
        expected = expected_answer(np.array(prompt), SamplingParams(**ANSWER | params))  # type: ignore[arg-type]
        assert world.answers[first + row] == expected
    return [world.cached[first + row] for row in range(len(prompts))]


def told(world: World, *names: str) -> list[int]:
    counts = world.scheduler.counts()
    return [counts[name] for name in names]


def test_a_prompt_continues_from_the_last_page_end_it_shares() -> None:
    world, prompt = make_world(), tokens(0, 30)
    assert ask(world, prompt) == [0]
    assert ask(world, prompt) == [28]
    assert ask(world, prompt + tokens(1, 20)) == [28]
    assert ask(world, prompt[:29]) == [28]
    assert ask(world, prompt[:28]) == [0], "no snapshot lies within the 27 reusable tokens"
    assert told(world, "snapshots", "snapshot_hits", "snapshots_evicted") == [3, 3, 0]
    assert world.device.computed == 30 + 2 + 22 + 1 + 28 + 5 * 1


def test_the_second_prompt_saves_a_snapshot_where_the_third_parts() -> None:
    world, shared = make_world(), tokens(0, 30)
    assert ask(world, shared + tokens(1, 28)) == [0]
    assert ask(world, shared + tokens(2, 28)) == [0], "K and V of 28 tokens are there, and no state"
    assert ask(world, shared + tokens(3, 28)) == [28]
    assert ask(world, shared + tokens(2, 28)) == [56], "the second's own pages went into the tree behind the first's"


def test_one_of_many_that_come_together_saves_what_the_others_wait_for() -> None:
    world, shared = make_world(), tokens(0, 50)
    prompts = [shared + tokens(seed, 12) for seed in range(1, 7)]
    assert ask(world, *prompts) == [0, *[48] * 5]
    assert world.device.computed == 62 + 5 * (62 - 48) + 6


def test_no_request_waits_for_a_prefix_without_a_snapshot() -> None:
    """The first has computed the shared tokens when the second comes: nothing can be saved of them any more."""
    world, shared = make_world(chunk=30, batch_policy="mixed", overlap=False), tokens(0, 24)
    world.add(0, shared + tokens(1, 100), **ANSWER)
    world.step()
    world.add(1, shared + tokens(2, 4), **ANSWER)
    world.run()
    assert world.cached[1] == 0
    assert list(world.ends) == [1, 0]


def test_long_prompts_have_snapshots_on_the_way() -> None:
    """One in 8 distances: a prompt that parts late finds the last before."""
    world, prompt = make_world(num_pages=400, max_seq_len=400), tokens(0, 300)
    ask(world, prompt)
    assert told(world, "snapshots") == [5]  # at 64, 128, 192 and 256, and at its end
    assert ask(world, prompt[:290] + tokens(1, 20)) == [256]


@pytest.mark.parametrize("distance", [200, 2**31, 10**12])
def test_no_prompt_is_long_enough_for_a_larger_distance(distance: int) -> None:
    """Such a number is no position of the table, whose integers have 32 bits."""
    world, prompt = make_world(snapshot_distance=distance), tokens(0, 150)
    assert ask(world, prompt, prompt[:100]) == [0, 0]
    assert told(world, "snapshots") == [0]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_conversation_continues_from_its_last_answer(overlap: bool) -> None:
    world, conversation = make_world(overlap=overlap), tokens(0, 20)
    assert ask(world, conversation, max_tokens=30) == [0]
    conversation += world.answers[0] + tokens(1, 5)
    assert ask(world, conversation, max_tokens=30) == [48], "the last multiple of 8 of its 50 tokens"
    assert told(world, "snapshots") == [3], "the first prompt's, and of each answer the last"


def test_answers_leave_the_entries_to_prompts_where_there_are_few() -> None:
    world = make_world(snapshots=3)
    prompts = [tokens(seed, 20) for seed in range(3)]
    ask(world, *prompts, max_tokens=40)
    assert told(world, "snapshots", "snapshots_saved", "snapshots_evicted") == [3, 3, 0]
    assert ask(world, *prompts) == [16] * 3


def test_the_least_recently_used_snapshot_gives_way_and_its_pages_stay() -> None:
    world, prompts = make_world(snapshots=2), [tokens(seed, 30) for seed in range(3)]
    for prompt in [prompts[0], prompts[1], prompts[0], prompts[2]]:
        ask(world, prompt)
    assert told(world, "snapshots", "snapshot_hits", "snapshots_evicted") == [2, 1, 1]
    pages = world.scheduler.counts()["pages_cached"]
    assert ask(world, prompts[1]) == [0]
    assert ask(world, prompts[1]) == [28], "saved again behind the same page"
    assert world.scheduler.counts()["pages_cached"] == pages


def test_a_snapshot_is_evicted_with_its_pages() -> None:
    world, prompt = make_world(num_pages=20, max_seq_len=80), tokens(0, 30)
    ask(world, prompt)
    ask(world, tokens(1, 60), tokens(2, 60))
    assert told(world, "snapshots_evicted")[0] >= 1
    assert ask(world, prompt) == [0]
    world.scheduler.flush_cache()
    assert told(world, "snapshots", "pages_cached") == [0, 0]


def test_a_retracted_request_continues_from_its_own_snapshot() -> None:
    world = make_world(page_size=1, num_pages=110, max_seq_len=110)
    lengths = [47, 90]  # the first ends soon after it has driven the other out, at 55 tokens each
    for seq_id, length in enumerate(lengths):
        world.add(seq_id, tokens(seq_id, 10), max_tokens=length, ignore_eos=True)
    world.run()
    assert (world.scheduler.retractions, told(world, "snapshot_hits")) == (1, [1])
    assert world.device.computed <= sum(9 + length for length in lengths) + 8
    for seq_id, length in enumerate(lengths):
        expected = expected_answer(np.array(tokens(seq_id, 10)), SamplingParams(max_tokens=length, ignore_eos=True))
        assert world.answers[seq_id] == expected


def test_prompts_of_one_salt_do_not_find_snapshots_of_another() -> None:
    world, prompt = make_world(), tokens(0, 30)
    for seq_id, salt in enumerate([b"a", b"b"]):
        world.add(seq_id, prompt, salt=salt, **ANSWER)
    world.step()
    assert world.entered == [0, 1], "nor do they wait for them"
    world.run()
    world.add(2, prompt, salt=b"a", **ANSWER)
    world.run()
    assert world.cached == {0: 0, 1: 0, 2: 28}


def test_pages_of_a_prefix_computed_twice_do_not_take_what_others_were_promised() -> None:
    world, shared = make_world(num_pages=20, chunk=26), tokens(0, 26)
    ask(world, shared + tokens(1, 12))
    ask(world, shared + tokens(2, 2), tokens(3, 40))  # the tree has 6 pages of the first, and the second has no others
    assert world.scheduler.retractions == 0
    assert told(world, "snapshots_saved") == [3], "the second prompt's snapshot belongs to the tree's page"


def test_pages_of_a_prefix_computed_twice_leave_a_request_room_to_its_end() -> None:
    world, shared = make_world(num_pages=20, max_seq_len=80), tokens(0, 38)
    ask(world, shared + tokens(1, 12))
    assert ask(world, shared + tokens(2, 2), max_tokens=40) == [0]
    assert world.scheduler.retractions == 0


def test_a_failed_step_forgets_no_pages_of_others() -> None:
    """The second prompt finds its beginning in the tree, from one which decodes and is not in the failed step."""
    failing: list[bool] = []

    def fails(batch: Batch) -> bool:
        return bool(failing) and int(batch.query_lens.max()) > 1 and failing.pop()

    world, shared = make_world(fails=fails), tokens(0, 24)
    world.add(0, shared + tokens(1, 20), max_tokens=30, ignore_eos=True)
    for _ in range(4):
        world.step()
    failing.append(True)
    assert ask(world, shared + tokens(2, 10))
    assert (world.scheduler.failed_steps, len(world.answers[0])) == (1, 30)
    assert ask(world, shared + tokens(3, 10)) == [24]
