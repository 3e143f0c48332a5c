"""The page at /, with a chat and the glass box, which shows the server at work, and the state that the page reads.

The page is one file that loads nothing from elsewhere. The content security policy allows its script and style by their
hashes and nothing else, so text of a client or of the model cannot run. The page needs no key; its data does.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
from collections import deque
from functools import cached_property
from pathlib import Path

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import minisgl
from minisgl import __version__
from minisgl.core import FinishReason
from minisgl.message.engine_state import EngineState, StateReport, StateRequest, StepRecord
from minisgl.sampling_params import InvalidRequest
from minisgl.server.api.metrics import EngineLoad, Histogram
from minisgl.server.api.routes.endpoint import Endpoint, Routes, json_response
from minisgl.server.api.routes.service import Service

UI = Path(minisgl.__file__).parent / "ui"
INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
MAX_STEP = 2**63 - 1
MIN_INTERVAL = 0.2  # seconds between queries to the scheduler, however many watchers there are
TIMEOUT = 10.0  # seconds, for a scheduler in the middle of a step
MAX_STEPS = 8192  # steps kept for watchers that have not seen them


class DebugState(msgspec.Struct, frozen=True, kw_only=True):
    """State of the server at one moment; its totals are those of /metrics."""

    version: str
    model: str
    page_size: int
    max_seq_len: int
    max_running: int
    cache: str
    load: EngineLoad
    engine: EngineState
    steps: list[StepRecord]  # steps after `since`
    prompt_tokens: int  # since the server's start, as are the fields below
    generation_tokens: int
    finished: dict[FinishReason, int]  # sequences
    time_to_first_token: Histogram  # seconds
    time_between_tokens: Histogram  # seconds


class GlassBoxRoutes(Routes):
    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._asking = asyncio.Lock()
        self._asked = 0.0
        self._state: EngineState | None = None
        self._steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)

    def endpoints(self) -> list[Endpoint]:
        if not self._service.config.http.ui:
            return []
        return [
            Endpoint("/", self.page, documented=False),
            Endpoint("/guide/{page}", self.guide, documented=False),
            Endpoint("/debug/state", self.state, answers=(DebugState,), errors=(400,)),
        ]

    async def page(self, _request: Request) -> Response:
        """Return the page."""
        html, headers = self._page
        return Response(html, headers=headers, media_type="text/html")

    @cached_property
    def _page(self) -> tuple[bytes, dict[str, str]]:
        html = (UI / "index.html").read_text(encoding="utf-8")
        return html.encode(), {
            "content-security-policy": content_security_policy(html),
            "cache-control": "no-cache",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }

    async def guide(self, request: Request) -> Response:
        """Return a page of the documentation as Markdown."""
        path = self._guide.get(request.path_params["page"])
        if path is None:
            raise HTTPException(404)
        headers = {"x-content-type-options": "nosniff"}
        return Response(path.read_bytes(), headers=headers, media_type="text/plain")

    @cached_property
    def _guide(self) -> dict[str, Path]:
        return {path.name: path for path in (UI / "guide").glob("*.md")}

    async def state(self, request: Request) -> Response:
        """Return requests, steps, pages and cached prefixes of the engine, and the totals of /metrics.

        With `?since=N`, only steps after step N are listed. Steps are recorded only while this route is polled.
        """
        service = self._service
        state, steps = await self._look(_since(request))
        config, metrics = service.config, service.client.metrics
        return json_response(
            DebugState(
                version=__version__,
                model=config.model_name,
                page_size=config.engine.page_size,
                max_seq_len=service.limits.max_seq_len,
                max_running=config.engine.max_running_requests,
                cache=config.scheduler.cache,
                load=service.load(),
                engine=msgspec.structs.replace(state, steps=[]),
                steps=steps,
                prompt_tokens=metrics.prompt_tokens,
                generation_tokens=metrics.generation_tokens,
                finished=metrics.finished,
                time_to_first_token=metrics.time_to_first_token,
                time_between_tokens=metrics.inter_token_latency,
            )
        )

    async def _look(self, since: int) -> tuple[EngineState, list[StepRecord]]:
        """Return the engine's state and the steps after number `since`; ApiError if the engine does not answer.

        The scheduler is asked on behalf of all watchers, once at a time, at most every MIN_INTERVAL.
        """
        async with self._asking:
            state = self._state
            if state is None or time.monotonic() - self._asked > MIN_INTERVAL:
                state = self._state = await self._ask()
                self._asked = time.monotonic()
        return state, [record for record in self._steps if record.step > since]

    async def _ask(self) -> EngineState:
        last = self._steps[-1] if self._steps else None
        known = -1 if last is None else last.step
        report = await self._service.client.ask(lambda query_id: StateRequest(query_id, known), StateReport, TIMEOUT)
        for record in report.state.steps:
            if last is not None and record.begin == last.begin:  # the last record, to which steps have been added
                self._steps.pop()
            self._steps.append(record)
        self._service.heartbeat.scheduler_counts = report.state.counts  # so that /metrics has the newest
        return report.state


def content_security_policy(html: str) -> str:
    """Return the policy of a page that needs nothing but its own inline script and style, and this server."""
    sources = {"script": "", "style": ""}
    for tag, text in INLINE.findall(html):
        sources[tag] += f" 'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    return (
        f"default-src 'none'; script-src{sources['script']}; style-src{sources['style']}; connect-src 'self'; "
        "img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )


def _since(request: Request) -> int:
    text = request.query_params.get("since", "-1")
    if not re.fullmatch(r"-1|[0-9]{1,19}", text, re.ASCII) or int(text) > MAX_STEP:
        raise InvalidRequest("since", f"since must be the number of a step, or -1, not {text[:40]!r}")
    return int(text)
