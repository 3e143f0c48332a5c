"""How much the server does besides the model: HTTP, ZeroMQ, tokenizing, detokenizing, scheduling.

Clients ask for streams all at once; the instant engine gives every running stream a token each step. What counts is
the steady window in which all streams run: from the last first token to the first end of a stream.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from minisgl.benchmark.client import Target
from minisgl.benchmark.launch import ServerProcess, ask_served
from minisgl.benchmark.load import run_load
from minisgl.benchmark.pipeline_server import PROFILE_DIR, STEP_MS
from minisgl.benchmark.processes import cpu_seconds, worker_pids
from minisgl.benchmark.profiler import ProfileEntry, read_profile
from minisgl.benchmark.record import RequestRecord
from minisgl.benchmark.statistics import Spread, spread
from minisgl.benchmark.workload import TimedRequest

GENERATOR = "load generator"
PROFILE_WAIT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class PipelineLoad:
    """What the clients ask for."""

    clients: int = 256
    prompt_tokens: int = 100
    output_tokens: int = 400
    processes: int = 1  # of the load generator


@dataclass(frozen=True, slots=True)
class ProcessCost:
    """One process in the window."""

    cores: float  # CPU seconds a second
    us_per_token: float  # of CPU time


@dataclass(frozen=True, slots=True)
class PipelineFigures:
    """One run at one step time."""

    step_ms: float
    offered_tokens_per_second: float | None  # all clients, one token a step; None: as fast as it can
    window_seconds: float
    tokens_per_second: float  # in the window
    tokens_per_event: float  # in the window; above 1 means that clients got several tokens at once
    whole_tokens_per_second: float  # from the first request to the last token
    ttft_ms: Spread | None
    gap_ms: Spread | None  # between the events of a stream
    us_per_token: float  # CPU time of all processes together
    processes: dict[str, ProcessCost] = field(default_factory=dict)
    profiles: dict[str, list[ProfileEntry]] = field(default_factory=dict)


def measure_pipeline(
    load: PipelineLoad, step_ms: float, server_flags: Sequence[str], *, profile: bool = False
) -> PipelineFigures:
    """Start the server, send the load once to warm up and once to measure, end the server."""
    with tempfile.TemporaryDirectory(prefix="minisgl-profile-") as folder:
        env = {STEP_MS: str(step_ms)} | ({PROFILE_DIR: folder} if profile else {})
        command = [sys.executable, "-m", "minisgl.benchmark.pipeline_server", "--port", "0", *server_flags]
        with ServerProcess(command, env=env) as server:
            pids = {name.partition(":")[2]: pid for name, pid in worker_pids(server.process.pid).items()}
            served = ask_served(server.base_url, model=None, context=None, vocab_size=None)
            if load.prompt_tokens + load.output_tokens > served.context:
                raise ValueError(f"{load} does not fit into the context of {served.context} tokens")
            target = Target(server.base_url, served.model, temperature=0.0)
            warming = _requests(PipelineLoad(load.clients, load.prompt_tokens, 16), served.vocab_size, seed=1)
            _checked(run_load(target, warming, label="warm up"))

            requests = _requests(load, served.vocab_size, seed=2)
            clock = _CpuClock(pids)
            if profile:
                _toggle_profilers(pids)
            label = f"step {step_ms:g} ms"
            records = _checked(run_load(target, requests, processes=load.processes, label=label, on_tick=clock.tick))
            profiles = _collect_profiles(Path(folder), pids) if profile else {}
    return _figures(load, step_ms, records, clock, profiles)


def _requests(load: PipelineLoad, vocab_size: int, seed: int) -> list[TimedRequest]:
    prompts = np.random.default_rng(seed).integers(0, vocab_size, (load.clients, load.prompt_tokens), dtype=np.int32)
    return [TimedRequest(0.0, prompt, load.output_tokens) for prompt in prompts]


def _checked(records: list[RequestRecord]) -> list[RequestRecord]:
    errors = [record.error for record in records if record.error is not None]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(records)} requests failed, the first with: {errors[0]}")
    return records


class _CpuClock:
    """CPU seconds of every process, looked at while the load runs."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._times: list[float] = []
        self._seconds: dict[str, list[float]] = {}

    def tick(self, now: float, generators: list[int]) -> None:
        groups = {name: [pid] for name, pid in self._pids.items()} | {GENERATOR: generators}
        seconds = {name: sum(map(cpu_seconds, pids)) for name, pids in groups.items()}
        if seconds[GENERATOR] == 0.0:  # it has ended
            return
        self._times.append(now)
        for name, spent in seconds.items():
            self._seconds.setdefault(name, []).append(spent)

    def between(self, begin: float, end: float) -> dict[str, float]:
        """CPU seconds of each process, linear between looks."""
        if not self._times:
            return {}
        return {
            name: float(np.diff(np.interp([begin, end], self._times, seconds))[0])
            for name, seconds in self._seconds.items()
        }


def _figures(
    load: PipelineLoad,
    step_ms: float,
    records: Sequence[RequestRecord],
    clock: _CpuClock,
    profiles: dict[str, list[ProfileEntry]],
) -> PipelineFigures:
    begin = max(record.times[0] for record in records)
    end = min(record.times[-1] for record in records)
    if end <= begin:  # the streams did not all run at one time
        begin, end = min(record.times[0] for record in records), max(record.times[-1] for record in records)
    times = np.concatenate([record.times for record in records])
    sizes = np.concatenate([record.sizes for record in records])
    inside = (times > begin) & (times <= end)
    tokens, events, seconds = int(sizes[inside].sum()), int(inside.sum()), end - begin
    spent = clock.between(begin, end)
    return PipelineFigures(
        step_ms=step_ms,
        offered_tokens_per_second=load.clients / step_ms * 1e3 if step_ms > 0 else None,
        window_seconds=seconds,
        tokens_per_second=tokens / seconds,
        tokens_per_event=tokens / max(1, events),
        whole_tokens_per_second=sum(record.completion_tokens for record in records) / float(times.max()),
        ttft_ms=spread([record.ttft * 1e3 for record in records]),
        gap_ms=spread((np.concatenate([np.diff(record.times) for record in records]) * 1e3).tolist()),
        us_per_token=sum(spent.values()) / tokens * 1e6,
        processes={name: ProcessCost(cpu / seconds, cpu / tokens * 1e6) for name, cpu in spent.items()},
        profiles=profiles,
    )


def _toggle_profilers(pids: Mapping[str, int]) -> None:
    for pid in pids.values():
        os.kill(pid, signal.SIGUSR1)


def _collect_profiles(folder: Path, pids: Mapping[str, int]) -> dict[str, list[ProfileEntry]]:
    _toggle_profilers(pids)
    deadline = time.monotonic() + PROFILE_WAIT_SECONDS
    wanted = {name.partition("-")[0] for name in pids}
    while len(list(folder.glob("*.json"))) < len(wanted) and time.monotonic() < deadline:
        time.sleep(0.05)
    return {path.stem: read_profile(path) for path in sorted(folder.glob("*.json"))}
