"""A scheduler that fits an engine: the one place where both are put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from minisgl.config import SchedulerConfig
from minisgl.kvcache import make_cache
from minisgl.limits import Limits
from minisgl.message.socket import Outbox
from minisgl.message.to_scheduler import ToRank
from minisgl.models.config.model_config import ModelConfig
from minisgl.scheduler.loop import StepEngine, StepLoop
from minisgl.scheduler.ranks import LeadingEngine
from minisgl.scheduler.scheduler import Scheduler
from minisgl.structured_output.protocol import Grammars


class SchedulableEngine(StepEngine, Protocol):
    """Facts of an engine that the scheduler must know."""

    page_size: int
    num_pages: int
    num_slots: int
    limits: Limits


def make_loop(
    config: SchedulerConfig,
    engine: SchedulableEngine,
    model: ModelConfig,
    followers: Sequence[Outbox[ToRank]] = (),
    grammars: Grammars | None = None,
) -> StepLoop:
    """The step loop of rank 0, which sends every plan to the other ranks as well. Without grammars it serves none."""
    scheduler = Scheduler(
        config,
        cache=make_cache(config.cache, engine.page_size),
        num_pages=engine.num_pages,
        num_slots=engine.num_slots,
        max_seq_len=engine.limits.max_seq_len,
        eos_token_ids=model.eos_token_ids,
        grammars=grammars,
    )
    if not followers:
        return StepLoop(scheduler, engine, overlap=config.overlap)
    return StepLoop(scheduler, LeadingEngine(engine, followers), overlap=config.overlap, retries=False)
