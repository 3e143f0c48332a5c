"""Memory of automata: hostile grammars lose theirs, and honest ones do not notice.

This is tested in a process of its own. Its memory is measured at every step, which takes 20 ms in a process that other
tests have left with much memory free in small pieces.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

from minisgl.llm import LLM
from minisgl.sampling_params import Grammar, SamplingParams
from minisgl.structured_output import automata as automata_module
from minisgl.structured_output.heap import allocated_bytes
from minisgl.structured_output.matcher import GrammarMatcher, GrammarMatchers
from minisgl.structured_output.protocol import MatcherStatus
from structured_output.drawing import Drawer, filled, trained_tokenizer

MIB = 2**20
STEP = 8 * MIB  # a step may double a table of one automaton before it is measured


def hostile(index: int) -> Grammar:
    """Has another state for each text so far."""
    return Grammar("regex", f".*a.{{{300 + index}}}Z")


def rapid(index: int) -> Grammar:
    """Takes 9 MiB after 400 tokens, even if each is a byte."""
    return Grammar(
        "regex", "|".join(f".*{letter}.{{{300 + 97 * i + index}}}Z" for i, letter in enumerate("abcdefghij"))
    )


def honest(index: int) -> Grammar:
    return Grammar("closed_json_schema", f'{{"type": "object", "properties": {{"name{index}": {{"type": "string"}}}}}}')


def limit_memory(patch: pytest.MonkeyPatch, *, idle: int, used: int) -> None:
    """Limit the bytes of automata, and measure them at each step and new request."""
    patch.setattr(automata_module, "MAX_IDLE_BYTES", idle)
    patch.setattr(automata_module, "MAX_GRAMMARS_BYTES", used)
    patch.setattr(automata_module, "MEASURED_SHARE", math.inf)


class Server:
    """Follows requests as the scheduler does, and chooses tokens by chance."""

    def __init__(self, patch: pytest.MonkeyPatch, *, idle: int, used: int) -> None:
        drawer = Drawer(trained_tokenizer())
        limit_memory(patch, idle=idle, used=used)
        self.vocab_size, self.eos = drawer.vocab_size, drawer.eos
        self.matchers = GrammarMatchers(
            lambda: drawer.tokenizer, vocab_size=self.vocab_size, eos_token_ids=[self.eos], threads=1
        )
        self.matchers.prepare().result()
        self.rng = np.random.default_rng(0)
        self.before = allocated_bytes()

    @property
    def bytes(self) -> int:
        return allocated_bytes() - self.before

    @property
    def cached(self) -> set[Grammar]:
        return set(self.matchers._automata._kept)

    def start(self, grammar: Grammar) -> GrammarMatcher:
        return self.matchers.start(SamplingParams(grammar=grammar))

    def step(self, users: Sequence[GrammarMatcher]) -> list[MatcherStatus]:
        mask = filled(self.matchers, users, self.vocab_size)
        bits = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")
        bits[:, self.eos] &= bits.sum(axis=1) == 1  # no answer ends if it can go on
        tokens = [self.rng.choice(np.flatnonzero(row[: self.vocab_size])) for row in bits]
        return self.matchers.advance(users, np.array(tokens, dtype=np.int32))


def idle_automata_are_dropped_by_their_bytes(patch: pytest.MonkeyPatch) -> None:
    server = Server(patch, idle=24 * MIB, used=1000 * MIB)
    grammars = [honest(index) for index in range(8)]
    peak = 0
    for index in range(10):
        for grammar in grammars:
            server.step([server.start(grammar)])
        user = server.start(hostile(index))
        for _ in range(400):  # 5.7 MiB
            assert server.step([user]) == [MatcherStatus.OPEN]
            peak = max(peak, server.bytes)
    kept = [index for index in range(10) if hostile(index) in server.cached]
    assert 2 <= len(kept) <= 4, "six or more were dropped"
    assert kept == list(range(kept[0], 10)), "the oldest were"
    assert peak <= 24 * MIB + STEP
    assert server.cached >= set(grammars), "those that are used stay"


def honest_grammars_stay_as_many_as_are_counted(patch: pytest.MonkeyPatch) -> None:
    server = Server(patch, idle=automata_module.MAX_IDLE_BYTES, used=automata_module.MAX_GRAMMARS_BYTES)
    for index in range(automata_module.MAX_AUTOMATA):
        user = server.start(honest(index))
        for _ in range(20):
            if server.step([user]) != [MatcherStatus.OPEN]:
                break
    assert len(server.cached) == automata_module.MAX_AUTOMATA
    assert server.bytes < automata_module.MAX_IDLE_BYTES // 4


def running_requests_of_large_automata_end(patch: pytest.MonkeyPatch) -> None:
    """Honest ones in the same steps go on, and every automaton that is left follows its tokens."""
    server = Server(patch, idle=8 * MIB, used=24 * MIB)
    grammars = [hostile(index) if index % 2 else honest(index) for index in range(8)]
    users = [server.start(grammar) for grammar in grammars]
    ended, peak = 0, 0
    for _ in range(1200):
        for index, status in enumerate(server.step(users)):
            if status is not MatcherStatus.OPEN:
                assert index % 2 or status is MatcherStatus.COMPLETE
                ended += status is MatcherStatus.TOO_LARGE
                users[index] = server.start(grammars[index])
        peak = max(peak, server.bytes)
    assert ended >= 4, "the limit was reached"
    assert peak <= 24 * MIB + STEP
    del users[:]
    server.start(honest(0))
    assert server.bytes <= 8 * MIB, "no longer in use, they are dropped"


def automata_in_use_are_replaced_unless_they_are_large(patch: pytest.MonkeyPatch) -> None:
    """A process that grows otherwise ends no request, and goes on with the same answers."""
    server = Server(patch, idle=16 * MIB, used=32 * MIB)
    users = [server.start(honest(index)) for index in range(4)]
    others = [server.start(honest(index)) for index in range(4)]
    mask = filled(server.matchers, users, server.vocab_size)
    first = [user.automaton for user in users]
    ballast = bytearray(64 * MIB)
    for _ in range(30):
        mask = filled(server.matchers, users, server.vocab_size)
        assert (mask == filled(server.matchers, others, server.vocab_size)).all()
        bits = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")[:, : server.vocab_size]
        tokens = np.array([server.rng.choice(np.flatnonzero(row)) for row in bits], dtype=np.int32)
        statuses = server.matchers.advance(users, tokens)
        assert statuses == server.matchers.advance(others, tokens)
        assert not {MatcherStatus.TOO_LARGE, MatcherStatus.FAILED} & set(statuses)
        if set(statuses) != {MatcherStatus.OPEN}:
            break
    assert not {id(one) for one in first} & {id(user.automaton) for user in users}
    assert ballast


def an_engine_ends_requests_of_large_automata(patch: pytest.MonkeyPatch) -> None:
    with LLM("demo", max_seq_len_override=512) as llm:
        sampling = [
            SamplingParams(grammar=honest(0), max_tokens=60, temperature=0),
            *[SamplingParams(grammar=rapid(index), max_tokens=400, seed=index, ignore_eos=True) for index in range(3)],
        ]
        limit_memory(patch, idle=0, used=24 * MIB)
        (alone,) = llm.generate("hello", sampling[0])  # loads the vocabulary, too
        first, *others = llm.generate(["hello"] * len(sampling), sampling)
    assert first["text"] == alone["text"]
    assert "error" in {answer["finish_reason"] for answer in others}


def measuring_takes_a_share_of_the_time(patch: pytest.MonkeyPatch) -> None:
    server = Server(patch, idle=24 * MIB, used=48 * MIB)
    users = [server.start(honest(index)) for index in range(2)]
    server.step(users)
    measured: list[int] = []

    def measure() -> int:
        measured.append(1)
        return allocated_bytes()

    patch.setattr(automata_module, "allocated_bytes", measure)
    for _ in range(20):
        server.step(users)
    assert len(measured) == 20
    patch.setattr(automata_module, "MEASURED_SHARE", 1e-12)
    for _ in range(20):
        server.step(users)
    assert len(measured) == 21, "a measurement of some us is the last for more than a month"


SCENARIOS: list[Callable[[pytest.MonkeyPatch], None]] = [
    idle_automata_are_dropped_by_their_bytes,
    honest_grammars_stay_as_many_as_are_counted,
    running_requests_of_large_automata_end,
    automata_in_use_are_replaced_unless_they_are_large,
    an_engine_ends_requests_of_large_automata,
    measuring_takes_a_share_of_the_time,
]


def run(scenario: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        scenario(patch)


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield process


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_memory_of_automata(process: ProcessPoolExecutor, scenario: Callable[[pytest.MonkeyPatch], None]) -> None:
    process.submit(run, scenario).result()
