"""Workloads are the same in every process, and the headline is what everybody measures."""

from __future__ import annotations

import random

import numpy as np
import pytest

from measuring.workload import (
    Lengths,
    closed_loop,
    fit_context,
    offline_batch,
    poisson_arrivals,
    random_prompts,
    synthetic_load,
)


def test_the_headline_is_the_known_one():
    batch = offline_batch()
    assert len(batch.prompts) == len(batch.max_tokens) == 256
    assert batch.output_tokens == 133966
    lengths = [len(prompt) for prompt in batch.prompts]
    assert min(lengths) >= 100
    assert max(lengths) <= 1024
    assert max(map(max, batch.prompts)) <= 10000


def test_later_runs_keep_the_lengths_and_share_no_prompt():
    first, second = offline_batch(0, requests=8, longest=128), offline_batch(1, requests=8, longest=128)
    assert first.max_tokens == second.max_tokens
    assert [len(prompt) for prompt in first.prompts] == [len(prompt) for prompt in second.prompts]
    assert all(a[0] != b[0] for a, b in zip(first.prompts, second.prompts, strict=True))


def test_prompts_stay_in_a_small_vocabulary():
    assert max(map(max, offline_batch(requests=8, longest=128, vocab_size=272).prompts)) < 272
    for vocab_size in (272, 500, 151936):
        assert max(map(max, random_prompts(random.Random(0), 4, 200, vocab_size))) < min(vocab_size, 100001)


def test_poisson_arrivals_have_their_rate():
    times = poisson_arrivals(random.Random(0), rate=5.0, count=5000)
    assert times[0] == 0.0
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(5.0, rel=0.05)
    assert times == poisson_arrivals(random.Random(0), rate=5.0, count=5000)


def test_a_synthetic_load_follows_from_its_seed():
    def load(seed: int):
        return synthetic_load(seed, [0.0, 0.5, 0.7], Lengths(200, 50), vocab_size=1000, context=4096)[0]

    first, again, other = load(1), load(1), load(2)
    assert [request.at for request in first] == [0.0, 0.5, 0.7]
    assert all(np.array_equal(a.prompt, b.prompt) for a, b in zip(first, again, strict=True))
    assert [request.max_tokens for request in first] == [request.max_tokens for request in again]
    assert not any(np.array_equal(a.prompt, b.prompt) for a, b in zip(first, other, strict=True))


def test_lengths_have_their_means():
    rng, lengths = random.Random(0), Lengths()
    drawn = np.array([lengths.draw(rng) for _ in range(4000)])
    assert drawn.mean(axis=0) == pytest.approx([1750, 350], rel=0.05)
    assert Lengths(100, 20, 0.0, 0.0).draw(rng) == (100, 20)


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [((10, 5), (10, 5)), ((95, 5), (95, 5)), ((96, 5), (95, 5)), ((500, 80), (50, 50)), ((1, 500), (1, 50))],
)
def test_lengths_are_cut_to_the_context(wanted: tuple[int, int], fits: tuple[int, int]):
    assert fit_context(*wanted, 100) == fits


def test_cut_requests_are_counted():
    _, num_cut = synthetic_load(0, [0.0] * 5, Lengths(200, 10, 0.0, 0.0), vocab_size=10, context=100)
    assert num_cut == 5


def test_a_closed_loop_has_so_many_requests_at_a_time():
    load, _ = synthetic_load(0, [0.0] * 7, Lengths(20, 50), vocab_size=10, context=1000)
    closed = closed_loop(load, 3, seed=0, vocab_size=10)
    assert [request.follows for request in closed] == [None, None, None, 0, 1, 2, 3]
    for one, whole in zip(closed[:3], load, strict=False):  # the rest of an answer, behind what was answered before
        assert 0 < one.max_tokens <= whole.max_tokens
        assert len(one.prompt) + one.max_tokens == len(whole.prompt) + whole.max_tokens
        assert np.array_equal(one.prompt[: len(whole.prompt)], whole.prompt)
    assert any(one.max_tokens < whole.max_tokens for one, whole in zip(closed[:3], load, strict=False))
    assert [request.max_tokens for request in closed[3:]] == [request.max_tokens for request in load[3:]]
