"""The scheduler process of a rank: builds an engine, then decides (rank 0) or follows."""

from __future__ import annotations

import logging
from pathlib import Path

import zmq

from minisgl.engine.device import join_ranks
from minisgl.engine.engine import Engine
from minisgl.message.socket import Inbox, Outbox
from minisgl.message.to_detokenizer import ToDetokenizer
from minisgl.message.to_scheduler import ToRank, ToScheduler
from minisgl.models.config.load_config import load_model_config
from minisgl.process.worker import Worker
from minisgl.scheduler.build import make_loop
from minisgl.scheduler.ranks import follow
from minisgl.scheduler.serve import SchedulerServer
from minisgl.structured_output.matcher import GrammarMatchers
from minisgl.tokenizer.files import load_tokenizer

logger = logging.getLogger(__name__)


def run(worker: Worker) -> None:
    """The life of the scheduler process of rank `worker.index`."""
    config = worker.config
    folder = Path(config.engine.model_path)
    model = load_model_config(folder)
    grammars = GrammarMatchers(
        lambda: load_tokenizer(config.tokenizer_folder), vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids
    )
    if worker.index == 0:
        grammars.prepare()  # beside what the engine loads
    tp = join_ranks(config.engine, worker.index, worker.addresses)
    engine = Engine(
        config.engine,
        model,
        tp=tp,
        phase=worker.phase,
        progress=worker.index == 0 and logger.isEnabledFor(logging.INFO),
        max_prefill_tokens=config.scheduler.max_prefill_tokens,
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    if worker.index > 0:
        plans: Inbox[ToRank] = Inbox(context, worker.addresses.rank(worker.index), ToRank)
        worker.ready()
        follow(engine, plans)
    logger.info("engine: %s", engine.describe())
    inbox: Inbox[ToScheduler] = Inbox(context, worker.addresses.scheduler, ToScheduler)
    detokenizer: Outbox[ToDetokenizer] = Outbox(context, worker.addresses.detokenizer)
    followers: list[Outbox[ToRank]] = [Outbox(context, worker.addresses.rank(rank)) for rank in range(1, tp.size)]
    process = SchedulerServer(make_loop(config.scheduler, engine, model, followers, grammars), inbox, detokenizer)
    worker.ready(engine.limits)
    process.run_forever()
