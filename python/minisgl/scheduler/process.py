"""The scheduler process of a rank: builds an engine, then plans steps (rank 0) or executes the plans of rank 0.

Rank 0 feeds the step loop from its inbox and sends the outcome of each step to the detokenizer.
"""

from __future__ import annotations

import logging
from pathlib import Path
from time import perf_counter

import zmq

from minisgl.message.engine_state import EngineState, StateReport, StateRequest
from minisgl.message.packed_ids import unpack_ids
from minisgl.message.shared import Abort, FlushCache, Flushed, ProcessCounts, StatsReport, StatsRequest
from minisgl.message.socket import Inbox, Outbox
from minisgl.message.to_detokenizer import ToDetokenizer
from minisgl.message.to_scheduler import Add, Stopped, ToRank, ToScheduler
from minisgl.models.load_config import load_engine_model
from minisgl.process.worker import Worker
from minisgl.scheduler.assembly import make_loop, reuses_prefixes
from minisgl.scheduler.kv_publisher import KVPublisher
from minisgl.scheduler.loop import StepCounts, StepLoop
from minisgl.scheduler.ranks import follow
from minisgl.scheduler.steps.trace import StepTrace
from minisgl.structured_output.matcher import GrammarMatchers
from minisgl.tokenizer.load_tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

# Limits of the glass box (/debug/state).
WATCH_SECONDS = 15.0  # after a query, during which steps are recorded for the next one
MAX_SEQUENCES = 128  # running sequences that are reported, and as many waiting ones
MAX_NODES = 192  # nodes of the radix tree that are reported


class SchedulerServer:
    """Feeds the step loop from the inbox and sends the outcome of each step to the detokenizer."""

    def __init__(
        self,
        loop: StepLoop,
        inbox: Inbox[ToScheduler],
        detokenizer: Outbox[ToDetokenizer],
        kv_publisher: KVPublisher | None = None,
    ) -> None:
        self._loop = loop
        self._scheduler = loop.scheduler
        self._inbox = inbox
        self._detokenizer = detokenizer
        self._kv_publisher = kv_publisher
        self._asked_at = 0.0  # `perf_counter` at the last StateRequest

    def run_forever(self) -> None:
        while True:
            if not self._loop.has_work:
                self._scheduler.check_balance()
                self._handle(self._inbox.receive())
            for message in self._inbox.drain():
                self._handle(message)
            output = self._loop.step()
            if output:
                self._detokenizer.send(output)
            if self._kv_publisher is not None:
                self._kv_publisher.flush()

    def _handle(self, message: ToScheduler) -> None:
        match message:
            case Add():
                self._scheduler.add(
                    message.seq_id,
                    unpack_ids(message.prompt_ids).copy(),
                    message.sampling,
                    message.seed,
                    priority=message.priority,
                    salt=message.cache_salt,
                    text=message.text,
                    request_id=message.request_id,
                )
            case Abort():
                for seq_id in message.seq_ids:
                    self._scheduler.end(seq_id, "abort")
            case Stopped():
                self._scheduler.end(message.seq_id, "stop")
            case StatsRequest():
                counts = ProcessCounts("scheduler-0", self._scheduler.counts())
                self._detokenizer.send(StatsReport(message.query_id, [*message.counts, counts]))
                if self._loop.trace is not None and perf_counter() - self._asked_at > WATCH_SECONDS:
                    self._loop.trace = None
            case StateRequest():
                self._detokenizer.send(StateReport(message.query_id, self._state(message.since)))
            case FlushCache():
                self._detokenizer.send(Flushed(message.query_id, self._scheduler.flush_cache()))

    def _state(self, since: int) -> EngineState:
        """Return the state with the steps after number `since`, and record steps from now on."""
        loop, scheduler = self._loop, self._scheduler
        self._asked_at = perf_counter()
        loop.trace = loop.trace or StepTrace()
        return EngineState(
            time=self._asked_at,
            counts=scheduler.counts(),
            sequences=scheduler.sequences(MAX_SEQUENCES),
            nodes=scheduler.tree(MAX_NODES),
            steps=loop.trace.since(since),
        )


def run(worker: Worker) -> None:
    """Run the scheduler process of rank `worker.index`: build the engine, then plan (rank 0) or follow."""
    from minisgl.engine.device import join_ranks  # not above: `SchedulerServer` also serves engines without torch
    from minisgl.engine.engine import Engine

    config = worker.config
    folder = Path(config.engine.model_path)
    model = load_engine_model(folder, config.engine)
    grammars = GrammarMatchers(
        lambda: load_tokenizer(config.tokenizer_folder), vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    kv_publisher = None
    if worker.index == 0:
        if (kv_events := config.kv_events) is not None:
            kv_publisher = KVPublisher(context, kv_events, config.engine.page_size)
        grammars.prepare()  # in a thread, while the engine loads
    tp = join_ranks(config.engine, worker.index, worker.addresses)
    engine = Engine(
        config.engine,
        model,
        tp=tp,
        phase=worker.phase,
        progress=worker.index == 0 and logger.isEnabledFor(logging.INFO),
        max_prefill_tokens=config.scheduler.max_prefill_tokens,
        reuses_prefixes=reuses_prefixes(config.scheduler, model),
    )
    computes_here = engine.device.type == "cpu"
    if worker.index > 0:
        counts = StepCounts()
        worker.on_ping(lambda: counts.progress(computes_here))
        plans: Inbox[ToRank] = Inbox(context, worker.addresses.rank(worker.index), ToRank)
        worker.ready()
        follow(engine, plans, counts)
    logger.info("engine: %s", engine.describe())
    inbox: Inbox[ToScheduler] = Inbox(context, worker.addresses.scheduler, ToScheduler)
    detokenizer: Outbox[ToDetokenizer] = Outbox(context, worker.addresses.detokenizer)
    followers: list[Outbox[ToRank]] = [Outbox(context, worker.addresses.rank(rank)) for rank in range(1, tp.size)]
    observer = None if kv_publisher is None else kv_publisher.recorder
    loop = make_loop(config.scheduler, engine, model, followers, grammars, observer)
    process = SchedulerServer(loop, inbox, detokenizer, kv_publisher)
    worker.on_ping(lambda: loop.counts.progress(computes_here))
    worker.ready(engine.limits)
    process.run_forever()
