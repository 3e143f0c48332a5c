"""The way to a steady decode: it ends with an error where so many requests can never run at once."""

from __future__ import annotations

import pytest

from minisgl.config import SchedulerConfig
from minisgl.scheduler.cache_pools import make_pools
from minisgl.scheduler.loop import StepLoop
from minisgl.scheduler.scheduler import Scheduler
from simulate import Clock, Device, Roofline
from timeline import start_decode


def make_loop(num_slots: int, num_pages: int) -> StepLoop:
    config = SchedulerConfig(max_prefill_tokens=100)
    scheduler = Scheduler(
        config,
        make_pools("radix", 16, num_pages),
        num_slots=num_slots,
        max_seq_len=2000,
        eos_token_ids=(),
    )
    return StepLoop(scheduler, Device(Clock(), Roofline()), overlap=True)


def test_all_requests_decode_at_once():
    loop = make_loop(num_slots=8, num_pages=200)
    start_decode(loop, rows=8, prompt_tokens=64, first_seq_id=0)
    assert sorted(loop.step().seq_ids) == list(range(8))


@pytest.mark.parametrize(("num_slots", "num_pages"), [(5, 200), (8, 24)], ids=["slots", "pages"])
def test_more_requests_than_fit_are_an_error(num_slots: int, num_pages: int):
    loop = make_loop(num_slots, num_pages)
    with pytest.raises(ValueError, match=r"[345] of 8 requests run at once"):
        start_decode(loop, rows=8, prompt_tokens=64, first_seq_id=0)
    assert loop.scheduler.counts()["sequences"] == 8, "the error came only after some requests had ended"
