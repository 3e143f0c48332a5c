"""A load generator in processes of its own, open loop: requests leave on time, whatever became of those before them.

Only the turns of a session wait for each other: the next one leaves when its user has thought about the answer. Every
process takes each n-th session, encodes all of its requests beforehand, and says ready; then all start at one moment.
Their records come back as requests end, so that a load which shows enough can be stopped; requests that still run then
are told as far as they came.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from operator import attrgetter

import uvloop
from tqdm import tqdm

from measuring.client import RequestRecord, Target, ask
from measuring.workload import TimedRequest

LEAD_SECONDS = 0.05  # from the word to start to the first request
TICK_SECONDS = 0.1  # between reports of a process


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Records of a load's requests, in order, and what it cost to send them."""

    records: list[RequestRecord]  # all requests, or those that had ended when the load was stopped
    lost: list[RequestRecord]  # requests that ran when it was stopped and were lost, with an error
    cut: list[RequestRecord]  # requests that ran when it was stopped, with the tokens that had come
    cpu_share: float  # CPU time of the generator's busiest process over the time that it ran; 1: a whole core
    stopped_at: float | None  # seconds after the start; none: it ended by itself

    @property
    def stopped(self) -> bool:
        return self.stopped_at is not None


Session = list[tuple[int, TimedRequest]]  # turns in order, with their indices in the load


@dataclass(frozen=True, slots=True)
class _Part:
    """Sessions that one process sends."""

    target: Target
    sessions: list[Session]
    lost: Lost | None


@dataclass(frozen=True, slots=True)
class _Turn:
    """Request that is ready to be sent."""

    payload: bytes
    record: RequestRecord
    think: float  # seconds after the answer before


@dataclass(frozen=True, slots=True)
class _Report:
    """Requests that ended since the last report of a process; the last one has its share of a core."""

    records: list[RequestRecord]
    answered: bool  # True if all of its sessions have begun to be answered
    lost: list[RequestRecord] = field(default_factory=list)  # running requests that are lost; each is told once
    cut: list[RequestRecord] = field(default_factory=list)
    cpu_share: float | None = None


Tick = Callable[[float, list[int]], None]  # seconds after the start, the generator's process ids
Enough = Callable[[list[RequestRecord]], bool]  # judges the requests that have ended or are lost
Lost = Callable[[RequestRecord, float], bool]  # judges a running request, seconds after the start


def sessions_of(load: Sequence[TimedRequest]) -> list[Session]:
    """Return the sessions in order of their starts. ValueError if a request follows one that does not precede it."""
    sessions: list[Session] = []
    ends: dict[int, Session] = {}  # by the index of the last turn
    for index, request in enumerate(load):
        if request.follows is None:
            session: Session = []
            sessions.append(session)
        elif request.follows in ends:
            session = ends.pop(request.follows)
        else:
            raise ValueError(f"request {index} follows request {request.follows}, which is not the end of a session")
        session.append((index, request))
        ends[index] = session
    return sorted(sessions, key=lambda turns: turns[0][1].at)


def run_load(
    target: Target,
    load: Sequence[TimedRequest],
    *,
    processes: int = 1,
    label: str = "",
    on_tick: Tick | None = None,
    enough: Enough | None = None,
    lost: Lost | None = None,
    seconds: float | None = None,
) -> LoadRun:
    """Send a load and return what became of it. Shows a bar on stderr. RuntimeError when a process dies.

    When `enough`, asked ten times a second, is True, or `seconds` after the first request of every session has its
    first token, the connections of all requests that still run are closed. `enough` is shown those of them for which
    `lost` is True, too, as errors.
    """
    sessions = sessions_of(load)
    processes = max(1, min(processes, len(sessions)))
    spawn = multiprocessing.get_context("spawn")
    workers = []
    pipes: list[Connection] = []
    try:
        for number in range(processes):
            ours, theirs = spawn.Pipe()
            part = _Part(target, sessions[number::processes], lost)
            worker = spawn.Process(target=_work, args=(theirs, part), daemon=True)
            worker.start()
            theirs.close()
            workers.append(worker)
            pipes.append(ours)
        for pipe in pipes:
            pipe.recv()
        start = time.monotonic() + LEAD_SECONDS
        for pipe in pipes:
            pipe.send(start)
        with tqdm(total=len(load), desc=label, unit="request") as bar:
            run = _gather(pipes, bar, start, [worker.pid or 0 for worker in workers], on_tick, enough, seconds)
    except EOFError:
        raise RuntimeError("a process of the load generator died") from None
    finally:
        for pipe in pipes:
            pipe.close()
        for worker in workers:
            worker.join(timeout=10)
            worker.kill()
    return run


