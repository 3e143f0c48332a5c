"""The prompt that a conversation makes: its messages, what the model is shown of tools, and how it ends."""

from __future__ import annotations

from minisgl.core import InvalidRequest
from minisgl.message.to_tokenizer import ChatPrompt
from minisgl.server.api.bodies.functions import function_use
from minisgl.server.api.bodies.messages import Message
from minisgl.server.api.bodies.schema import ConversationBody
from minisgl.server.api.bodies.tools import ToolUse, tool_use


def conversation_tools(body: ConversationBody) -> ToolUse:
    """The tools, in the form of today or the one before; InvalidRequest naming what is wrong."""
    if not body.functions:
        if body.function_call not in (None, "none", "auto"):
            raise InvalidRequest("function_call", "function_call is only allowed when functions are given")
        return tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    if body.tools:
        raise InvalidRequest("functions", "functions and tools cannot be given together")
    return function_use(body.functions, body.function_call)


def conversation_prompt(body: ConversationBody, use: ToolUse, messages: list[Message]) -> ChatPrompt:
    """For the chat template; InvalidRequest if it cannot end as it is to end."""
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message", "continue_final_message and add_generation_prompt exclude each other"
        )
    generation_prompt = not body.continue_final_message and body.add_generation_prompt is not False
    return ChatPrompt(messages, use.shown, body.template_kwargs, generation_prompt, body.continue_final_message)
