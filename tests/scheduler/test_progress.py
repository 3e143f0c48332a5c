"""No request is starved: each one ends although a flow of others never does."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from minisgl.sampling_params import Grammar
from minisgl.scheduler.requests.waiting_queue import MAX_PASSED
from minisgl.scheduler.steps.batch_policy import MOST_PREFILLS
from scheduler.simulation import ALWAYS_IN_TURNS, VOCAB, World

WORLDS: list[dict[str, object]] = [
    {"page_size": 4, "num_pages": 200, "num_slots": 5, "chunk": 16},
    {"page_size": 1, "num_pages": 110, "num_slots": 16, "chunk": 200, "cache": "naive", "overlap": False},
    {"page_size": 16, "num_pages": 8, "num_slots": 5, "chunk": 7, "schedule_policy": "lpm"},
    {"page_size": 4, "num_pages": 26, "chunk": 7, "batch_policy": "mixed", "num_slots": 16, "schedule_policy": "sjf"},
    {"page_size": 4, "num_pages": 200, "chunk": 16, "batch_policy": "mixed", "num_slots": 5, "schedule_policy": "lpm"},
    {"page_size": 16, "num_pages": 8, "chunk": 200, "batch_policy": "mixed", "num_slots": 2, "overlap": False},
    {"page_size": 4, "num_pages": 30, "chunk": 30, "batch_policy": "mixed", "num_slots": 16, "snapshots": 20},
    {"page_size": 2, "num_pages": 60, "chunk": 7, "batch_policy": "mixed", "schedule_policy": "sjf", "window": 9},
    {"page_size": 4, "num_pages": 28, "chunk": 50, "batch_policy": "mixed", "num_slots": 16, "cost": ALWAYS_IN_TURNS},
]
LONGEST = 99  # tokens of a prompt with its answer
TEXT = [random.Random(1).randrange(VOCAB) for _ in range(LONGEST)]

Asked = tuple[list[int], dict[str, object]]  # prompt and parameters


def own_prefix(number: int) -> list[int]:
    """Return two tokens with which few prompts of a flow begin."""
    return [number % VOCAB, number // VOCAB % VOCAB]


# The flows: each request by its number.


def short_prompts(rng: random.Random, number: int) -> Asked:
    return own_prefix(number), {"max_tokens": 1}


def answers_of_one_token(rng: random.Random, number: int) -> Asked:
    return own_prefix(number) * 8, {"max_tokens": 1}


def equal_prompts(rng: random.Random, number: int) -> Asked:
    return TEXT[:60], {"max_tokens": 2}


def a_family(rng: random.Random, number: int) -> Asked:
    ending = [rng.randrange(VOCAB)] * rng.randint(1, 8)
    return TEXT[: rng.randint(1, 80)] + ending, {"max_tokens": rng.randint(1, 6)}


def any_length(rng: random.Random, number: int) -> Asked:
    own = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 80))]
    return own_prefix(number) + own, {"max_tokens": rng.randint(1, 15)}


def long_answers(rng: random.Random, number: int) -> Asked:
    return own_prefix(number), {"max_tokens": 90}


def grammars(rng: random.Random, number: int) -> Asked:
    return [number % VOCAB, 3], {"max_tokens": 8, "grammar": Grammar("regex", str(rng.randint(1, 8)))}


def scored_prompts(rng: random.Random, number: int) -> Asked:
    return any_length(rng, number)[0], {"max_tokens": rng.randint(0, 1), "prompt_logprobs": 0}


FLOWS = [
    *(short_prompts, answers_of_one_token, equal_prompts, a_family, any_length, long_answers, grammars),
    scored_prompts,
]


def everything(rng: random.Random, number: int) -> Asked:
    return rng.choice(FLOWS)(rng, number)


# The requests that must end.
WATCHED: list[Asked] = [
    ([1, 2], {"max_tokens": 90}),
    ([5, 6] * 45, {"max_tokens": 5}),
    ([*TEXT[:70], 1], {"max_tokens": 9}),  # begins as many of the flow do
    ([9, 8, 7] * 10, {"max_tokens": 40, "grammar": Grammar("regex", "40")}),
    ([4, 5] * 44, {"max_tokens": 3, "prompt_logprobs": 0}),
    ([3] * 50, {"max_tokens": 45}),
    ([7] * 97, {"max_tokens": 0, "prompt_logprobs": 1}),
]


@dataclass
class Traffic:
    """A world in which `depth` requests of a flow wait at any time, and the tokens of all that were added."""

    world: World
    flow: Callable[[random.Random, int], Asked]
    depth: int
    rng: random.Random = field(default_factory=lambda: random.Random(2))
    tokens: dict[int, int] = field(default_factory=dict)  # of prompt and answer at most, by sequence

    def add(self, asked: Asked) -> int:
        prompt, params = asked
        seq_id = len(self.tokens)
        self.world.add(seq_id, prompt, ignore_eos=True, **params)
        self.tokens[seq_id] = len(prompt) + int(params["max_tokens"])  # type: ignore[call-overload]
        return seq_id

    def step(self) -> None:
        for _ in range(self.depth - self.world.scheduler.counts()["requests_waiting"]):
            self.add(self.flow(self.rng, len(self.tokens)))
        self.world.step()

    def open_tokens(self) -> int:
        """Return the tokens of all requests that have not ended."""
        return sum(tokens for seq_id, tokens in self.tokens.items() if seq_id not in self.world.ends)


@pytest.mark.parametrize("flow", [*FLOWS, everything], ids=lambda flow: flow.__name__)
@pytest.mark.parametrize("options", WORLDS, ids=str)
def test_every_request_ends_although_a_flow_of_others_does_not(
    options: dict[str, object], flow: Callable[[random.Random, int], Asked]
) -> None:
    """In fewer steps than if the requests before them, some that may pass them, and they were served one by one.

    With prefill-first each token of an answer may also wait for MOST_PREFILLS steps of prompts.
    """
    world = World(**options)  # type: ignore[arg-type]
    traffic = Traffic(world, flow, depth=12)
    for _ in range(30):
        traffic.step()
    watched = {traffic.add(asked) for asked in WATCHED}
    steps = traffic.open_tokens() + MAX_PASSED * max(traffic.tokens.values())
    if world.batch_policy == "prefill-first":
        steps += MOST_PREFILLS * LONGEST
    while not watched <= world.ends.keys():
        assert steps, f"starved: {sorted(watched - world.ends.keys())}"
        steps -= 1
        traffic.step()
