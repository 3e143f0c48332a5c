"""Sessions: conversations and agents, whose every prompt is the history so far and one more message.

A session begins whatever became of others, and inside it a turn waits for the answer before it and for the think time
of its user (or the run of a tool). Answers in a history are random tokens that were planned with it, and not what the
server said: so every server gets the same prompts, encoded beforehand, and finds in its cache the prompt of the turn
before and not its answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from measuring.workload import Lengths, TimedRequest
from minisgl.core import Int32Array


@dataclass(frozen=True, slots=True)
class SessionShape:
    """Sizes of sessions. Lengths are in tokens; means are of log-normal distributions (think times: exponential)."""

    shared: int  # prefix of all sessions: instructions, descriptions of tools
    first: int  # mean of the first message
    message: int  # mean of each later message: a question, or what a tool printed
    answer: int  # mean of each answer
    turns: tuple[int, int]  # fewest and most of a session, all equally likely
    think: float  # mean seconds from the end of an answer to the next message

    @property
    def mean_turns(self) -> float:
        return sum(self.turns) / 2

    def scaled(self, lengths: float, think: float) -> SessionShape:
        """Return the shape with its lengths and its think times multiplied."""
        shared, first, message, answer = (
            max(1, round(tokens * lengths)) for tokens in (self.shared, self.first, self.message, self.answer)
        )
        return SessionShape(shared, first, message, answer, self.turns, self.think * think)


CONVERSATION = SessionShape(shared=500, first=300, message=150, answer=300, turns=(2, 10), think=10.0)
AGENT = SessionShape(shared=6000, first=2000, message=800, answer=200, turns=(8, 24), think=1.0)


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One turn: tokens that it adds to the prompt and asks for, and seconds after the answer before it."""

    message: int
    answer: int
    think: float


def plan_session(shape: SessionShape, rng: random.Random, context: int) -> tuple[list[PlannedTurn], bool]:
    """Return the turns of a session, and True if it had to end early because the next turn did not fit the context.

    ValueError when not even the first turn fits.
    """
    first, later = Lengths(shape.first, shape.answer), Lengths(shape.message, shape.answer)
    turns: list[PlannedTurn] = []
    used = shape.shared
    for place in range(rng.randint(*shape.turns)):
        message, answer = (later if place else first).draw(rng)
        think = rng.expovariate(1 / shape.think) if place and shape.think else 0.0
        used += message + answer
        if used > context:
            if not turns:
                raise ValueError(f"a session begins with {used} tokens, and the context is {context}")
            return turns, True
        turns.append(PlannedTurn(message, answer, think))
    return turns, False


def session_load(
    shape: SessionShape, rate: float, count: int, *, seed: int, token_seed: int, vocab_size: int, context: int
) -> tuple[list[TimedRequest], int]:
    """Return `count` requests of sessions that begin in a Poisson process, and how many sessions had to end early.

    `rate` is in requests per second: sessions begin at that rate over their mean number of turns. Starts, lengths and
    think times follow from `seed`, tokens from `token_seed`. The last session is cut off where `count` is reached.
    """
    rng = random.Random(seed)
    tokens = np.random.default_rng(token_seed)

    def draw(length: int) -> Int32Array:
        return tokens.integers(0, vocab_size, length, dtype=np.int32)

    shared = draw(shape.shared)
    load: list[TimedRequest] = []
    begin, num_cut = 0.0, 0
    while len(load) < count:
        turns, cut = plan_session(shape, rng, context)
        num_cut += cut
        history = shared
        for place, turn in enumerate(turns[: count - len(load)]):
            prompt = np.concatenate([history, draw(turn.message)])
            follows = len(load) - 1 if place else None
            load.append(TimedRequest(turn.think if place else begin, prompt, turn.answer, follows))
            history = np.concatenate([prompt, draw(turn.answer)])
        begin += rng.expovariate(rate / shape.mean_turns)
    return load, num_cut
