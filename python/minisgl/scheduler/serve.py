"""Rank 0 as a server: feeds the step loop from the inbox and tells the detokenizer what each step brought. No torch."""

from __future__ import annotations

from minisgl.message.socket import Inbox, Outbox
from minisgl.message.to_detokenizer import ToDetokenizer
from minisgl.message.to_scheduler import Add, Stopped, ToScheduler
from minisgl.message.types import Abort, FlushCache, Flushed, ProcessCounts, Report, StatsRequest, unpack_ids
from minisgl.scheduler.loop import StepLoop


class SchedulerServer:
    """Feeds the step loop from the inbox and tells the detokenizer what each step brought."""

    def __init__(self, loop: StepLoop, inbox: Inbox[ToScheduler], detokenizer: Outbox[ToDetokenizer]) -> None:
        self._loop = loop
        self._scheduler = loop.scheduler
        self._inbox = inbox
        self._detokenizer = detokenizer

    def run_forever(self) -> None:
        while True:
            if not self._loop.has_work:
                self._scheduler.check_balance()
                self._handle(self._inbox.receive())
            for message in self._inbox.drain():
                self._handle(message)
            report = self._loop.step()
            if report:
                self._detokenizer.send(report)

    def _handle(self, message: ToScheduler) -> None:
        match message:
            case Add():
                self._scheduler.add(
                    message.seq_id,
                    unpack_ids(message.prompt_ids).copy(),
                    message.sampling,
                    message.seed,
                    message.priority,
                    message.cache_salt,
                    message.text,
                )
            case Abort():
                for seq_id in message.seq_ids:
                    self._scheduler.end(seq_id, "abort")
            case Stopped():
                self._scheduler.end(message.seq_id, "stop")
            case StatsRequest():
                counts = ProcessCounts("scheduler-0", self._scheduler.counts())
                self._detokenizer.send(Report(message.query, [*message.counts, counts]))
            case FlushCache():
                self._detokenizer.send(Flushed(message.query, self._scheduler.flush_cache()))
