"""Looks at the engine for all who watch it: one question at a time, and not more often than pictures need."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from minisgl.message.engine_state import EngineState, InspectState, StateReport, StepRecord
from minisgl.server.api.requests.engine_client import EngineClient, Heartbeat

MIN_INTERVAL = 0.2  # seconds between questions, however many watch
TIMEOUT = 10.0  # seconds, for a scheduler in the middle of a step
MAX_STEPS = 8192  # that are kept for those who have not seen them


class Inspector:
    """Keeps the last state for MIN_INTERVAL. The scheduler is asked only while somebody asks here."""

    def __init__(self, client: EngineClient, heartbeat: Heartbeat) -> None:
        self._client = client
        self._heartbeat = heartbeat
        self._asking = asyncio.Lock()
        self._asked = 0.0
        self._state: EngineState | None = None
        self._steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)

    async def look(self, since: int) -> tuple[EngineState, list[StepRecord]]:
        """Return the state and the steps after one; ApiError if the engine does not answer."""
        async with self._asking:
            state = self._state
            if state is None or time.monotonic() - self._asked > MIN_INTERVAL:
                state = self._state = await self._ask()
                self._asked = time.monotonic()
        return state, [record for record in self._steps if record.step > since]

    async def _ask(self) -> EngineState:
        last = self._steps[-1] if self._steps else None
        known = -1 if last is None else last.step

        def question(query: int) -> InspectState:
            return InspectState(query, known)

        report = await self._client.ask(question, StateReport, TIMEOUT)
        state = report.state
        for record in state.steps:
            if last is not None and record.begin == last.begin:  # it has grown
                self._steps.pop()
            self._steps.append(record)
        self._heartbeat.note(state.counts)
        return state
