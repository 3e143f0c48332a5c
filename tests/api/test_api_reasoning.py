"""Thoughts apart from answers, and what else a chat's fields do to the prompt and the answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pydantic
import pytest
from api_harness import MODEL, RunningServer
from api_sse import parse_events

from minisgl.message.to_tokenizer import ChatPrompt, Generate

PATH = "/v1/chat/completions"
THOUGHT = ["<think>", "\n", "Hm", ".", "\n", "</think>", "\n\n", "Hello", " you", "."]


@pytest.fixture
def qwen(start_server: Callable[..., RunningServer]) -> RunningServer:
    return start_server(tool_call_parser="hermes", reasoning_parser="qwen3")


def say(*texts: str, prompt_end: str = "", **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": f"say {json.dumps(texts)}"}
    return {"model": MODEL, "messages": [message], "chat_template_kwargs": {"prompt_end": prompt_end}, **fields}


def answer(server: RunningServer, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(PATH, json=body)
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    return whole


def message(server: RunningServer, body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer(server, body)["choices"][0]["message"]
    return found


def prompt(server: RunningServer, body: dict[str, Any]) -> ChatPrompt:
    """Return what the engine gets for this body."""
    before = len(server.engine.of_type(Generate))
    answer(server, body)
    found = server.engine.wait_for(Generate, before + 1)[-1].prompt
    assert isinstance(found, ChatPrompt)
    return found


def test_thought_and_answer(qwen: RunningServer) -> None:
    whole = answer(qwen, say(*THOUGHT))
    assert whole["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Hello you.",
        "refusal": None,
        "reasoning_content": "Hm.",
        "reasoning": "Hm.",
    }
    assert whole["usage"]["completion_tokens"] == len(THOUGHT)
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}


def test_thought_is_streamed(qwen: RunningServer) -> None:
    body = say(*THOUGHT, stream=True, stream_options={"include_usage": True})
    chunks = parse_events(qwen.post(PATH, json=body).text)
    assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    thought = [delta for delta in deltas if "reasoning" in delta]
    assert all(delta == {"reasoning": delta["reasoning"], "reasoning_content": delta["reasoning"]} for delta in thought)
    assert "".join(delta["reasoning"] for delta in thought) == "Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello you."
    first = next(delta for delta in deltas if delta.get("content"))  # perhaps of several tokens: the machine is busy
    assert deltas.index(thought[-1]) < deltas.index(first)


@pytest.mark.parametrize(
    ("prompt_end", "texts", "reasoning", "content"),
    [
        ("assistant\n<think>\n", THOUGHT[2:], "Hm.", "Hello you."),  # the template opened the thought
        ("<think>\n\n</think>\n\n", THOUGHT[2:], None, "".join(THOUGHT[2:])),  # the template closed an empty thought
        ("assistant\n", THOUGHT[7:], None, "Hello you."),
    ],
)
def test_the_end_of_the_prompt_tells_whether_a_thought_is_open(
    qwen: RunningServer, prompt_end: str, texts: list[str], reasoning: str | None, content: str
) -> None:
    found = message(qwen, say(*texts, prompt_end=prompt_end))
    assert (found.get("reasoning"), found["content"]) == (reasoning, content)


def test_thought_that_a_limit_cuts(qwen: RunningServer) -> None:
    whole = answer(qwen, say(*THOUGHT, max_tokens=4))
    choice = whole["choices"][0]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("Hm.", "")
    assert (choice["finish_reason"], whole["usage"]["completion_tokens_details"]["reasoning_tokens"]) == ("length", 4)


def test_thought_then_call(qwen: RunningServer) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = ["<tool_call>", '{"name": "f", "arguments": {"a": 1}}', "</tool_call>"]
    found = message(qwen, say(*THOUGHT[:7], *call, tools=tools))
    assert (found["reasoning"], found["content"]) == ("Hm.", None)
    assert found["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}


def test_deepseek_begins_inside(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(reasoning_parser="deepseek_r1")
    assert message(server, say(*THOUGHT[2:]))["reasoning"] == "Hm."
    assert message(server, say("Hello", prompt_end="</think>\n"))["content"] == "Hello"


def test_include_and_separate_reasoning(qwen: RunningServer) -> None:
    silent = answer(qwen, say(*THOUGHT, include_reasoning=False))
    assert silent["choices"][0]["message"] == {"role": "assistant", "content": "Hello you.", "refusal": None}
    assert silent["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    joined = message(qwen, say(*THOUGHT, separate_reasoning=False))
    assert joined["content"] == "".join(THOUGHT)


def test_the_sdk_reads_thoughts(qwen: RunningServer) -> None:
    whole = qwen.sdk.chat.completions.create(**_for_sdk(say(*THOUGHT)))
    extra = whole.choices[0].message.model_extra or {}
    assert extra["reasoning_content"] == extra["reasoning"] == "Hm."
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens == 6


def _for_sdk(body: dict[str, Any]) -> dict[str, Any]:
    extra = {"chat_template_kwargs": body["chat_template_kwargs"]}
    return {name: value for name, value in body.items() if name not in extra} | {"extra_body": extra}


def test_the_sdk_parses_into_a_model(qwen: RunningServer) -> None:
    class Answer(pydantic.BaseModel):
        city: str
        days: int

    body = _for_sdk(say(*THOUGHT[:7], '{"city": "Paris", ', '"days": 3}'))
    parsed = qwen.sdk.chat.completions.parse(**body, response_format=Answer)
    assert parsed.choices[0].message.parsed == Answer(city="Paris", days=3)
    with qwen.sdk.chat.completions.stream(**body, response_format=Answer) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == Answer(city="Paris", days=3)


def test_reasoning_effort(server: RunningServer) -> None:
    def kwargs(**fields: Any) -> dict[str, Any]:
        return prompt(
            server, {"model": MODEL, "messages": [{"role": "user", "content": "x"}], **fields}
        ).template_kwargs

    assert kwargs() == {}
    assert kwargs(reasoning_effort="high") == {"reasoning_effort": "high", "enable_thinking": True, "thinking": True}
    assert kwargs(reasoning_effort="none")["enable_thinking"] is False
    given = kwargs(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False, "a": 1})
    assert given == {"reasoning_effort": "low", "enable_thinking": False, "thinking": True, "a": 1}
    assert server.post(PATH, json=say("x", reasoning_effort="huge")).json()["error"]["param"] == "reasoning_effort"


def test_generation_prompt_and_continuation(server: RunningServer) -> None:
    plain = prompt(server, say("x"))
    assert (plain.add_generation_prompt, plain.continue_final_message) == (True, False)
    assert prompt(server, say("x", add_generation_prompt=False)).add_generation_prompt is False
    begun = prompt(server, say("x", continue_final_message=True))
    assert (begun.add_generation_prompt, begun.continue_final_message) == (False, True)
    both = server.post(PATH, json=say("x", continue_final_message=True, add_generation_prompt=True))
    assert both.json()["error"]["param"] == "continue_final_message"


def test_role_of_an_answer_without_generation_prompt(server: RunningServer) -> None:
    assert message(server, say("x"))["role"] == "assistant"
    assert message(server, say("x", add_generation_prompt=False))["role"] == "user"


def test_echo_returns_the_continued_text(qwen: RunningServer) -> None:
    begun = say(*"!?")["messages"][0]["content"]
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": begun}],
        "continue_final_message": True,
    }
    assert message(qwen, body)["content"] == "!?"
    assert message(qwen, body | {"echo": True})["content"] == f"{begun}!?"
    chunks = parse_events(qwen.post(PATH, json=body | {"echo": True, "stream": True}).text)
    texts = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert (texts[:2], "".join(text or "" for text in texts[2:])) == (["", begun], "!?")
    assert message(qwen, say("!?", echo=True))["content"] == "!?"  # there is nothing that the answer continues


def test_continued_thought(qwen: RunningServer) -> None:
    """An answer that was cut in its thought continues the thought; any other continues the content."""

    def continued(*texts: str) -> tuple[str | None, str]:
        begun = {"role": "assistant", "content": say(*texts)["messages"][0]["content"]}
        found = message(qwen, {"model": MODEL, "messages": [begun], "continue_final_message": True})
        return found.get("reasoning"), found["content"]

    assert continued("m.", "</think>", "Hi") == (None, "m.</think>Hi")
    assert continued("m.", "</think>", "Hi", "<think>") == ("m.", "Hi<think>")  # the last of these is open


def test_logprobs_cover_thoughts_and_markers(qwen: RunningServer) -> None:
    """Every token's, in order, whatever of it is text, thought or marker; in a stream with the chunks."""
    body = say(*THOUGHT, logprobs=True, top_logprobs=2)
    whole = qwen.sdk.chat.completions.create(**_for_sdk(body))
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content or []
    assert [entry.token for entry in content] == THOUGHT
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert all(bytes(entry.bytes or []).decode() == entry.token for entry in content)
    chunks = parse_events(qwen.post(PATH, json=body | {"stream": True}).text)
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == [entry.model_dump() for entry in content]
    alone = answer(qwen, say("x", logprobs=True))["choices"][0]["logprobs"]["content"]
    assert alone[0]["top_logprobs"] == []
    assert answer(qwen, say("x"))["choices"][0]["logprobs"] is None


def test_prompt_logprobs_and_token_ids(qwen: RunningServer) -> None:
    body = say(*THOUGHT, prompt_logprobs=1, return_token_ids=True)
    whole = answer(qwen, body)
    assert whole["choices"][0]["token_ids"] == list(range(len(THOUGHT)))
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    assert whole["prompt_logprobs"][0] is None
    assert len(whole["prompt_logprobs"]) == 2
    chunks = parse_events(qwen.post(PATH, json=body | {"stream": True}).text)
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())] == list(
        range(len(THOUGHT))
    )
    assert [chunk.get("prompt_token_ids") for chunk in chunks if "prompt_token_ids" in chunk] == [
        whole["prompt_token_ids"]
    ]
    assert [chunk["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk] == [whole["prompt_logprobs"]]
    plain = answer(qwen, say("x"))
    assert "prompt_token_ids" not in plain
    assert "prompt_logprobs" not in plain
    assert "token_ids" not in plain["choices"][0]


def test_continuous_usage(qwen: RunningServer) -> None:
    body = say(*THOUGHT, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    *chunks, last = parse_events(qwen.post(PATH, json=body).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert 0 < counts[0] <= counts[-1] == last["usage"]["completion_tokens"] == len(THOUGHT)
    assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
