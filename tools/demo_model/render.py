"""Turn cases into tokens: the chat template, the byte tokenizer, and which tokens are learned.

Token ids below 256 are the bytes of UTF-8; the special tokens follow. `make_tokenizer.py` writes the same
tokenizer in the format of the tokenizers library; a test holds the two together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment

from demo_model.case import (
    END_OF_TEXT,
    IM_END,
    IM_START,
    THINK_CLOSE,
    THINK_OPEN,
    TOOL_CALL_CLOSE,
    TOOL_CALL_OPEN,
    TOOL_RESPONSE_CLOSE,
    TOOL_RESPONSE_OPEN,
    Case,
    Message,
    Tool,
)

TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text()

CONTROL_TOKENS = (END_OF_TEXT, IM_START, IM_END)  # never shown to users
TEXT_TOKENS = (THINK_OPEN, THINK_CLOSE, TOOL_CALL_OPEN, TOOL_CALL_CLOSE, TOOL_RESPONSE_OPEN, TOOL_RESPONSE_CLOSE)
TOKEN_IDS = {token: 256 + index for index, token in enumerate(CONTROL_TOKENS + TEXT_TOKENS)}
VOCAB_SIZE = 272  # rounded up, so that matrices divide among ranks

_ANY_TOKEN = re.compile("(" + "|".join(re.escape(token) for token in TOKEN_IDS) + ")")
_ASSISTANT = np.frombuffer(b"assistant\n", dtype=np.uint8)

Ids = np.ndarray[Any, np.dtype[np.uint16]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment in which transformers renders chat templates."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment


_COMPILED = _environment().from_string(TEMPLATE)


def render_chat(
    messages: Sequence[Message], tools: Sequence[Tool] | None = None, template_kwargs: dict[str, Any] | None = None
) -> str:
    """The prompt for the assistant's next turn."""
    return _COMPILED.render(messages=messages, tools=tools, add_generation_prompt=True, **(template_kwargs or {}))


def render_prompt(case: Case) -> str:
    if case.prompt is not None:
        return case.prompt
    return render_chat(case.messages, case.tools, case.chat_template_kwargs)


def encode(text: str) -> Ids:
    """The token ids of a text in which special tokens may occur."""
    parts = []
    for index, part in enumerate(_ANY_TOKEN.split(text)):
        if index % 2:
            parts.append(np.array([TOKEN_IDS[part]], dtype=np.uint16))
        else:
            parts.append(np.frombuffer(part.encode(), dtype=np.uint8).astype(np.uint16))
    return np.concatenate(parts)


def decode(ids: Sequence[int]) -> str:
    """The text of token ids, control tokens left out."""
    shown = {TOKEN_IDS[token]: token.encode() for token in TEXT_TOKENS}
    data = b"".join(bytes([i]) if i < 256 else shown.get(i, b"") for i in ids)
    return data.decode(errors="replace")


@dataclass(frozen=True)
class Document:
    """One training text; `learned` marks the tokens that the model is taught to predict."""

    ids: Ids
    learned: Mask


def render_document(case: Case) -> Document:
    """The case with its answer.

    Learned are the answer with its end token, and the answers of earlier turns without their first token:
    those begin without a thought, which the model must not learn to do when it is asked for one.
    """
    end = IM_END if case.prompt is None else END_OF_TEXT
    prompt, output = encode(render_prompt(case)), encode(case.output + end)
    ids = np.concatenate([prompt, output])
    learned = np.zeros(len(ids), dtype=np.bool_)
    learned[len(prompt) :] = True
    ends = np.flatnonzero(prompt == TOKEN_IDS[IM_END])
    for start in np.flatnonzero(prompt == TOKEN_IDS[IM_START]):
        answer = start + 1 + len(_ASSISTANT)
        if answer < len(prompt) and np.array_equal(prompt[start + 1 : answer], _ASSISTANT):
            following = ends[np.searchsorted(ends, answer) :]
            if len(following):
                learned[answer + 1 : following[0] + 1] = True
    return Document(ids, learned)
