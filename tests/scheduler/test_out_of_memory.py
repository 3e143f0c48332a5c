"""Steps for which the device has too little memory, at random and on purpose: still every request is answered."""

from __future__ import annotations

import random

import numpy as np
import pytest

from minisgl.core import Batch, DeviceOutOfMemory
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.loop import StepLoop
from minisgl.scheduler.steps.limits import SMALL_STEP, STEPS_TO_RECOVER, StepLimits
from scheduler.simulation import ALWAYS_IN_TURNS, Asked, World, expected_answer, random_traffic

WORLDS: list[dict[str, object]] = [
    {"page_size": 1, "num_pages": 120},
    {"page_size": 1, "num_pages": 120, "cache": "naive"},
    {"page_size": 4, "num_pages": 26, "chunk": 7, "batch_policy": "mixed", "num_slots": 16},
    {"page_size": 4, "num_pages": 400, "num_slots": 3, "schedule_policy": "lpm"},
    {"page_size": 16, "num_pages": 12, "chunk": 1000, "batch_policy": "mixed"},
    {"page_size": 1, "num_pages": 120, "chunk": 1000, "snapshots": 3},
    {"page_size": 2, "num_pages": 60, "chunk": 7, "window": 9, "num_window_pages": 24},
    {"page_size": 4, "num_pages": 26, "chunk": 50, "batch_policy": "mixed", "num_slots": 16, "cost": ALWAYS_IN_TURNS},
]


@pytest.mark.parametrize("where", ["at launch", "in the thread", "without overlap"])
@pytest.mark.parametrize("options", WORLDS, ids=str)
def test_random_failures_change_no_answer(
    options: dict[str, object], where: str, request: pytest.FixtureRequest
) -> None:
    """One step in 25 fails, among arrivals and aborts: each request ends once, with the answer it would get alone.

    The simulated device asserts that no step reads a page that was not written, and the pages balance in the end.
    """
    count: int = request.config.getoption("--simulated-requests") // 4
    failures, rng = random.Random(3), random.Random(4)
    world = World(
        **options,  # type: ignore[arg-type]
        fails=lambda _: failures.random() < 0.04,
        fails_at_launch=where == "at launch",
        overlap=where != "without overlap",
    )

    def logprobs() -> dict[str, object]:
        if rng.random() >= 0.2:
            return {}
        return {"prompt_logprobs" if rng.random() < 0.5 else "logprobs": 2}

    requests: dict[int, Asked] = {}
    errors = 0
    for seq_id in random_traffic(world, rng, count, requests, logprobs):
        if world.ends[seq_id] == "error":
            errors += 1
        else:
            world.check_logprobs(seq_id, *requests[seq_id])
        world.check_answer(seq_id, *requests[seq_id])
    world.scheduler.check_idle()
    assert world.ends.keys() == requests.keys()
    assert world.device.failures >= world.scheduler.failed_steps > count / 10
    assert errors <= count / 20  # who is alone in two steps that fail by chance


def test_a_step_too_large_is_retried_in_parts_and_its_oldest_come_back_first() -> None:
    """Prefills of more than 100 tokens and decodes of more than 3 rows fail, always."""
    world = World(
        chunk=1000,
        num_pages=400,
        max_seq_len=200,
        fails=lambda batch: batch.num_tokens > 100 or (batch.is_decode and len(batch.slots) > 3),
        fails_at_launch=True,
    )
    params = {"max_tokens": 12, "ignore_eos": True}
    prompts = [[seq_id] * 90 for seq_id in range(8)]
    for seq_id, prompt in enumerate(prompts):
        world.add(seq_id, prompt, **params)
    world.run()
    assert world.scheduler.failed_steps >= 5  # 720 tokens, 360, 180; 8 rows, or 4
    for seq_id, prompt in enumerate(prompts):
        assert world.ends[seq_id] == "length"
        assert world.answers[seq_id] == expected_answer(np.array(prompt), SamplingParams(**params))  # type: ignore[arg-type]
    assert list(world.ends) == list(range(8))


