"""An open-loop load generator in processes of its own: requests leave on time, whatever became of those before them.

Every process takes each n-th request, encodes it beforehand, and says ready; then all start at one moment.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import uvloop
from tqdm import tqdm

from measuring.client import RequestRecord, Target, ask
from measuring.workload import TimedRequest

LEAD_SECONDS = 0.05  # from the word to start to the first request
TICK_SECONDS = 0.1  # between reports of progress


@dataclass(frozen=True, slots=True)
class _Part:
    """Requests that one process sends."""

    target: Target
    requests: list[tuple[int, TimedRequest]]  # with their indices in the load


Tick = Callable[[float, list[int]], None]  # seconds after the start, the generator's process ids


def run_load(
    target: Target, load: Sequence[TimedRequest], *, processes: int = 1, label: str = "", on_tick: Tick | None = None
) -> list[RequestRecord]:
    """Send a load and return a record of each of its requests, in order. Shows a bar on stderr."""
    indexed = list(enumerate(load))
    processes = max(1, min(processes, len(load)))
    spawn = multiprocessing.get_context("spawn")
    workers = []
    pipes: list[Connection] = []
    try:
        for number in range(processes):
            ours, theirs = spawn.Pipe()
            worker = spawn.Process(target=_work, args=(theirs, _Part(target, indexed[number::processes])), daemon=True)
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
            records = _gather(pipes, bar, start, [worker.pid or 0 for worker in workers], on_tick)
    except EOFError:
        raise RuntimeError("a process of the load generator died") from None
    finally:
        for pipe in pipes:
            pipe.close()
        for worker in workers:
            worker.join(timeout=10)
            worker.kill()
    return sorted(records, key=lambda record: record.index)


def _gather(
    pipes: Sequence[Connection], bar: tqdm[None], start: float, pids: list[int], on_tick: Tick | None
) -> list[RequestRecord]:
    records: list[RequestRecord] = []
    working = list(pipes)
    while working:
        for pipe in wait(working, timeout=TICK_SECONDS):
            assert isinstance(pipe, Connection)
            message = pipe.recv()
            if isinstance(message, int):
                bar.update(message)
            else:
                records += message
                working.remove(pipe)
        if on_tick is not None:
            on_tick(time.monotonic() - start, pids)
    bar.update(len(records) - bar.n)
    return records


def _work(pipe: Connection, part: _Part) -> None:
    """The life of one process."""
    payloads = [part.target.encode(request) for _, request in part.requests]
    records = [
        RequestRecord(index, request.at, len(request.prompt), request.max_tokens) for index, request in part.requests
    ]
    gc.collect()
    gc.disable()  # a collection would look like a pause of the server
    pipe.send("ready")
    start: float = pipe.recv()
    uvloop.run(_send_all(part.target, payloads, records, start, pipe))
    pipe.send(records)


async def _send_all(
    target: Target, payloads: list[bytes], records: list[RequestRecord], start: float, pipe: Connection
) -> None:
    num_ended = 0

    async def one(payload: bytes, record: RequestRecord) -> None:
        nonlocal num_ended
        await ask(target, payload, record, start)
        num_ended += 1

    async def tell() -> None:
        told = 0
        while True:
            await asyncio.sleep(TICK_SECONDS)
            if num_ended > told:
                pipe.send(num_ended - told)
                told = num_ended

    telling = asyncio.create_task(tell())
    tasks = []
    for index, record in enumerate(records):
        delay = start + record.due - time.monotonic()
        if delay > 0:
            await asyncio.sleep(delay)
        tasks.append(asyncio.create_task(one(payloads[index], record)))
        payloads[index] = b""
    await asyncio.gather(*tasks)
    telling.cancel()
