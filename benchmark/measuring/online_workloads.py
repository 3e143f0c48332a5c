"""Workloads for online serving by name, each at any rate: synthetic lengths, sessions, and traces from files.

A workload has the same requests at every rate; only the time between them changes, and their tokens, so that no cache
answers one probe with what another left in it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from measuring.sessions import AGENT, CONVERSATION, SessionShape, session_load
from measuring.traces import TraceRow, read_trace, replay
from measuring.workload import Lengths, LengthSource, TimedRequest, UniformLengths, poisson_arrivals, synthetic_load


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a server that a load must keep to."""

    vocab_size: int
    context: int  # tokens, prompt and output together


class OnlineWorkload(Protocol):
    """Source of requests at a rate."""

    @property
    def name(self) -> str: ...

    @property
    def rates(self) -> tuple[float, float]:
        """Lowest and highest rate of a search, in requests per second, where --range gives none."""
        ...

    def pace(self, rate: float) -> float | None:
        """Return what times its own pace a trace has at this rate; None if there is no such thing."""
        ...

    def load(self, rate: float, seed: int, token_seed: int, limits: Limits) -> tuple[list[TimedRequest], int]:
        """Return requests that come at `rate` a second on average, and how many were cut to the context."""
        ...


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Poisson arrivals of requests that share nothing."""

    name: str
    lengths: LengthSource
    count: int
    rates: tuple[float, float] = (0.5, 64.0)

    def pace(self, rate: float) -> float | None:  # noqa: ARG002
        return None

    def load(self, rate: float, seed: int, token_seed: int, limits: Limits) -> tuple[list[TimedRequest], int]:
        arrivals = [at / rate for at in poisson_arrivals(random.Random(seed), 1.0, self.count)]
        return synthetic_load(
            seed,
            arrivals,
            self.lengths,
            vocab_size=limits.vocab_size,
            context=limits.context,
            token_seed=token_seed,
        )


@dataclass(frozen=True, slots=True)
class Sessions:
    """Poisson arrivals of sessions; inside each, turns wait for answers."""

    name: str
    shape: SessionShape
    count: int
    rates: tuple[float, float] = (0.5, 64.0)

    def pace(self, rate: float) -> float | None:  # noqa: ARG002
        return None

    def load(self, rate: float, seed: int, token_seed: int, limits: Limits) -> tuple[list[TimedRequest], int]:
        return session_load(
            self.shape,
            rate,
            self.count,
            seed=seed,
            token_seed=token_seed,
            vocab_size=limits.vocab_size,
            context=limits.context,
        )


@dataclass(frozen=True, slots=True)
class Trace:
    """Replay of the first requests of a trace, faster or slower than they came."""

    name: str
    rows: list[TraceRow] = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.rows) < 2 or self.rows[-1].at <= 0:
            raise ValueError(f"{self.name}: no rate follows from {len(self.rows)} requests that come all at once")

    @property
    def own_rate(self) -> float:
        """Requests per second at the trace's own pace."""
        return len(self.rows) / self.rows[-1].at

    @property
    def rates(self) -> tuple[float, float]:
        return 0.25 * self.own_rate, 0.75 * self.own_rate

    def pace(self, rate: float) -> float | None:
        return rate / self.own_rate

    def load(self, rate: float, seed: int, token_seed: int, limits: Limits) -> tuple[list[TimedRequest], int]:  # noqa: ARG002
        speed = rate / self.own_rate
        return replay(self.rows, speed=speed, seed=token_seed, vocab_size=limits.vocab_size, context=limits.context)


LENGTHS: dict[str, LengthSource] = {
    "poisson": Lengths(1740, 343),
    "1k1k": UniformLengths(1024, 1024),
    "1k8k": UniformLengths(1024, 8192),
    "8k1k": UniformLengths(8192, 1024),
}
SESSIONS = {"conversation": CONVERSATION, "agent": AGENT}


def make_workload(name: str, count: int, *, scale: float = 1.0, think: float = 1.0) -> OnlineWorkload:
    """Return `count` requests of the workload by this name, or of the trace in the file by this name.

    `scale` multiplies lengths, but not those of a trace; `think` multiplies think times. ValueError for a file that is
    no trace or too short a one, OSError for none.
    """
    if lengths := LENGTHS.get(name):
        return Synthetic(name, lengths.scaled(scale), count)
    if shape := SESSIONS.get(name):
        return Sessions(name, shape.scaled(scale, think), count)
    path = Path(name)
    rows = read_trace(path, count)
    if len(rows) < count:
        raise ValueError(f"{name} has {len(rows)} requests, {count} are asked for")
    return Trace(path.stem, rows)
