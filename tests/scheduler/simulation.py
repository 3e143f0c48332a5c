"""A device made of dictionaries: it executes plans as an engine would, and notices any corruption of the KV cache.

Each place of the simulated KV pool holds the hash of all tokens up to the one written there. Before a row extends, all
places of its prefix must hold what this very sequence put (or would have put) there; the sampled token is a function
of the prefix. So a page with two owners, a late write into a reused row or a wrong prefix hit shows at once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from minisgl.config import SchedulerConfig
from minisgl.core import Batch, Int32Array, SamplingParams
from minisgl.kvcache import make_cache
from minisgl.scheduler.loop import StepLoop
from minisgl.scheduler.scheduler import Scheduler

VOCAB = 50
EOS = 7


def extend_hash(prefix: int, token: int) -> int:
    return hash((prefix, token))


def next_token(prefix: int) -> int:
    """What the simulated model says after a prefix."""
    return prefix % VOCAB


def expected_answer(prompt: Int32Array, params: SamplingParams) -> list[int]:
    """The whole answer of the simulated model."""
    prefix = 0
    for token in prompt.tolist():
        prefix = extend_hash(prefix, token)
    answer: list[int] = []
    assert params.max_tokens is not None
    while len(answer) < params.max_tokens:
        answer.append(next_token(prefix))
        if answer[-1] == EOS and not params.ignore_eos:
            break
        prefix = extend_hash(prefix, answer[-1])
    return answer


class SimulatedDevice:
    """Slots, page table and KV pool; plans run when their result is asked for, as late as a device may be."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.tokens: dict[int, list[int]] = {}
        self.pages: dict[int, dict[int, int]] = {}
        self.kv: dict[tuple[int, int], int] = {}
        self.computed = 0
        self._queue: list[_Launched] = []

    def execute(self, batch: Batch) -> _Launched:
        launched = _Launched(self, batch)
        self._queue.append(launched)
        return launched

    def run_until(self, wanted: _Launched) -> None:
        while wanted.result is None:
            launched = self._queue.pop(0)
            launched.result = self._run(launched.batch)

    def _run(self, batch: Batch) -> Int32Array:
        for row in batch.entering:
            self.tokens[row.slot] = row.token_ids.tolist()
            self.pages[row.slot] = dict(enumerate(row.pages.tolist()))
        for slot, index, page in batch.new_pages.tolist():
            assert index == len(self.pages[slot]), "pages come in order"
            self.pages[slot][index] = page
        sampled = []
        rows = zip(batch.slots, batch.starts, batch.lengths, batch.samples, strict=True)
        for slot, start, length, samples in ((int(a), int(b), int(c), bool(d)) for a, b, c, d in rows):
            tokens, pages, prefix = self.tokens[slot], self.pages[slot], 0
            for position in range(start + length):
                prefix = hash((prefix, tokens[position]))
                place = pages[position // self.page_size], position % self.page_size
                if position < start:
                    assert self.kv[place] == prefix, f"slot {slot}: the cache of position {position} is another's"
                else:
                    self.kv[place] = prefix
            self.computed += length
            assert samples == (start + length == len(tokens)), "a row samples iff it reaches the last known token"
            if samples:
                sampled.append(next_token(prefix))
                tokens.append(sampled[-1])
        return np.array(sampled, dtype=np.int32)


@dataclass(slots=True, eq=False)
class _Launched:
    device: SimulatedDevice
    batch: Batch
    result: Int32Array | None = None

    def tokens(self) -> Int32Array:
        self.device.run_until(self)
        assert self.result is not None
        return self.result


@dataclass
class World:
    """A scheduler with a simulated device, and what came out for each sequence."""

    page_size: int = 4
    num_pages: int = 64
    num_slots: int = 8
    max_seq_len: int = 100
    chunk: int = 16
    batch_policy: str = "prefill-first"
    schedule_policy: str = "fcfs"
    cache: str = "radix"
    overlap: bool = True
    answers: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    entered: list[int] = field(default_factory=list)  # in their order

    def __post_init__(self) -> None:
        self.device = SimulatedDevice(self.page_size)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_prefill_tokens=self.chunk,
                batch_policy=self.batch_policy,  # type: ignore[arg-type]
                schedule_policy=self.schedule_policy,  # type: ignore[arg-type]
            ),
            cache=make_cache(self.cache, self.page_size),  # type: ignore[arg-type]
            num_pages=self.num_pages,
            num_slots=self.num_slots,
            max_seq_len=min(self.max_seq_len, self.num_pages * self.page_size),
            eos_token_ids=(EOS,),
        )
        self.loop = StepLoop(self.scheduler, self.device, overlap=self.overlap)

    def add(self, sequence: int, prompt: list[int] | Int32Array, *, priority: int = 0, **params: object) -> None:
        self.answers[sequence] = []
        sampling = SamplingParams(**params)  # type: ignore[arg-type]
        self.scheduler.add(sequence, np.array(prompt, dtype=np.int32), sampling, seed=0, priority=priority)

    def step(self) -> None:
        report = self.loop.step()
        self.entered += [entered.sequence for entered in report.entered]
        self.cached.update((entered.sequence, entered.cached_tokens) for entered in report.entered)
        for sequence, token in zip(report.sequences, report.tokens.tolist(), strict=True):
            assert sequence not in self.ends, "a token after the end"
            self.answers[sequence].append(token)
        for end in report.ended:
            assert end.sequence not in self.ends, "ended twice"
            self.ends[end.sequence] = end.reason

    def run(self) -> None:
        while self.loop.has_work:
            self.step()
        self.scheduler.check_idle()


def random_prompt(rng: random.Random, families: int, longest: int) -> list[int]:
    """Prompts that share prefixes: a family's text, cut, with an ending of its own."""
    family = random.Random(rng.randrange(families))
    text = [family.randrange(VOCAB) for _ in range(longest)]
    length = rng.randint(1, longest)
    own = rng.randint(0, length)
    return text[: length - own] + [rng.randrange(VOCAB) for _ in range(own)]
