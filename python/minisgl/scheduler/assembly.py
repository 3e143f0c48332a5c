"""Assembles the step loop of rank 0: prefix cache, stores and scheduler as the configuration, engine and model need."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from minisgl.config import SchedulerConfig
from minisgl.kvcache.base import CacheObserver
from minisgl.kvcache.window import WindowGroup
from minisgl.limits import Limits
from minisgl.message.socket import Outbox
from minisgl.message.to_scheduler import ToRank
from minisgl.models.config.model_config import ModelConfig
from minisgl.scheduler.cache_pools import make_pools
from minisgl.scheduler.loop import StepEngine, StepLoop
from minisgl.scheduler.ranks import LeadingEngine
from minisgl.scheduler.scheduler import Scheduler
from minisgl.step_cost import StepCost
from minisgl.structured_output.protocol import Grammars

logger = logging.getLogger(__name__)


class SchedulableEngine(StepEngine, Protocol):
    """Engine with the facts that its scheduler must know."""

    page_size: int
    num_pages: int
    num_slots: int
    num_snapshots: int  # snapshots of a hybrid model's states
    window: WindowGroup | None  # layers with pages of their own
    limits: Limits
    step_cost: StepCost | None


def reuses_prefixes(config: SchedulerConfig, model: ModelConfig) -> bool:
    """Return True if prompts may begin with cached prefixes of earlier ones."""
    return config.cache == "radix" and (model.pooling is None or model.pooling.reuses_prefixes)


def make_loop(
    config: SchedulerConfig,
    engine: SchedulableEngine,
    model: ModelConfig,
    followers: Sequence[Outbox[ToRank]] = (),
    grammars: Grammars | None = None,
    observer: CacheObserver | None = None,
) -> StepLoop:
    """Return the step loop of rank 0, which sends every plan to the ranks `followers`.

    Without `grammars` no request may have one. `observer` is told which prefixes are cached.
    """
    kind, num_snapshots = config.cache, 0
    if not reuses_prefixes(config, model) and kind == "radix":
        logger.info("no prefix is reused: a mean needs the states of all tokens")
        kind = "naive"
    if model.is_hybrid and kind == "radix":
        num_snapshots = engine.num_snapshots
        if not num_snapshots:
            logger.info("no prefix is reused: there is no room for snapshots of the recurrent layers' states")
            kind = "naive"
    pools = make_pools(
        kind,
        engine.page_size,
        engine.num_pages,
        window=engine.window,
        num_snapshots=num_snapshots,
        observer=observer,
    )
    scheduler = Scheduler(
        config,
        pools,
        num_slots=engine.num_slots,
        max_seq_len=engine.limits.max_seq_len,
        eos_token_ids=model.eos_token_ids,
        grammars=grammars,
        cost=engine.step_cost,
        makes_vectors=model.pooling is not None,
    )
    if not followers:
        return StepLoop(scheduler, engine, overlap=config.overlap)
    return StepLoop(scheduler, LeadingEngine(engine, followers), overlap=config.overlap, retries=False)
