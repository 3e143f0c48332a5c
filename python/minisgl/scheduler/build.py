"""A scheduler that fits an engine: the one place where both are put together."""

from __future__ import annotations

from minisgl.config import SchedulerConfig
from minisgl.engine.engine import Engine
from minisgl.kvcache import make_cache
from minisgl.models.config import ModelConfig
from minisgl.scheduler.loop import StepLoop
from minisgl.scheduler.scheduler import Scheduler


def make_loop(config: SchedulerConfig, engine: Engine, model: ModelConfig) -> StepLoop:
    """The step loop of rank 0."""
    scheduler = Scheduler(
        config,
        cache=make_cache(config.cache, engine.page_size),
        num_pages=engine.num_pages,
        num_slots=engine.num_slots,
        max_seq_len=engine.limits.max_seq_len,
        eos_token_ids=model.eos_token_ids,
    )
    return StepLoop(scheduler, engine, overlap=config.overlap)
