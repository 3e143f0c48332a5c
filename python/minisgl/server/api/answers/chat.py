"""POST /v1/chat/completions: from its body to a job for the engine and the options of its writer."""

from __future__ import annotations

from typing import Any

import msgspec

from minisgl.limits import Limits
from minisgl.message.to_tokenizer import ConversationMessage
from minisgl.parsers.parser_choice import NONE, Parsers
from minisgl.sampling_params import Grammar, InvalidRequest
from minisgl.server.api.answers.parsed_choice import ChatOptions
from minisgl.server.api.bodies.request_body import GRAMMAR_FIELDS
from minisgl.server.api.bodies.route_bodies import ChatBody
from minisgl.server.api.bodies.tools import ToolUse
from minisgl.server.api.http.errors import under_clients_names
from minisgl.server.api.requests.open_request import Job
from minisgl.structured_output.tool_grammar import calls_grammar, check_strict, either, free_grammar, schemas_to_enforce
from minisgl.tokenizer.conversation import template_messages


def chat_job(body: ChatBody, use: ToolUse, limits: Limits, parsers: Parsers, model: str) -> tuple[Job, ChatOptions]:
    """Return the job of a body and the options of its writer; InvalidRequest if the body is wrong."""
    messages = template_messages(body.messages)
    if use.required:
        parsers = parsers.demanding_calls()
    continued = messages[-1]["content"] if body.continue_final_message else ""
    options = ChatOptions(
        body=body,
        model=model,
        parser=lambda prompt_end: parsers.parser(
            use.schemas, reasoning=body.separate_reasoning, prompt_end=prompt_end, continued=continued
        ),
        use=use,
        role=messages[-1]["role"] if body.add_generation_prompt is False else "assistant",
        echo=_echo(body, messages),
    )
    return _job(body, limits, parsers, use, messages), options


def _job(body: ChatBody, limits: Limits, parsers: Parsers, use: ToolUse, messages: list[ConversationMessage]) -> Job:
    limit_field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    field_names = {"prompt": "messages", "max_tokens": limit_field, "logprobs": "top_logprobs"}
    with under_clients_names(field_names):
        sampling = body.sampling(limits)
    field_names |= body.grammar_names
    if grammar := _calls_grammar(parsers, use, sampling.grammar):
        sampling = msgspec.structs.replace(sampling, grammar=grammar)
        field_names |= dict.fromkeys(GRAMMAR_FIELDS, "functions" if body.functions else "tools")
    keep = parsers.markers(tools=bool(use.schemas), reasoning=body.separate_reasoning)
    return Job(
        sampling,
        msgspec.structs.replace(body.text_options(continues=body.continue_final_message), keep=keep),
        body.priority,
        prompts=[body.chat_prompt(use, messages)],
        n=body.n,
        truncate=body.tokens_to_keep(limits),
        cache_salt=body.salt,
        field_names=field_names,
    )


def _calls_grammar(parsers: Parsers, use: ToolUse, content: Grammar | None) -> Grammar | None:
    """Return the grammar of the calls that the answer must or may have; None if they are not constrained."""
    if not use.schemas or not (use.required or use.strict or content is not None):
        return None
    form = parsers.call_form
    if form == NONE:
        return None
    check_strict(form, use.schemas, use.strict)
    if not use.required and content is None:
        return free_grammar(form, schemas_to_enforce(use.schemas, use.strict), parallel=use.parallel)
    calls = calls_grammar(form, use.schemas, parallel=use.parallel)
    if content is None or use.required:
        return calls
    if form == "llama3_json" or content.kind == "ebnf":
        raise InvalidRequest(
            "tools",
            "tools with constrained content need tool_choice none or required, given this model's form of calls",
        )
    return either(form, calls, content)


def _echo(body: ChatBody, messages: list[ConversationMessage]) -> str:
    """Return the text with which the answer's content begins: with `echo`, the message that it continues."""
    last: dict[str, Any] = messages[-1]
    continues = body.continue_final_message or body.add_generation_prompt is False or last["role"] == "assistant"
    return last["content"] if body.echo and continues else ""
