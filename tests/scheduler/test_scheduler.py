"""Scheduler on a simulated device: exact answers, nothing lost, nothing corrupted."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys

import numpy as np
import pytest

from minisgl.core import Batch
from minisgl.message.engine_state import SequenceState
from minisgl.message.shared import TextOptions
from minisgl.sampling_params import Grammar, SamplingParams
from minisgl.scheduler.requests.request import Request, RequestState
from minisgl.scheduler.requests.waiting_queue import LOOKED_AT, MAX_PASSED, PATIENCE, WaitingQueue
from scheduler.simulation import ALWAYS_IN_TURNS, World, expected_answer, random_prompt

WORLDS: list[dict[str, object]] = [
    {"page_size": 1, "num_pages": 120, "overlap": True},
    {"page_size": 1, "num_pages": 120, "overlap": False, "cache": "naive"},
    {"page_size": 4, "num_pages": 26, "chunk": 7, "batch_policy": "mixed", "num_slots": 16, "schedule_policy": "sjf"},
    {"page_size": 4, "num_pages": 400, "num_slots": 3, "chunk": 1, "schedule_policy": "lpm"},
    {"page_size": 16, "num_pages": 10, "chunk": 1000, "batch_policy": "mixed", "schedule_policy": "lpm"},
    {"page_size": 16, "num_pages": 12, "overlap": False, "schedule_policy": "sjf"},
    {"page_size": 4, "num_pages": 30, "chunk": 30, "batch_policy": "mixed", "num_slots": 16, "snapshots": 20},
    {"page_size": 2, "num_pages": 60, "chunk": 7, "window": 9, "num_window_pages": 24, "batch_policy": "mixed"},
    {"page_size": 4, "num_pages": 28, "chunk": 50, "batch_policy": "mixed", "num_slots": 16, "cost": ALWAYS_IN_TURNS},
]


def random_questions(rng: random.Random) -> dict[str, int]:
    """Ask for log-probabilities of some requests, and for nothing else of some of these."""
    asked: dict[str, int] = {}
    if rng.random() < 0.2:
        asked["logprobs"] = rng.randint(0, 3)
    if rng.random() < 0.1:
        asked["prompt_logprobs"] = rng.randint(0, 3)
        if rng.random() < 0.4:
            asked["max_tokens"] = 0
    return asked


@pytest.mark.parametrize("options", WORLDS, ids=str)
def test_random_traffic(options: dict[str, object], request: pytest.FixtureRequest) -> None:
    """Arrivals, aborts and stop strings at random: each request ends once, with the answer it would get alone.

    And none waits behind more younger ones of its priority than MAX_PASSED and those of one more step.
    """
    count: int = request.config.getoption("--simulated-requests")
    world = World(**options)  # type: ignore[arg-type]
    rng, choices = random.Random(1), random.Random(2)
    prompts: dict[int, tuple[list[int], SamplingParams]] = {}
    priorities: dict[int, int] = {}
    open_sequences: set[int] = set()
    passed_over: dict[int, int] = {}  # by waiting request: later ones that began before it
    whole = 0
    while len(prompts) < count or world.loop.has_work:
        # Bursts, and room to drain: the pool is full at times and idle at times.
        if len(prompts) < count and len(open_sequences) < 40 and rng.random() < 0.5:
            for _ in range(rng.randint(1, 4)):
                seq_id = len(prompts)
                prompt = random_prompt(rng, families=6, longest=40)
                params = {"max_tokens": rng.randint(1, 60), "ignore_eos": rng.random() < 0.5}
                params |= random_questions(choices)
                prompts[seq_id] = prompt, SamplingParams(**params)  # type: ignore[arg-type]
                priorities[seq_id] = rng.choice([0, 0, 0, 1])
                world.add(seq_id, prompt, priority=priorities[seq_id], **params)
                open_sequences.add(seq_id)
                passed_over[seq_id] = 0
        if open_sequences and rng.random() < 0.03:
            ended = rng.choice(sorted(open_sequences))
            world.scheduler.end(ended, rng.choice(["abort", "stop"]))
            passed_over.pop(ended, None)
        entered_before = len(world.entered)
        world.step()
        for seq_id in world.entered[entered_before:]:
            if passed_over.pop(seq_id, None) is not None:
                for other in passed_over:
                    passed_over[other] += other < seq_id and priorities[other] == priorities[seq_id]
        assert all(count < MAX_PASSED + world.num_slots for count in passed_over.values())
        for seq_id in [seq_id for seq_id in open_sequences if seq_id in world.ends]:
            open_sequences.remove(seq_id)
            prompt, params_ = prompts[seq_id]
            world.check_logprobs(seq_id, prompt, params_)
            whole += world.check_answer(seq_id, prompt, params_)
    world.scheduler.check_idle()
    assert world.ends.keys() == prompts.keys()
    assert whole > count / 3
    if options["num_pages"] != 400:
        assert world.scheduler.retractions >= count / 40
    if "window" in options:
        counts = world.scheduler.counts()
        assert counts["window_pages_given_back"] > 10 * counts["window_pages"]
        assert counts["window_pages_evicted"] > 10 * counts["window_pages"]
        assert counts["prefix_tokens_hit"] > 0


def test_only_younger_ones_of_its_priority_pass_a_request_over() -> None:
    """One that waits for its prefix is passed by lower priorities, which does not make it overdue."""
    queue = WaitingQueue("lpm")

    def waiting(arrival: int, priority: int) -> Request:
        ids = np.zeros(1, dtype=np.int32)
        request = Request(arrival, ids, SamplingParams(), 0, 2, arrival, 1, TextOptions(), priority)
        queue.add(request)
        return request

    urgent, older = waiting(0, priority=1), waiting(1, priority=0)
    for arrival in range(2, 2 + MAX_PASSED):
        assert not queue.is_overdue(older)
        queue.admitted(waiting(arrival, priority=0))
    assert (urgent.passed_over, older.passed_over) == (0, MAX_PASSED)
    assert queue.is_overdue(older)
    assert not queue.is_overdue(urgent)


def test_retraction_takes_the_youngest_and_changes_no_answer() -> None:
    world = World(page_size=1, num_pages=60, max_seq_len=60)
    params = {"max_tokens": 40, "ignore_eos": True}
    for seq_id in range(3):
        world.add(seq_id, [seq_id, 9], **params)
    world.run()
    assert world.scheduler.retractions >= 2
    assert world.entered == [0, 1, 2]  # each entered once for the world
    for seq_id, answer in world.answers.items():
        assert answer == expected_answer(np.array([seq_id, 9]), SamplingParams(**params))  # type: ignore[arg-type]
    assert list(world.ends) == [0, 1, 2]  # the oldest was never retracted


def test_retraction_does_not_ping_pong() -> None:
    """Two requests that do not fit together: what is computed twice stays a small part."""
    world = World(page_size=1, num_pages=200, max_seq_len=200, chunk=1000)
    for seq_id in range(2):
        world.add(seq_id, [seq_id] * 20, max_tokens=150, ignore_eos=True)
    world.run()
    assert world.scheduler.retractions <= 4
    assert world.device.computed < 1.3 * 2 * 170


def test_many_long_limits_run_side_by_side() -> None:
    """max_tokens reserves nothing: requests that may be long, but are not, share a small pool."""
    world = World(page_size=1, num_pages=200, max_seq_len=200, num_slots=8, chunk=1000)
    for seq_id in range(8):
        world.add(seq_id, [seq_id, 1, 2], max_tokens=150, ignore_eos=True)
    for _ in range(6):
        world.step()
    assert world.scheduler.counts()["requests_running"] == 8


def test_mixed_gives_every_decode_a_token_in_every_step() -> None:
    world = World(batch_policy="mixed", chunk=8, num_pages=400, page_size=1, overlap=False)
    world.add(0, [1, 2], max_tokens=90, ignore_eos=True)
    for _ in range(3):
        world.step()
    before = len(world.answers[0])
    world.add(1, list(range(70)), max_tokens=1, ignore_eos=True)
    steps = 0
    while 1 not in world.ends:
        world.step()
        steps += 1
    assert len(world.answers[0]) - before == steps == 10  # seven tokens of the prompt beside each decode


def test_a_scored_prompt_is_computed_whole_whatever_is_cached() -> None:
    world = World(chunk=5)
    prompt = list(range(23))
    for seq_id, asked in enumerate([{}, {"prompt_logprobs": 2}, {"prompt_logprobs": 0, "max_tokens": 0}, {}]):
        params = {"max_tokens": 3, "ignore_eos": True, **asked}
        world.add(seq_id, prompt, **params)
        world.run()
        world.check_logprobs(seq_id, prompt, SamplingParams(**params))  # type: ignore[arg-type]
        assert world.ends[seq_id] == "length"
        assert len(world.answers[seq_id]) == params["max_tokens"]
    assert [world.cached[seq_id] for seq_id in range(4)] == [0, 0, 0, 20]


def test_a_prompt_of_one_token_without_an_answer_ends_at_once() -> None:
    world = World()
    world.add(0, [3], max_tokens=0, prompt_logprobs=1)
    world.run()
    assert world.ends == {0: "length"}
    assert world.answers == {0: []}


def test_a_retraction_amid_a_scored_prompt_loses_and_repeats_nothing() -> None:
    """The younger is in its first chunks when the older needs its pages."""
    world = World(page_size=1, num_pages=62, chunk=2, batch_policy="mixed", max_seq_len=60)
    params = {"max_tokens": 50, "ignore_eos": True, "logprobs": 1, "prompt_logprobs": 1}
    prompts = [[1, 2, 3], list(range(30))]
    for seq_id, prompt in enumerate(prompts):
        world.add(seq_id, prompt, **params | {"max_tokens": 50 - len(prompt)})
        for _ in range(14):
            world.step()
    world.run()
    assert world.scheduler.retractions > 0
    for seq_id, prompt in enumerate(prompts):
        world.check_logprobs(seq_id, prompt, SamplingParams(**params))  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule_policy", ["fcfs", "lpm", "sjf"])
def test_priority_goes_first(schedule_policy: str) -> None:
    world = World(num_slots=1, schedule_policy=schedule_policy)
    for seq_id, priority in enumerate([0, 0, 5, 1]):
        world.add(seq_id, [seq_id, 3], priority=priority, max_tokens=2, ignore_eos=True)
    world.run()
    assert world.entered == [2, 3, 0, 1]


def test_longest_prefix_goes_first_but_starves_no_request() -> None:
    world = World(num_slots=1, page_size=4, num_pages=400, schedule_policy="lpm")
    shared = list(range(40))
    world.add(0, shared, max_tokens=2, ignore_eos=True)
    world.run()
    world.add(1, [49, 48], max_tokens=2, ignore_eos=True)  # nothing of it is cached
    for seq_id in range(2, 40):
        world.add(seq_id, [*shared[:36], seq_id], max_tokens=2, ignore_eos=True)
    world.run()
    assert world.entered.index(1) == 1 + MAX_PASSED


def test_requests_passed_over_too_often_go_in_order_of_arrival() -> None:
    world = World(num_slots=1, page_size=4, num_pages=400, schedule_policy="lpm")
    shared = list(range(40))
    world.add(0, shared, max_tokens=2, ignore_eos=True)
    world.run()
    world.add(1, [49, 48], max_tokens=2, ignore_eos=True)  # nothing of it is cached
    world.add(2, [*shared[:8], 49], max_tokens=2, ignore_eos=True)  # something of it
    for seq_id in range(3, 40):
        world.add(seq_id, [*shared[:36], seq_id], max_tokens=2, ignore_eos=True)
    world.run()
    assert world.entered.index(1) == 1 + MAX_PASSED
    assert world.entered.index(2) == 2 + MAX_PASSED


def test_earlier_requests_do_not_count_as_passing_over() -> None:
    world = World(num_slots=1, page_size=4, num_pages=400, schedule_policy="lpm")
    shared = list(range(40))
    world.add(0, shared, max_tokens=2, ignore_eos=True)
    world.run()
    for seq_id in range(1, 60):
        prompt = [49, 48] if seq_id == 20 else [*shared[:36], seq_id]
        world.add(seq_id, prompt, max_tokens=2, ignore_eos=True)
    world.run()
    assert world.entered.index(20) == 20 + MAX_PASSED


def serve(queue: WaitingQueue, lengths: list[int]) -> tuple[list[Request], int]:
    """Let prompts come in bursts, faster than they are served; return them in order of admission, and their waits."""
    served: list[Request] = []
    arrived, waits, room = 0, 0, 0
    for seq_id, length in enumerate(lengths):
        none = np.zeros(1, dtype=np.int32)
        queue.add(Request(seq_id, none, SamplingParams(), 0, length + 1, arrived, length, TextOptions()))
        arrived += length
        room += int(0.95 * length)
        while len(queue) and room >= 0 and seq_id // 40 % 2:
            served.append(queue.candidates(lambda _: True, lambda _: 0)[0])
            room -= served[-1].prompt_len
            waits += arrived - served[-1].arrival
            queue.admitted(served[-1])
    return served, waits


def test_shorter_prompts_go_first_within_bounds() -> None:
    """None lets more tokens than PATIENCE times its length, or more than MAX_PASSED others, pass."""
    rng = random.Random(3)
    lengths = [int(10 ** rng.uniform(0, 4)) for _ in range(2000)]
    served, waits = serve(WaitingQueue("sjf"), lengths)
    passed = [
        [before.prompt_len for before in served[:place] if before.seq_id > request.seq_id]
        for place, request in enumerate(served)
    ]
    assert all(sum(younger) <= PATIENCE * one.prompt_len for one, younger in zip(served, passed, strict=True))
    assert max(map(len, passed)) == MAX_PASSED
    in_order, waits_in_order = serve(WaitingQueue("fcfs"), lengths)
    assert [request.seq_id for request in in_order] == sorted(request.seq_id for request in in_order)
    assert waits / len(served) < 0.8 * waits_in_order / len(in_order)


def test_the_longer_prefix_of_two_goes_first() -> None:
    world = World(num_slots=1, schedule_policy="lpm")
    world.add(0, list(range(40)), max_tokens=2, ignore_eos=True)
    world.run()
    world.add(1, [49, 48], max_tokens=2, ignore_eos=True)
    world.add(2, list(range(40)), max_tokens=2, ignore_eos=True)
    world.run()
    assert world.entered == [0, 2, 1]


def test_equal_prompts_that_come_at_once_are_prefilled_once() -> None:
    world = World(page_size=4, num_pages=400, num_slots=8, chunk=16)
    for seq_id in range(8):
        world.add(seq_id, list(range(60)), max_tokens=1, ignore_eos=True)
    world.add(8, [49] * 4, max_tokens=1, ignore_eos=True)
    world.run()
    assert world.device.computed == 60 + 7 * 4 + 4
    assert world.entered.index(8) == 1  # who shares nothing does not wait


LAYERS: list[dict[str, object]] = [{}, {"snapshots": 20}, {"window": 9}]


@pytest.mark.parametrize("layers", LAYERS, ids=str)
def test_a_request_waits_for_the_tokens_that_it_shares_and_not_for_a_whole_prompt(layers: dict[str, object]) -> None:
    world = World(page_size=4, num_pages=400, chunk=8, batch_policy="mixed", **layers)  # type: ignore[arg-type]
    prompt = list(range(90))
    world.add(0, prompt, max_tokens=1, ignore_eos=True)
    for seq_id, shared in enumerate((4, 24), start=1):
        world.add(seq_id, [*prompt[:shared], 99, 98], max_tokens=1, ignore_eos=True)
    world.run()
    assert list(world.ends) == [1, 2, 0]
    assert world.cached == {0: 0, 1: 4, 2: 24}


@pytest.mark.parametrize("layers", LAYERS, ids=str)
def test_requests_that_wait_for_a_prefix_hold_up_no_other(layers: dict[str, object]) -> None:
    """However many they are."""
    world = World(page_size=4, num_pages=400, chunk=8, batch_policy="mixed", **layers)  # type: ignore[arg-type]
    prompt = list(range(90))
    world.add(0, prompt, max_tokens=1, ignore_eos=True)
    for seq_id in range(1, 3 * LOOKED_AT):
        world.add(seq_id, [*prompt, seq_id], max_tokens=1, ignore_eos=True)
    world.add(999, [99, 98], max_tokens=1, ignore_eos=True)
    for _ in range(5):
        world.step()
    assert world.entered == [0, 999]
    world.run()
    assert all(cached == 88 for seq_id, cached in world.cached.items() if seq_id not in (0, 999))


@pytest.mark.parametrize(("priority", "entered"), [(0, [0]), (1, [0, 1])])
@pytest.mark.parametrize("layers", LAYERS, ids=str)
def test_no_request_waits_for_one_of_lower_priority(
    layers: dict[str, object], priority: int, entered: list[int]
) -> None:
    """That one may get no tokens while a long prompt is prefilled beside a flow of short ones."""
    world = World(page_size=4, num_pages=400, chunk=8, batch_policy="mixed", **layers)  # type: ignore[arg-type]
    prompt = list(range(90))
    world.add(0, prompt, max_tokens=1, ignore_eos=True)
    world.step()
    world.add(1, [*prompt[:20], 99], max_tokens=1, ignore_eos=True, priority=priority)
    world.step()
    assert world.entered == entered
    world.run()
    assert list(world.ends) == [1, 0]


def test_without_a_cache_no_request_waits_for_a_prefix() -> None:
    """Equal prompts enter together, and those of higher priority hold up no other while there is room for it."""
    world = World(page_size=4, num_pages=400, num_slots=8, chunk=1000, cache="naive")
    for seq_id in range(8):
        world.add(seq_id, list(range(49)), max_tokens=1, ignore_eos=True, priority=seq_id % 2)
    world.step()
    assert len(world.entered) == 8
    world.run()


@pytest.mark.parametrize(("length", "entered"), [(4, [0, 1, 2]), (5, [0])])
def test_a_request_waits_for_a_prefix_only_if_it_saves_a_page(length: int, entered: list[int]) -> None:
    """The last token of a prompt is computed in any case."""
    world = World(page_size=4)
    for seq_id in range(3):
        world.add(seq_id, list(range(length)), max_tokens=1, ignore_eos=True)
    world.step()
    assert world.entered == entered


def test_waiting_for_prefixes_starves_no_request() -> None:
    world = World(page_size=1, num_pages=400, chunk=42)
    text = list(range(48))
    for seq_id in range(40):
        # Each computes all of its prompt, but only one token in its first step, and has one token more of the text.
        shared = 1 + seq_id
        prompt = text[:shared] + [49] * ((41 if seq_id == 0 else 42) - shared)
        world.add(seq_id, prompt, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
        if seq_id == 0:
            world.add(99, text, max_tokens=1, ignore_eos=True)
    world.run()
    assert world.entered.index(99) == 1 + MAX_PASSED


@pytest.mark.parametrize(("length", "steps"), [(8, 1), (30, 1), (30, 3)])
def test_requests_enter_only_when_a_step_has_room_for_them(length: int, steps: int) -> None:
    """A later request of higher priority can thus still go first."""
    world = World(chunk=8)
    for seq_id in range(4):
        world.add(seq_id, [seq_id] * length, max_tokens=1, ignore_eos=True)
    for _ in range(steps):
        world.step()
    world.add(4, [4] * length, max_tokens=1, ignore_eos=True, priority=1)
    world.run()
    assert world.entered == [0, 4, 1, 2, 3]


def test_equal_prompts_side_by_side_keep_their_pages() -> None:
    world = World(num_pages=100, chunk=1000)
    for seq_id in range(5):
        world.add(seq_id, list(range(20)), max_tokens=30, ignore_eos=True)
    world.run()  # the device checks every place before every step
    assert len({tuple(answer) for answer in world.answers.values()}) == 1


def test_a_recomputed_prefix_takes_no_promised_pages() -> None:
    """It allocates its own pages, and the cached ones stay evictable for requests admitted beside it."""
    world = World(page_size=1, num_pages=60, chunk=32)
    prompt = list(range(20))
    world.add(0, prompt, max_tokens=1, ignore_eos=True)
    world.run()
    world.add(1, prompt, max_tokens=8, prompt_logprobs=0, ignore_eos=True)  # computes all of it again
    world.add(2, list(range(20, 50)), max_tokens=1, ignore_eos=True)
    world.run()
    assert world.scheduler.retractions == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_a_stopped_request_keeps_its_slot_until_its_last_step_is_complete(overlap: bool) -> None:
    world = World(num_slots=1, overlap=overlap)
    world.add(0, [1, 2, 3], max_tokens=50, ignore_eos=True)
    world.add(1, [4, 5, 6], max_tokens=3, ignore_eos=True)
    for _ in range(4):
        world.step()
    world.scheduler.end(0, "stop")  # a step that names its slot is in flight, or not
    world.run()
    assert world.ends == {0: "stop", 1: "length"}
    assert world.answers[1] == expected_answer(np.array([4, 5, 6]), SamplingParams(max_tokens=3, ignore_eos=True))


@pytest.mark.parametrize(
    "options",
    [{}, {"overlap": False}, {"cache": "naive"}, {"snapshots": 4}, {"window": 6, "num_window_pages": 20}],
    ids=str,
)
def test_abort_at_any_moment_returns_everything(options: dict[str, object]) -> None:
    """Prompts that are waiting, compiled, prefilled in chunks, decoded or retracted, and those of steps in flight."""
    found: set[object] = set()
    for steps in range(50):
        world = World(page_size=2, num_pages=32, chunk=8, max_seq_len=64, batch_policy="mixed", num_slots=3, **options)  # type: ignore[arg-type]
        for seq_id in range(5):
            grammar = Grammar("regex", "20") if seq_id == 1 else None
            world.add(seq_id, list(range(seq_id // 2, 20)), max_tokens=20, ignore_eos=True, grammar=grammar)
        for _ in range(steps):
            world.step()
        for seq_id in range(5):
            request = world.scheduler._requests.find(seq_id)
            if request is not None:
                computed = world.scheduler._table.cached_len[request.slot]
                is_chunk = request.state is RequestState.RUNNING and computed < request.prompt_len
                found.add("prefill" if is_chunk else request.state)
            world.scheduler.end(seq_id, "abort")
            world.scheduler.end(seq_id, "abort")  # a second one is passed over
        world.run()
        assert world.ends.keys() == set(range(5))
    assert found == {"prefill", RequestState.WAITING, RequestState.RUNNING, RequestState.RETRACTED}


def test_batches_are_built_in_order_of_arrival() -> None:
    world = World(num_slots=8, chunk=1000)
    for seq_id in (5, 3, 9, 1):
        world.add(seq_id, [seq_id, seq_id], max_tokens=4, ignore_eos=True)
    batch = world.scheduler.schedule()
    assert batch is not None
    assert [int(row.token_ids[0]) for row in batch.new_rows] == [5, 3, 9, 1]
    assert batch.slots.tolist() == [row.slot for row in batch.new_rows]


@pytest.mark.parametrize("overlap", [True, False])
def test_decodes_go_longest_first_and_keep_their_order(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes, goes or is retracted; and the order changes only then: nothing else is sent to a device."""
    world, rng = World(num_slots=12, num_pages=60, overlap=overlap), random.Random(3)
    batches: list[Batch] = []
    forward = world.device.forward

    def recorded(batch: Batch) -> None:
        batches.append(batch)
        forward(batch)

    monkeypatch.setattr(world.device, "forward", recorded)
    for seq_id in range(60):
        prompt = random_prompt(rng, families=4, longest=40)
        world.add(seq_id, prompt, max_tokens=rng.randint(1, 50), ignore_eos=True)
    world.run()
    decodes = [batch for batch in batches if batch.is_decode]
    assert max(len(batch.slots) for batch in decodes) > 6
    unchanged = 0
    for before, batch in itertools.pairwise(decodes):
        assert (np.diff(batch.start_pos) <= 0).all()
        if starts_of(before, later=1) == starts_of(batch):
            assert np.array_equal(before.slots, batch.slots)
            unchanged += 1
    assert unchanged > 100


