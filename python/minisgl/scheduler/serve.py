"""Rank 0 as a server: feeds the step loop from the inbox and tells the detokenizer what each step brought. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.message.relayed import Abort, FlushCache, Flushed, Report, StatsRequest
from minisgl.message.socket import Inbox, Outbox
from minisgl.message.to_detokenizer import Open, StepOutput, ToDetokenizer
from minisgl.message.to_scheduler import Add, Stopped, ToScheduler
from minisgl.message.types import ProcessCounts, TextOptions, pack_ids, unpack_ids
from minisgl.scheduler.loop import StepLoop
from minisgl.scheduler.report import StepReport


def step_output(report: StepReport, texts: Sequence[TextOptions]) -> StepOutput:
    """A step's report for the detokenizer, with the text options of those who entered."""
    opened = [
        Open(entered.seq_id, text, entered.cached_tokens, entered.min_tokens)
        for entered, text in zip(report.entered, texts, strict=True)
    ]
    return StepOutput(
        opened,
        report.seq_ids,
        pack_ids(report.tokens),
        report.ended,
        report.logprobs,
        report.prompt_logprobs,
    )


class SchedulerServer:
    """Feeds the step loop from the inbox and tells the detokenizer what each step brought."""

    def __init__(self, loop: StepLoop, inbox: Inbox[ToScheduler], detokenizer: Outbox[ToDetokenizer]) -> None:
        self._loop = loop
        self._scheduler = loop.scheduler
        self._inbox = inbox
        self._detokenizer = detokenizer
        self._texts: dict[int, TextOptions] = {}  # of sequences that wait

    def run_forever(self) -> None:
        while True:
            if not self._loop.has_work:
                self._scheduler.check_balance()
                self._handle(self._inbox.receive())
            for message in self._inbox.drain():
                self._handle(message)
            report = self._loop.step()
            if report:
                texts = [self._texts.pop(entered.seq_id) for entered in report.entered]
                self._detokenizer.send(step_output(report, texts))

    def _handle(self, message: ToScheduler) -> None:
        match message:
            case Add():
                self._texts[message.seq_id] = message.text
                prompt_ids = unpack_ids(message.prompt_ids).copy()
                self._scheduler.add(
                    message.seq_id, prompt_ids, message.sampling, message.seed, message.priority, message.cache_salt
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
