"""The server's pulse: once a second every process on a request's way is asked for its counts.

Of several ranks that is the first, which waits for the others in every step.

An answer shows that tokenizers, scheduler and detokenizer all take messages, so /health needs to ask nobody, and the
counts are at hand for /metrics.
"""

from __future__ import annotations

import asyncio
import time

from minisgl.server.api.requests.engine_client import EngineClient

INTERVAL = 1.0  # seconds between an answer and the next question
PATIENCE = 30.0  # seconds to wait for an answer before asking again: a step of a slow device may take long


class Heartbeat:
    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._last = time.monotonic()
        self.counts: dict[str, dict[str, int]] = {}  # of each process, when it last answered

    async def beat_forever(self) -> None:
        while True:
            await self.beat()
            await asyncio.sleep(INTERVAL)

    async def beat(self) -> None:
        """Ask once; if not all answer, the last answer grows older."""
        processes, complete = await self._client.query_counts(PATIENCE)
        self.counts |= {process.process: process.counts for process in processes}
        if complete:
            self._last = time.monotonic()

    @property
    def age(self) -> float:
        """Seconds since all processes last answered."""
        return time.monotonic() - self._last