def starts_of(batch: Batch, later: int = 0) -> dict[int, int]:
    """Return each row's first position, by slot."""
    return dict(zip(batch.slots.tolist(), (batch.start_pos + later).tolist(), strict=True))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_admission_counts_pages(page_size: int) -> None:
    """There run as many one-page requests as there are pages, though their tokens would fit many times."""
    world = World(page_size=page_size, num_pages=3, num_slots=8, max_seq_len=page_size)
    if page_size == 1:
        world = World(page_size=1, num_pages=6, num_slots=8, max_seq_len=6)
    for seq_id in range(8):
        world.add(seq_id, [seq_id], max_tokens=2, ignore_eos=True)
    world.run()
    assert set(world.ends.values()) == {"length"}


def test_a_repeated_prompt_is_prefilled_from_the_cache() -> None:
    world = World(page_size=4)
    world.add(0, list(range(30)), max_tokens=4, ignore_eos=True)
    world.run()
    before = world.device.computed
    world.add(1, list(range(30)), max_tokens=4, ignore_eos=True)
    world.run()
    assert world.cached == {0: 0, 1: 28}
    assert world.device.computed - before == 2 + 3
    assert world.answers[0] == world.answers[1]
    counts = world.scheduler.counts()
    assert (counts["prefix_tokens_queried"], counts["prefix_tokens_hit"]) == (60, 28)


