"""Waiting until a server has nothing left to do, so that one load does not pay for what another left behind."""

from __future__ import annotations

import asyncio
import re
import time
from urllib.error import URLError
from urllib.request import Request, urlopen

import numpy as np

from measuring.client import RequestRecord, Target, ask
from measuring.workload import TimedRequest

# Gauges of vLLM's and SGLang's names.
_BUSY = re.compile(
    r"^\w+:(?:num_requests_running|num_requests_waiting|num_running_reqs|num_queue_reqs)(?:\{.*\})? (\S+)$",
    re.MULTILINE,
)
PROMPT_TOKENS = 16
PAUSE_SECONDS = 0.2
NOISE_SECONDS = 0.02  # between lone requests to a server that is idle


class NotIdle(Exception):
    """The server still worked when all its requests had ended, or answered no more."""


class IdleWatch:
    """Knowledge of how fast an idle server answers a lone short request.

    The server is idle again when its gauges, if /metrics has any, count no request, and a lone request gets its first
    token about as fast as at the start.
    """

    def __init__(self, target: Target, vocab_size: int) -> None:
        """Send three lone requests. NotIdle, with the server's reason, if one fails."""
        self._target = target
        self._vocab_size = vocab_size
        self._tokens = np.random.default_rng()  # nobody has cached them
        answers = [self._ask_alone() for _ in range(3)]
        for answer in answers:
            if answer.error is not None:
                raise NotIdle(f"the server does not answer a lone request: {answer.error}")
        self._limit = 2 * max(answer.ttft for answer in answers) + NOISE_SECONDS

    def wait(self, timeout: float) -> float:
        """Return the seconds until the server was idle. NotIdle when it was not after `timeout` seconds."""
        begin = time.monotonic()
        while (passed := time.monotonic() - begin) < timeout:
            if not self._counts_requests():
                answer = self._ask_alone()
                if answer.error is None and answer.ttft <= self._limit:
                    return passed
            time.sleep(PAUSE_SECONDS)
        raise NotIdle(f"the server was not idle {timeout:g} s after its last answer")

    def _ask_alone(self) -> RequestRecord:
        prompt = self._tokens.integers(0, self._vocab_size, PROMPT_TOKENS, dtype=np.int32)
        record = RequestRecord(0, 0.0, PROMPT_TOKENS, 1)
        asyncio.run(ask(self._target, self._target.encode(TimedRequest(0.0, prompt, 1)), record, time.monotonic()))
        return record

    def _counts_requests(self) -> bool:
        headers = {"Authorization": f"Bearer {self._target.api_key}"} if self._target.api_key else {}
        try:
            with urlopen(Request(f"{self._target.base_url}/metrics", headers=headers), timeout=10) as answer:
                return count_requests(answer.read().decode()) > 0
        except (URLError, OSError, ValueError):
            return False


def count_requests(metrics: str) -> float:
    """Return the largest gauge of requests that run or wait, in Prometheus' text format; 0 if there is none."""
    return max((float(value) for value in _BUSY.findall(metrics)), default=0.0)