@pytest.mark.parametrize("at_launch", [True, False])
def test_a_request_that_fails_alone_ends_with_an_error_and_the_others_go_on(at_launch: bool) -> None:
    """Any step with slot 0 and more than 40 tokens of context fails."""
    world = World(
        num_slots=1,
        fails=lambda batch: bool((batch.start_pos + batch.query_lens > 40).any()),
        fails_at_launch=at_launch,
    )
    for seq_id, length in enumerate([10, 50, 20, 50]):
        world.add(seq_id, [seq_id + 1] * length, max_tokens=10, ignore_eos=True)
    world.run()
    assert world.ends == {0: "length", 1: "error", 2: "length", 3: "error"}
    assert world.loop.counts.begun == world.loop.counts.finished, "or the rank would seem to hang in the failed step"
    assert world.answers[1] == []
    assert [len(world.answers[seq_id]) for seq_id in (0, 2)] == [10, 10]


def test_a_prompt_whose_last_chunk_failed_is_not_found_in_the_cache() -> None:
    """The prompt is cached at its launch; with overlap, an equal prompt enters before the failure is known."""
    steps: list[Batch] = []

    def second_prefill_fails(batch: Batch) -> bool:
        steps.append(batch)
        return len(steps) == 2

    world = World(page_size=4, chunk=16, fails=second_prefill_fails)
    prompt = list(range(30))
    for seq_id in (0, 1):
        world.add(seq_id, prompt, max_tokens=4, ignore_eos=True)
    world.run()
    assert steps[2].new_rows, "the second request was in flight when the failure showed"
    assert steps[2].new_rows[0].pages.tolist()[4:], "its prefix was cached, though its K and V were never written"
    expected = expected_answer(np.array(prompt), SamplingParams(max_tokens=4, ignore_eos=True))
    assert world.answers == {0: expected, 1: expected}


def test_with_other_ranks_a_failed_step_ends_the_loop() -> None:
    """The other ranks may wait in a collective forever, so nothing may be launched after the failure."""
    world = World(fails=lambda _: True)
    world.add(0, [1, 2, 3], max_tokens=4)
    loop = StepLoop(world.scheduler, world.device, overlap=True, retries=False)
    loop.step()
    with pytest.raises(DeviceOutOfMemory):
        loop.step()
    launched = world.device.failures
    with pytest.raises(DeviceOutOfMemory):
        loop.step()
    assert world.device.failures == launched


def test_bounds_fall_by_half_and_rise_again_more_slowly_after_each_relapse() -> None:
    def batch(*lengths: int) -> Batch:
        rows = np.arange(len(lengths), dtype=np.int32)
        return Batch(0, rows, rows, np.array(lengths, np.int32), rows >= 0, np.zeros((0, 3), np.int32))

    limits = StepLimits(1000, 64)
    limits.lower(batch(600, 1, 200))
    assert (limits.prefill_tokens, limits.running) == (400, 64)
    limits.lower(batch(*[1] * 40))
    assert (limits.prefill_tokens, limits.running) == (400, 20)
    for _ in range(STEPS_TO_RECOVER):
        assert limits.prefill_tokens == 400
        limits.completed()
    limits.completed()
    assert (limits.prefill_tokens, limits.running) == (800, 40), "the next rise takes as many steps again"
    limits.lower(batch(800))
    for _ in range(2 * STEPS_TO_RECOVER):
        assert limits.prefill_tokens == 400
        limits.completed()
    for _ in range(4 * STEPS_TO_RECOVER):
        limits.completed()
    assert (limits.prefill_tokens, limits.running) == (1000, 64)
    limits.lower(batch(SMALL_STEP + 1))
    assert (limits.prefill_tokens, limits.running) == (SMALL_STEP, 64)
    limits.lower(batch(SMALL_STEP // 2, SMALL_STEP // 2, 1, 1))  # tokens that the bound allows
    assert (limits.prefill_tokens, limits.running) == (SMALL_STEP, 2)
