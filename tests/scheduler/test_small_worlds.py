"""Many small worlds with settings drawn at random, whose pools are as tight as an engine may make them.

No request is aborted, so that one that is forgotten is noticed.
"""

from __future__ import annotations

import random

import pytest

from minisgl.core import pages_for
from minisgl.kvcache.window import windowed_pages
from minisgl.sampling_params import SamplingParams
from scheduler.simulation import ALWAYS_IN_TURNS, Asked, World, random_prompt

LONGEST = 60  # tokens of a prompt with its answer
MOST_STEPS = 3000  # many times those that these requests take


def random_world(rng: random.Random, kind: str) -> World:
    page_size, chunk = rng.choice([1, 4, 8]), rng.choice([3, 16])
    options: dict[str, object] = {
        "num_pages": pages_for(LONGEST, page_size) + rng.choice([0, 1, 5]),
        "num_slots": rng.choice([2, 8]),
        "cache": rng.choice(["radix", "radix", "naive"]),
        "batch_policy": rng.choice(["mixed", "prefill-first"]),
        "cost": rng.choice([None, ALWAYS_IN_TURNS]),
    }
    match kind:
        case "windows":
            window = rng.randint(2, 12)
            least = windowed_pages(100, 0.0, window, page_size, chunk)
            options |= {"num_pages": 100, "window": window, "num_window_pages": least + rng.choice([0, 1])}
            options["cache"] = "radix"
        case "states":
            options["cache"] = "radix"
            options |= {"snapshots": rng.randint(1, 6), "snapshot_distance": rng.choice([1, 4, 9])}
    return World(
        page_size=page_size,
        chunk=chunk,
        max_seq_len=LONGEST,
        overlap=rng.random() < 0.7,
        schedule_policy=rng.choice(["fcfs", "lpm", "sjf"]),
        **options,  # type: ignore[arg-type]
    )


def random_request(rng: random.Random) -> Asked:
    params: dict[str, object] = {"max_tokens": rng.randint(1, 20), "ignore_eos": rng.random() < 0.8}
    match rng.randrange(8):
        case 0:
            params["logprobs"] = rng.randint(0, 2)
        case 1:
            params["prompt_logprobs"] = rng.randint(0, 2)
        case 2:
            params |= {"prompt_logprobs": 1, "max_tokens": 0}
    return random_prompt(rng, families=3, longest=40), SamplingParams(**params)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["full pages", "windows", "states"])
# In the last three worlds of states a snapshot is due after a prefix that may not be shared as far.
@pytest.mark.parametrize("seed", [*range(20), 123, 185, 202])
def test_every_request_gets_its_answer(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    world = random_world(rng, kind)
    requests = [random_request(rng) for _ in range(16)]
    for seq_id, (prompt, params) in enumerate(requests):
        asked = {name: getattr(params, name) for name in ("max_tokens", "ignore_eos", "logprobs", "prompt_logprobs")}
        world.add(seq_id, prompt, priority=rng.choice([0, 0, 1]), salt=rng.choice([b"", b"", b"s" * 16]), **asked)
        world.step()
    for _ in range(MOST_STEPS):
        if world.loop.has_work:
            world.step()
    world.scheduler.check_idle()
    for seq_id, (prompt, params) in enumerate(requests):
        world.check_logprobs(seq_id, prompt, params)
        assert world.check_answer(seq_id, prompt, params)
