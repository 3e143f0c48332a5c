"""Constrained requests in the scheduler: grammars decide what is sampled, without changing anything else."""

from __future__ import annotations

import random

import numpy as np
import pytest

from minisgl.sampling_params import Grammar, SamplingParams
from scheduler.simulation import ALWAYS_IN_TURNS, SimulatedMatcher, World, expected_answer, random_prompt


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("batch_policy", ["prefill-first", "mixed", "mixed, in turns"])
def test_random_traffic_of_constrained_and_free_requests(overlap: bool, batch_policy: str) -> None:
    """Retractions, aborts, chunked prompts, late tokens: each request gets what it would get alone."""
    retractions = 0
    for seed in range(12):
        rng = random.Random(seed)
        policy, *in_turns = batch_policy.split(", ")
        cost = ALWAYS_IN_TURNS if in_turns else None
        world = World(num_pages=24, num_slots=5, chunk=8, overlap=overlap, batch_policy=policy, cost=cost)
        requests: dict[int, tuple[list[int], SamplingParams]] = {}
        waiting, aborted = list(range(16)), set()
        while waiting or world.loop.has_work:
            if waiting and rng.random() < 0.3:
                seq_id = waiting.pop(0)
                grammar = Grammar("regex", str(rng.randint(1, 40))) if rng.random() < 0.6 else None
                params = {
                    "max_tokens": rng.randint(1, 40),
                    "ignore_eos": grammar is None and rng.random() < 0.5,
                    "grammar": grammar,
                }
                requests[seq_id] = random_prompt(rng, 3, 30), SamplingParams(**params)  # type: ignore[arg-type]
                world.add(seq_id, requests[seq_id][0], **params)
            if rng.random() < 0.03 and requests:
                seq_id = rng.choice(sorted(requests))
                if seq_id not in world.ends:
                    world.scheduler.end(seq_id, "abort")
                    aborted.add(seq_id)
            world.step()
        world.scheduler.check_idle()
        for seq_id, (prompt, params_) in requests.items():
            answer, expected = world.answers[seq_id], expected_answer(np.array(prompt), params_)
            if seq_id in aborted and world.ends[seq_id] == "abort":
                assert answer == expected[: len(answer)]
            else:
                assert answer == expected
                assert params_.max_tokens is not None
                assert (world.ends[seq_id] == "stop") or len(answer) == params_.max_tokens
        retractions += world.scheduler.retractions
    assert retractions > 0


def test_compiling_grammars_delay_no_other_request() -> None:
    """However many requests wait for theirs before one that does not."""
    world = World(num_pages=400, num_slots=4)
    for seq_id in range(200):
        world.add(seq_id, [1, 2, 3], max_tokens=2, ignore_eos=True, grammar=Grammar("regex", "5"))
        matcher = world.scheduler._requests._by_seq_id[seq_id].matcher
        assert isinstance(matcher, SimulatedMatcher)
        matcher.polls = 10**9
    world.add(200, [1, 2, 4], max_tokens=5, ignore_eos=True)
    for _ in range(20):
        world.step()
    assert world.ends == {200: "length"}


def test_a_complete_grammar_ends_its_request_with_its_last_token() -> None:
    world = World()
    grammar = Grammar("regex", "5")
    world.add(0, [1, 2, 3], max_tokens=20, ignore_eos=True, grammar=grammar)
    world.add(1, [1, 2, 4], max_tokens=5, ignore_eos=True, grammar=grammar)
    world.run()
    assert world.ends == {0: "stop", 1: "stop"}
    assert {len(answer) for answer in world.answers.values()} <= {1, 2, 3, 4, 5}


def test_a_compiling_grammar_holds_back_no_other_request() -> None:
    world = World()
    world.add(0, [1, 2], max_tokens=3, ignore_eos=True, grammar=Grammar("regex", "9"))
    world.add(1, [3, 4], max_tokens=3, ignore_eos=True)
    world.step()
    assert world.entered == [1]
    world.run()
    assert sorted(world.ends) == [0, 1]


def test_an_abort_while_the_grammar_compiles() -> None:
    world = World()
    world.add(0, [1, 2], max_tokens=3, grammar=Grammar("regex", "9"))
    world.scheduler.end(0, "abort")
    world.run()
    assert world.ends == {0: "abort"}