def test_sequences_are_described_by_their_state() -> None:
    """Running ones first; a waiting one holds nothing, also if it has run before."""
    world = World(page_size=4, num_pages=8, num_slots=2, max_seq_len=32, overlap=False)
    for seq_id in range(3):
        world.add(seq_id, [seq_id] * 10, max_tokens=20, ignore_eos=True, priority=-seq_id)
    world.step()
    world.step()
    fixed = {"request_id": "", "prompt": 10, "limit": 30}
    running = {"state": "running", "computed": 10, "known": 11}
    pages = [request.prefix.pages[-1] for request in map(world.scheduler._table.request, (0, 1)) if request.prefix]
    first, second, third = world.scheduler.sequences(2)
    assert first == SequenceState(seq_id=0, node=pages[0], **running, **fixed)  # type: ignore[arg-type]
    assert second == SequenceState(seq_id=1, node=pages[1], priority=-1, **running, **fixed)  # type: ignore[arg-type]
    waiting = SequenceState(seq_id=2, state="waiting", known=10, priority=-2, **fixed)  # type: ignore[arg-type]
    assert third == waiting
    assert world.scheduler.sequences(1) == [first, third]
    while not world.scheduler.retractions:
        world.step()
    _, retracted, third = world.scheduler.sequences(2)
    assert (retracted.seq_id, retracted.state, retracted.node, retracted.computed) == (1, "retracted", None, 0)
    assert retracted.known == 10 + len(world.answers[1])
    assert third == waiting


