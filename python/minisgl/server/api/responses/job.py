"""Translates the body of a response into the job of a chat completion, and prepares the response object."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from minisgl.limits import Limits
from minisgl.message.to_tokenizer import ChatPrompt, ConversationMessage
from minisgl.sampling_params import InvalidRequest, SamplingParams
from minisgl.server.api.answers.parsed_choice import ChatOptions
from minisgl.server.api.bodies.read_body import validate
from minisgl.server.api.bodies.request_body import RequestBody
from minisgl.server.api.bodies.route_bodies import ChatBody
from minisgl.server.api.bodies.tools import ToolUse
from minisgl.server.api.http.errors import under_clients_names
from minisgl.server.api.requests.open_request import Job
from minisgl.server.api.responses.body import INCLUDE_REASONING, Item, ResponsesBody, TextFormat
from minisgl.server.api.responses.items import messages_of
from minisgl.server.api.responses.tools import NamespacedName, response_tools
from minisgl.server.api.responses.writer import PREFIX, Response

NAMES = {  # field of a chat completion -> the client's field
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}

REPEATED = (  # fields of a request that its response repeats
    "instructions metadata parallel_tool_calls previous_response_id prompt_cache_key safety_identifier tool_choice "
    "truncation user"
).split()
ChatJob = Callable[[ChatBody, ToolUse], tuple[Job, ChatOptions]]
Count = Callable[[ChatPrompt], Awaitable[int | None]]  # counts a prompt's tokens; None: more than can be counted


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """Request for one response, ready to be submitted."""

    job: Job
    options: ChatOptions
    begun: Response  # the response before it has any output
    namespaced: Mapping[str, NamespacedName]  # functions of namespaces, by the name that the model knows
    seals_reasoning: bool  # reasoning is also returned as encrypted_content


def prepare_response(
    body: ResponsesBody, earlier: Sequence[Item], items: Sequence[Item], limits: Limits, chat_job: ChatJob
) -> PreparedResponse:
    """Return the request of a body, ready to be submitted; InvalidRequest naming the field that is wrong.

    `items` are the body's input items with references resolved; `earlier` the items of the conversation that it
    continues. `chat_job` makes the job of a chat completion.
    """
    tools = response_tools(body.tools or [], body.tool_choice, body.parallel_tool_calls)
    chat = _chat_body(body, conversation(body, earlier, items), limits)
    with under_clients_names(NAMES):
        job, options = chat_job(chat, tools.use)
    begun = initial_response(body, tools.warnings, job.sampling, options.model)
    seals_reasoning = INCLUDE_REASONING in body.include
    return PreparedResponse(job.under_names(NAMES), options, begun, tools.namespaced, seals_reasoning)


def conversation(body: ResponsesBody, earlier: Sequence[Item], items: Sequence[Item]) -> list[ConversationMessage]:
    """Return the messages of a response: its instructions, the earlier items, its input."""
    instructions = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    paths = [f"previous_response_id.{index}" for index in range(len(earlier))]
    paths += [f"input.{index}" for index in range(len(items))]
    return instructions + messages_of([*earlier, *items], paths)


def _chat_body(body: ResponsesBody, messages: list[ConversationMessage], limits: Limits) -> ChatBody:
    """Return the body of the equivalent chat completion."""
    shared = body.model_fields_set & RequestBody.model_fields.keys() & ChatBody.model_fields.keys()
    fields: dict[str, Any] = {name: getattr(body, name) for name in shared if getattr(body, name) is not None}
    fields |= {
        "messages": messages,
        "max_completion_tokens": body.token_limit,
        "chat_template_kwargs": body.chat_template_kwargs,
        "verbosity": None if body.text is None else body.text.verbosity,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "logprobs": body.num_logprobs is not None,
        "top_logprobs": body.num_logprobs,
    }
    if body.text is not None and (form := body.text.format) is not None and form.type != "text":
        if "response_format" in fields:
            raise InvalidRequest("text.format", "text.format and response_format cannot be given together")
        fields["response_format"] = _response_format(form)
    with under_clients_names(NAMES):
        return validate({name: value for name, value in fields.items() if value is not None}, ChatBody, limits)


def _response_format(form: TextFormat) -> dict[str, Any]:
    if form.type == "json_object":
        return {"type": "json_object"}
    if form.schema_ is None:
        raise InvalidRequest("text.format.schema", "text.format.schema is required")
    return {"type": "json_schema", "json_schema": {"schema": form.schema_}}


def initial_response(body: ResponsesBody, warnings: list[str], sampling: SamplingParams, model: str) -> Response:
    """Return the response with all fields that are known before it is generated."""
    form = None if body.text is None else body.text.format
    text: dict[str, Any] = {
        "format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
    }
    if body.text is not None and body.text.verbosity is not None:
        text["verbosity"] = body.text.verbosity
    return Response(
        id=f"{PREFIX}{uuid.uuid4().hex}",
        created_at=int(time.time()),
        status="in_progress",
        model=model,
        max_output_tokens=body.token_limit,
        reasoning={"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        temperature=sampling.temperature,
        text=text,
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=sampling.top_p,
        **{name: getattr(body, name) for name in REPEATED},
        warnings=warnings or UNSET,
    )


# `truncation: auto`.


async def truncate_to_fit(job: Job, count: Count, max_seq_len: int) -> tuple[Job, int]:
    """Return the job of a conversation with as many of its last turns as fit, and the number of messages left out.

    A turn begins with a message of the user, so that the output of a call never stays without the call. The system
    messages at the head stay. If not even the last turn fits, the job is returned unchanged and will be refused as too
    long.
    """
    (prompt,) = job.prompts
    assert isinstance(prompt, ChatPrompt)
    wanted = 1 if job.sampling.max_tokens is None else job.sampling.max_tokens

    starts = _turns(prompt.messages)

    def without(turns: int) -> ChatPrompt:
        kept = prompt.messages if not turns else [*prompt.messages[: starts[0]], *prompt.messages[starts[turns] :]]
        return msgspec.structs.replace(prompt, messages=kept)

    async def fits(turns: int) -> bool:
        tokens = await count(without(turns))
        return tokens is not None and tokens + wanted <= max_seq_len

    if await fits(0):
        return job, 0
    fewest, end = 1, len(starts)  # binary search for the fewest turns to leave out; at `end` none would be left
    while fewest < end:
        middle = (fewest + end) // 2
        if await fits(middle):
            end = middle
        else:
            fewest = middle + 1
    if fewest >= len(starts):
        return job, 0
    return msgspec.structs.replace(job, prompts=[without(fewest)]), starts[fewest] - starts[0]


def _turns(messages: Sequence[ConversationMessage]) -> list[int]:
    """Return the index at which each turn begins: the first after the head, the others at messages of the user."""
    roles = [message["role"] for message in messages]
    head = next((index for index, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
    return [head, *(index for index in range(head + 1, len(roles)) if roles[index] == "user")]
