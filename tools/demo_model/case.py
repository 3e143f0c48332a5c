"""A case: one question to the demo model together with the one right answer.

Cases are pure data. The same case is rendered into training text, asked through transformers, or sent to
a running server; `Case.check` then says whether the text that came back is right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
Tool = dict[str, Any]

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
TOOL_CALL_OPEN, TOOL_CALL_CLOSE = "<tool_call>", "</tool_call>"
TOOL_RESPONSE_OPEN, TOOL_RESPONSE_CLOSE = "<tool_response>", "</tool_response>"

_TOOL_CALL = re.compile(rf"{TOOL_CALL_OPEN}\s*(.*?)\s*{TOOL_CALL_CLOSE}", re.DOTALL)


@dataclass(frozen=True)
class Case:
    """One unseen question. Greedy decoding of a perfect model gives `answer`, after `thought` if it thinks.

    A chat case has `messages`; a case with a `prompt` is a raw completion and has none.
    """

    skill: str
    messages: Sequence[Message]
    answer: str
    thought: str = ""
    tools: Sequence[Tool] | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    prompt: str | None = None

    @property
    def thinks(self) -> bool:
        return bool(self.chat_template_kwargs.get("enable_thinking", False))

    @property
    def output(self) -> str:
        """All that the model should write before its end token."""
        if self.thinks:
            return f"{THINK_OPEN}\n{self.thought}\n{THINK_CLOSE}\n\n{self.answer}"
        return self.answer

    @property
    def max_tokens(self) -> int:
        """Enough for the output (a token is at most one byte) and a bit more, so that a wrong one shows."""
        return len(self.output.encode()) + 24

    def check(self, answer_text: str) -> bool:
        """Return True if a model's whole output is right: it thinks if and only if asked, and answers exactly.

        JSON and tool calls are compared as values, all other answers character by character.
        """
        thought, answer = split_thought(answer_text)
        if (thought is not None) != self.thinks:
            return False
        if self.answer.startswith(TOOL_CALL_OPEN):
            calls = parse_tool_calls(answer)
            return calls is not None and calls == parse_tool_calls(self.answer)
        if self.skill == "json":
            return bool(parse_json(answer) == parse_json(self.answer))
        return answer == self.answer.strip()


def split_thought(text: str) -> tuple[str | None, str]:
    """The thought (None where there is none) and the rest of a model's output, both stripped."""
    text = text.strip()
    if THINK_OPEN not in text and THINK_CLOSE not in text:
        return None, text
    thought, _, answer = text.rpartition(THINK_CLOSE)
    return thought.removeprefix(THINK_OPEN).strip(), answer.strip()


def parse_json(text: str) -> Any:
    """The JSON value in text, or a unique object that equals nothing when text is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return object()


def parse_tool_calls(text: str) -> list[Any] | None:
    """The calls that an output consists of, or None where it has none, a broken one, or other text beside."""
    try:
        calls = [json.loads(body) for body in _TOOL_CALL.findall(text)]
    except ValueError:
        return None
    return calls if calls and not _TOOL_CALL.sub("", text).strip() else None


def format_tool_call(name: str, arguments: dict[str, Any]) -> str:
    """A call as the model writes it."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{TOOL_CALL_OPEN}\n{body}\n{TOOL_CALL_CLOSE}"


def message_text(message: Message) -> str:
    """The model's output rebuilt from a server's message, whose parsers may have taken it apart."""
    parts = []
    if thought := message.get("reasoning_content") or message.get("reasoning"):
        parts.append(f"{THINK_OPEN}\n{thought}\n{THINK_CLOSE}\n")
    if content := message.get("content"):
        parts.append(content)
    for call in message.get("tool_calls") or []:
        function = call["function"]
        parts.append(format_tool_call(function["name"], json.loads(function["arguments"])))
    return "\n".join(parts)