def _gather(
    pipes: Sequence[Connection],
    bar: tqdm[None],
    start: float,
    pids: list[int],
    on_tick: Tick | None,
    enough: Enough | None,
    seconds: float | None,
) -> LoadRun:
    records: list[RequestRecord] = []
    lost: dict[int, RequestRecord] = {}
    cut: list[RequestRecord] = []
    cpu_share = 0.0
    stopped_at: float | None = None
    end = math.inf
    working, unanswered = list(pipes), set(pipes)
    while working:
        for pipe in wait(working, timeout=TICK_SECONDS):
            assert isinstance(pipe, Connection)
            report: _Report = pipe.recv()
            records += report.records
            lost |= {record.index: record for record in report.lost}
            for record in report.records:
                lost.pop(record.index, None)
            cut += report.cut
            bar.update(len(report.records))
            if report.answered:
                unanswered.discard(pipe)
            if report.cpu_share is not None:
                cpu_share = max(cpu_share, report.cpu_share)
                working.remove(pipe)
        if on_tick is not None:
            on_tick(time.monotonic() - start, pids)
        now = time.monotonic() - start
        if seconds is not None and not unanswered:
            end = min(end, now + seconds)
        if stopped_at is None and (now >= end or (enough is not None and enough([*records, *lost.values()]))):
            stopped_at = now
            for pipe in working:
                with contextlib.suppress(OSError):  # it has ended just now
                    pipe.send("stop")
    by_index = attrgetter("index")
    return LoadRun(sorted(records, key=by_index), list(lost.values()), sorted(cut, key=by_index), cpu_share, stopped_at)


def _work(pipe: Connection, part: _Part) -> None:
    """Run one process of the load generator."""
    sessions = [[_prepare(part.target, index, request) for index, request in session] for session in part.sessions]
    gc.collect()
    gc.disable()  # a collection would look like a pause of the server
    pipe.send("ready")
    start: float = pipe.recv()
    begin, spent = time.monotonic(), time.process_time()
    ended, cut = uvloop.run(_send_all(part, sessions, start, pipe))
    cpu_share = (time.process_time() - spent) / (time.monotonic() - begin)
    pipe.send(_Report(ended, True, cut=cut, cpu_share=cpu_share))


def _prepare(target: Target, index: int, request: TimedRequest) -> _Turn:
    begins = request.follows is None
    record = RequestRecord(index, request.at if begins else 0.0, len(request.prompt), request.max_tokens)
    return _Turn(target.encode(request), record, 0.0 if begins else request.at)


async def _send_all(
    part: _Part, sessions: list[list[_Turn]], start: float, pipe: Connection
) -> tuple[list[RequestRecord], list[RequestRecord]]:
    """Send until all has ended or the pipe says to stop.

    Return the records of requests that have ended and were not reported yet, and of those that run.
    """
    ended: list[RequestRecord] = []
    running: dict[int, RequestRecord] = {}

    async def run_session(turns: list[_Turn]) -> None:
        failed = False
        for place, turn in enumerate(turns):
            if place:
                turn.record.due = time.monotonic() - start + turn.think
            if failed:
                turn.record.error = "a turn before it failed"
            else:
                await asyncio.sleep(turn.think)
                running[turn.record.index] = turn.record
                await ask(part.target, turn.payload, turn.record, start)
                del running[turn.record.index]
                failed = turn.record.error is not None
            ended.append(turn.record)

    async def send() -> None:
        tasks = []
        for session in sessions:
            delay = start + session[0].record.due - time.monotonic()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.create_task(run_session(session)))
        await asyncio.gather(*tasks)

    async def report() -> None:
        answered = False
        told: set[int] = set()
        while not pipe.poll():
            await asyncio.sleep(TICK_SECONDS)
            begun = answered or all(turns[0].record.times or turns[0].record.error for turns in sessions)
            now = time.monotonic() - start
            untold = [record for index, record in running.items() if index not in told]
            lost = [replace(one, error="lost") for one in untold if part.lost and part.lost(one, now)]
            told.update(record.index for record in lost)
            if ended or lost or (begun and not answered):
                pipe.send(_Report(ended.copy(), begun, lost))
                ended.clear()
            answered = begun

    done, _ = await asyncio.wait(
        {asyncio.create_task(send()), asyncio.create_task(report())}, return_when=asyncio.FIRST_COMPLETED
    )
    for task in done:
        task.result()
    # Tokens still come until all connections are closed, so the records are copied at this moment.
    cut = [
        replace(one, times=one.times[:], sizes=one.sizes[:], completion_tokens=len(one.times))
        for one in running.values()
    ]
    return ended, cut
