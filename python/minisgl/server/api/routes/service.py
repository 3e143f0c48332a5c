"""Read and check a request's body, and submit its job: the part that all routes share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec
from starlette.requests import Request

from minisgl.config import ServerConfig
from minisgl.limits import Limits
from minisgl.message.packed_ids import num_ids
from minisgl.message.to_api import Encoded
from minisgl.message.to_tokenizer import ChatPrompt, Encode, Query
from minisgl.parsers.parser_choice import NONE, Parsers
from minisgl.pooling.pooling_config import NO_TEXT
from minisgl.server.api.answers.answer import Answer, Writer
from minisgl.server.api.answers.chat import chat_job
from minisgl.server.api.answers.parsed_choice import ChatOptions
from minisgl.server.api.answers.writer_thread import WriterThread
from minisgl.server.api.bodies.parsing_turns import ParsingTurns
from minisgl.server.api.bodies.read_body import (
    MAX_ITEMS,
    B,
    check_numbers,
    read_body,
    read_fields,
    size_of_objects,
    validate,
)
from minisgl.server.api.bodies.request_body import RequestBody
from minisgl.server.api.bodies.route_bodies import ChatBody
from minisgl.server.api.bodies.tools import ToolUse
from minisgl.server.api.http.errors import ApiError, model_not_found
from minisgl.server.api.http.gates import client_of
from minisgl.server.api.http.middleware import hold_bytes, request_id_of
from minisgl.server.api.metrics import EngineLoad
from minisgl.server.api.requests.engine_client import EngineClient, Heartbeat
from minisgl.server.api.requests.open_request import Job
from minisgl.server.api.requests.queries import R
from minisgl.server.api.responses.store import ResponseStore

logger = logging.getLogger(__name__)

TOKENIZER_TIMEOUT = 60.0  # seconds, because a tokenizer worker may have other requests to answer first
MAX_LOGGED = 100  # names that a `LogOnce` logs
MAX_NAME = 80  # characters of a name that a `LogOnce` logs and keeps
UNKNOWN_FIELD = "requests have the unknown field %r; it has no effect"
IGNORED_TYPE = "requests have tools of the type %r, which are passed over: only functions are known"


class LogOnce:
    """Logs a text with each new name once, for at most MAX_LOGGED names.

    Names are cut: the clients make them, and one may be as long as a body.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._logged: set[str] = set()

    def log(self, names: Set[str]) -> None:
        if len(self._logged) == MAX_LOGGED:
            return
        for name in islice({name[:MAX_NAME] for name in names} - self._logged, MAX_LOGGED - len(self._logged)):
            self._logged.add(name)
            logger.warning(self._text, name)


class IgnoredTools:
    """Logs once which types of tools are ignored, and once that the model has no known form of tool calls."""

    def __init__(self) -> None:
        self._logged = False
        self._types = LogOnce(IGNORED_TYPE)

    def log(self, use: ToolUse, parsers: Parsers) -> None:
        self._types.log(use.passed_over)
        if self._logged or not use.schemas or use.required or parsers.tool_calls != NONE:
            return
        self._logged = True
        logger.warning(
            "tools with tool_choice auto are ignored: the model's chat template shows no known form of tool calls "
            "(--tool-call-parser names one); a call that tool_choice demands is enforced in plain JSON"
        )


@dataclass(frozen=True, slots=True)
class Service:
    """Everything that the routes share: the engine, the configuration, and how requests are parsed and answered."""

    client: EngineClient
    heartbeat: Heartbeat
    config: ServerConfig
    limits: Limits
    parsers: Parsers
    responses: ResponseStore | None = None  # store of /v1/responses, if there is one
    writer_thread: WriterThread = field(default_factory=WriterThread)
    created: int = field(default_factory=lambda: int(time.time()))
    unknown_fields: LogOnce = field(default_factory=lambda: LogOnce(UNKNOWN_FIELD))
    ignored_tools: IgnoredTools = field(default_factory=IgnoredTools)
    parsing: ParsingTurns = field(default_factory=ParsingTurns)

    async def parse(self, request: Request, model: type[B]) -> B:
        """Return the request's body; ApiError, or InvalidRequest naming the field that is wrong."""
        return await self.parse_as(request, lambda _fields: model)

    async def parse_as(self, request: Request, choose: Callable[[dict[str, Any]], type[B]]) -> B:
        """Return the request's body as `parse` does, of the type that `choose` returns for its fields.

        Each of the calls below takes long for a large body: others get their turn between them.
        """
        http = self.config.http
        data = await read_body(request, http.max_body_bytes, http.receive_timeout)
        async with self.parsing.of(len(data)):
            max_items = max(MAX_ITEMS, self.limits.max_seq_len)  # a prompt of ids may fill the context
            hold_bytes(request, await size_of_objects(data, max_items))
            fields = read_fields(data)
            await asyncio.sleep(0)
            check_numbers(fields)
            await asyncio.sleep(0)
            body = self._validated(fields, choose(fields))
            await asyncio.sleep(0)
            return body

    def _validated(self, fields: dict[str, Any], model: type[B]) -> B:
        """Return the body of these fields; the model's generation_config.json has defaults for sampling parameters."""
        defaults = self.config.sampling_defaults.fields if issubclass(model, RequestBody) else {}
        body = validate(defaults | fields, model, self.limits)
        self.unknown_fields.log(fields.keys() - model.known_fields())
        if body.model is not None:
            self.check_model(body.model)
        return body

    def load(self) -> EngineLoad:
        """Return the engine's load at the last heartbeat."""
        heartbeat = self.heartbeat
        return EngineLoad.of(heartbeat.scheduler_counts, self.config.engine.page_size, heartbeat.generation_rate)

    def answer(
        self, request: Request, job: Job, writer: Writer, *, stream: bool, names: tuple[str, ...] = ()
    ) -> Answer:
        """Return the answer that submits a job; `names` are the client's own ids of it, for /abort.

        ApiError if the job asks for text and the model generates none.
        """
        if self.config.pooling is not None and not job.pools:
            raise ApiError(400, NO_TEXT, code="model_not_supported")
        job = msgspec.structs.replace(job, client=client_of(request))
        return Answer(
            self.client, job, writer, self.writer_thread, stream=stream, names=(request_id_of(request), *names)
        )

    def chat_job(self, body: ChatBody, use: ToolUse) -> tuple[Job, ChatOptions]:
        """Return the job of a chat and the options of its writer, and log tools that are ignored."""
        self.ignored_tools.log(use, self.parsers)
        return chat_job(body, use, self.limits, self.parsers, self.config.model_name)

    async def ask_tokenizer(self, query: Callable[[int], Query], answer_type: type[R]) -> R:
        """Return a tokenizer worker's answer to a query, as EngineClient.ask does."""
        return await self.client.ask(query, answer_type, TOKENIZER_TIMEOUT)

    async def count_tokens(self, prompt: ChatPrompt) -> int:
        """Return the number of a conversation's tokens; InvalidRequest if the tokenizer refuses it."""
        return num_ids((await self.ask_tokenizer(lambda query_id: Encode(query_id, prompt), Encoded)).ids)

    def check_model(self, name: str) -> None:
        """Raise ApiError if it is not one of the model's names."""
        if name not in self.config.model_names:
            raise model_not_found(name, self.config.model_name)
