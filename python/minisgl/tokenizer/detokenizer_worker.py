"""Detokenizer worker: turns output ids of the scheduler into text for the API server, and reports stop strings."""

from __future__ import annotations

import zmq

from minisgl.message.engine_state import StateReport
from minisgl.message.shared import Flushed, ProcessCounts, StatsReport
from minisgl.message.socket import Inbox, Outbox
from minisgl.message.to_api import OutputDeltas, ToApi
from minisgl.message.to_detokenizer import StepOutput, ToDetokenizer
from minisgl.message.to_scheduler import ToScheduler
from minisgl.process.worker import Worker
from minisgl.tokenizer.detokenizer import Detokenizer
from minisgl.tokenizer.load_tokenizer import load_decoder


def run(worker: Worker) -> None:
    """Run the process: load, report ready, serve until the supervisor ends it."""
    with worker.phase("load detokenizer"):
        detokenizer = Detokenizer(load_decoder(worker.config.tokenizer_folder))
    context = zmq.Context()
    inbox: Inbox[ToDetokenizer] = Inbox(context, worker.addresses.detokenizer, ToDetokenizer)
    api: Outbox[ToApi] = Outbox(context, worker.addresses.api)
    scheduler: Outbox[ToScheduler] = Outbox(context, worker.addresses.scheduler)
    worker.ready()
    while True:
        message = inbox.receive()
        if isinstance(message, StepOutput):
            deltas, stopped = detokenizer.apply(message)
            if deltas:
                api.send(OutputDeltas(deltas))
            for stop in stopped:
                scheduler.send(stop)
        elif isinstance(message, Flushed | StateReport):
            api.send(message)
        else:
            counts = ProcessCounts(
                "detokenizer",
                {"sequences": detokenizer.open_sequences, "dropped_tokens": detokenizer.dropped_tokens},
            )
            api.send(StatsReport(message.query_id, [*message.counts, counts]))
