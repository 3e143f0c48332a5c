"""What long prompts do to the streams that run beside them: the gaps between the streams' tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minisgl.benchmark.record import RequestRecord
from minisgl.benchmark.workload import TimedRequest


@dataclass(frozen=True, slots=True)
class Interference:
    """Streams that start together, and then one long prompt after another, each answered with one token."""

    streams: int
    stream_tokens: int  # each gets
    prompts: int
    prompt_tokens: int
    every: float  # seconds between prompts
    quiet: float  # seconds before the first prompt
    vocab_size: int

    def load(self) -> list[TimedRequest]:
        rng = np.random.default_rng(0)

        def request(at: float, length: int, max_tokens: int) -> TimedRequest:
            return TimedRequest(at, rng.integers(0, self.vocab_size, length, dtype=np.int32), max_tokens)

        streams = [request(0.0, 16, self.stream_tokens) for _ in range(self.streams)]
        prompts = [request(self.quiet + number * self.every, self.prompt_tokens, 1) for number in range(self.prompts)]
        return streams + prompts


def token_gaps(work: Interference, records: Sequence[RequestRecord]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Milliseconds between the tokens of all streams while the long prompts come. Raises if a request failed."""
    failed = [record.error for record in records if record.error]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed, the first: {failed[0]}")
    end = work.quiet + work.prompts * work.every
    gaps = []
    for record in records[: work.streams]:
        times = np.asarray(record.times)
        times = times[(times >= work.quiet) & (times <= end)]
        gaps.append(np.diff(times) * 1e3)
    return np.concatenate(gaps)