def test_lost_pages_are_said_at_idle(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.add(0, list(range(30)), max_tokens=4)
    world.run()
    world.scheduler.check_balance()
    assert caplog.text == ""
    world.scheduler._pages._pool.allocate(1)
    world.scheduler.check_balance()
    assert "pages are lost or held at idle" in caplog.text


def test_a_running_prompt_is_shared_before_it_ends() -> None:
    world = World(page_size=4)
    world.add(0, list(range(20)), max_tokens=40, ignore_eos=True)
    for _ in range(4):
        world.step()
    world.add(1, [*range(16), 99], max_tokens=2, ignore_eos=True)
    world.run()
    assert world.cached[1] == 16


def test_prefixes_are_shared_with_the_same_salt_only() -> None:
    world = World(page_size=4, num_pages=400)
    prompt, params = list(range(30)), {"max_tokens": 40, "ignore_eos": True}
    for seq_id, salt in enumerate([b"a", b"", b"b"]):
        world.add(seq_id, prompt, salt=salt, **params)
    world.step()
    assert world.entered == [0]  # the prompt is longer than a chunk
    for _ in range(6):
        world.step()
    assert world.scheduler.counts()["requests_running"] == 3
    for seq_id, salt in enumerate([b"c", b"a", b"b", b""], start=3):
        world.add(seq_id, prompt, salt=salt, **params)
    world.run()
    for seq_id, salt in enumerate([b"d", b"a"], start=7):
        world.add(seq_id, [*prompt, 49], salt=salt, **params)
    world.run()
    assert world.cached == {0: 0, 1: 0, 2: 0, 3: 0, 4: 28, 5: 28, 6: 28, 7: 0, 8: 28}


@pytest.mark.parametrize("salts", [(b"", b""), (b"a", b"b"), (b"a", b"")])
def test_a_request_with_another_salt_waits_for_no_prefix(salts: tuple[bytes, bytes]) -> None:
    world = World(page_size=4, chunk=32)
    for seq_id, salt in enumerate(salts):
        world.add(seq_id, list(range(10)), salt=salt, max_tokens=1)
    world.step()
    assert world.entered == ([0] if salts[0] == salts[1] else [0, 1])


@pytest.mark.parametrize("prompt", [15, 19])
def test_a_request_that_fills_the_pool_runs(prompt: int) -> None:
    world = World(page_size=4, num_pages=5, max_seq_len=20, chunk=32)
    world.add(0, list(range(prompt)), max_tokens=20 - prompt, ignore_eos=True)
    world.step()
    assert world.entered == [0]
    world.run()
    assert len(world.answers[0]) == 20 - prompt


def test_stop_token_ids_end_their_own_request_only() -> None:
    world = World()
    prompt = [1, 2, 3]
    answer = expected_answer(np.array(prompt), SamplingParams(max_tokens=20, ignore_eos=True))
    world.add(0, prompt, max_tokens=20, ignore_eos=True, stop_token_ids=(answer[4],))
    world.add(1, prompt, max_tokens=20, ignore_eos=True)
    world.run()
    assert world.answers[0] == answer[: answer.index(answer[4]) + 1]
    assert world.ends == {0: "stop", 1: "length"}
    assert world.answers[1] == answer


def test_policy_imports_no_torch() -> None:
    code = "import sys, minisgl.scheduler.loop, minisgl.scheduler.steps.batch_policy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
