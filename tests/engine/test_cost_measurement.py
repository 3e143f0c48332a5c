"""Coefficients of a step's cost model: a measurement finds those of the device, an estimate is of the right size."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from minisgl import LLM
from minisgl.core import Batch
from minisgl.engine.cost_measurement import DECODES, SMALL_CHUNK, measure_cost
from minisgl.step_cost import StepCost

DEVICE = StepCost(
    prefill_token=20e-6,
    prefill_context=2e-9,
    decode_row=26e-6,
    decode_context=30e-9,
    fixed=3e-3,
    alone_row=8e-6,
    alone_fixed=4.4e-3,
)
# Findings with too few slots for many decodes: a decode beside a chunk is a token more, and none is ever alone.
FEW = dataclasses.replace(DEVICE, decode_row=DEVICE.prefill_token, alone_row=0.0, alone_fixed=math.inf)


class TimedDevice:
    """Takes as long as the formula says, and longer for the first step of each kind.

    12 ms longer are the first `slow_steps`, and all steps of `slow_tokens` tokens. The host launches a chunk for `host`
    seconds.
    """

    def __init__(
        self, num_pages: int, page_size: int, *, slow_steps: int = 0, slow_tokens: int = 0, host: float = 0.0
    ) -> None:
        self._slow_steps, self._slow_tokens, self._host = slow_steps, slow_tokens, host
        self.steps = 0
        self.longest = self.most_rows = 0  # tokens of a sequence, rows of a step
        self._num_pages, self._page_size = num_pages, page_size
        self._seen: set[tuple[int, int]] = set()

    def seconds_of(self, batches: Sequence[Batch]) -> list[float]:
        launched = 0.0
        ends = [launched]
        for batch in batches:
            launched += self._host if int(batch.query_lens.max()) > 1 else 0.0
            ends.append(max(ends[-1] + self._seconds(batch), launched))
        return [end - begin for begin, end in itertools.pairwise(ends)]

    def _seconds(self, batch: Batch) -> float:
        self.steps += 1
        kind = int(batch.start_pos[0]), batch.num_tokens
        seconds = DEVICE.seconds(batch) * (1 if kind in self._seen else 30)
        if self.steps <= self._slow_steps or batch.num_tokens == self._slow_tokens:
            seconds += 12e-3
        self._seen.add(kind)
        slots, indices, pages = batch.new_pages.T
        assert pages.max() < self._num_pages
        # Each row has a page for each of its places.
        known = {row.slot: len(row.token_ids) for row in batch.new_rows}
        assert known == dict(zip(batch.slots.tolist(), (batch.start_pos + batch.query_lens).tolist(), strict=True))
        self.longest = max(self.longest, *known.values())
        self.most_rows = max(self.most_rows, len(known))
        reach = (batch.start_pos + batch.query_lens - 1) // self._page_size
        for row, last in zip(batch.slots.tolist(), reach.tolist(), strict=True):
            assert indices[slots == row].tolist() == list(range(last + 1))
        if len(pages) <= self._num_pages:
            assert len(np.unique(pages)) == len(pages)
        return seconds


@pytest.mark.parametrize(("num_pages", "page_size"), [(50_000, 16), (100, 1)])
@pytest.mark.parametrize("max_seq_len", [40_000, 700, 20])
def test_a_measurement_finds_the_device(num_pages: int, page_size: int, max_seq_len: int) -> None:
    device = TimedDevice(num_pages, page_size)
    cost = measure_cost(
        device.seconds_of,
        num_pages=num_pages,
        page_size=page_size,
        num_slots=DECODES,
        vocab_size=100,
        max_seq_len=max_seq_len,
        max_prefill_tokens=8192,
    )
    assert cost is not None
    assert device.steps == 18
    assert device.most_rows == DECODES
    assert device.longest < max_seq_len, "there is room for the sampled token"
    assert dataclasses.astuple(cost) == pytest.approx(dataclasses.astuple(FEW), rel=1e-6)


@pytest.mark.parametrize(("num_slots", "max_seq_len"), [(100, 40_000), (512, 700)])
def test_with_many_slots_a_measurement_tells_decodes_alone_from_those_beside_chunks(
    num_slots: int, max_seq_len: int
) -> None:
    """The host may launch chunks more slowly than the device runs them."""
    device = TimedDevice(50_000, 16, host=5e-3)
    cost = measured(device, num_slots=num_slots, max_seq_len=max_seq_len)
    assert device.most_rows <= num_slots
    assert device.longest < max_seq_len
    assert dataclasses.astuple(cost) == pytest.approx(dataclasses.astuple(DEVICE), rel=1e-6)


def measured(device: TimedDevice, num_slots: int = DECODES, max_seq_len: int = 40_000) -> StepCost:
    sizes = {"num_pages": 50_000, "page_size": 16, "vocab_size": 100, "max_seq_len": max_seq_len}
    cost = measure_cost(device.seconds_of, **sizes, num_slots=num_slots, max_prefill_tokens=8192)
    assert cost is not None
    return cost


def test_a_disturbance_changes_nothing() -> None:
    """At the start, or by a host that launches a short prompt for longer than the device computes it."""
    device = TimedDevice(50_000, 16, slow_steps=12, host=15e-3)
    assert dataclasses.astuple(measured(device)) == pytest.approx(dataclasses.astuple(FEW), rel=1e-6)


def test_short_prompts_that_take_too_long_do_not_make_tokens_cheap() -> None:
    """Chunks by such a measurement would take several times the target."""
    cost = measured(TimedDevice(50_000, 16, slow_tokens=SMALL_CHUNK))
    assert cost.prefill_token == pytest.approx(DEVICE.prefill_token, rel=0.15)
    assert cost.fixed < 2 * DEVICE.fixed


def test_an_engine_too_small_is_not_measured() -> None:
    device = TimedDevice(10, 1)
    sizes = {
        "num_pages": 10,
        "page_size": 1,
        "num_slots": 2,
        "vocab_size": 100,
        "max_seq_len": 3,
        "max_prefill_tokens": 1,
    }
    assert measure_cost(device.seconds_of, **sizes) is None


def test_a_decode_of_the_measurement_attends_to_its_context() -> None:
    """A captured decode takes its lengths from the device, whatever the plan says."""
    lengths: list[list[int]] = []
    with LLM("demo", device="cpu", max_running_req=4, num_page_override=400, page_size=16) as llm:
        engine = llm._engine

        def seconds_of(batches: Sequence[Batch]) -> list[float]:
            for batch in batches:
                engine.forward(batch)
                engine.sample(batch)()
                lengths.append(engine._runner.state.lengths[batch.slots.tolist()].tolist())
            return [1.0] * len(batches)

        sizes = {"num_pages": 400, "page_size": 16, "num_slots": 4, "vocab_size": 256, "max_seq_len": 600}
        assert measure_cost(seconds_of, **sizes, max_prefill_tokens=512) is not None
    assert [600] * 4 in lengths  # with the sampled one
    assert [3] * 4 in lengths
