"""The shell's parts that need no terminal and no server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from minisgl.server.api.bodies.route_bodies import ChatBody
from minisgl.shell.chat_client import ChatError, _event_data
from minisgl.shell.session import SAMPLING_FIELDS, Conversation, Sampling, TimedAnswer
from minisgl.shell.shell_process import local_url
from minisgl.shell.terminal import last_block


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.2", 0.2),
        ("top_k", "40", 40),
        ("seed", "-3", -3),
        ("ignore_eos", "true", True),
        ("stop", "END", ("END",)),
        ("stop", '["a", "b\\n"]', ("a", "b\n")),
        ("stop", "5", ("5",)),
        ("stop", "null", ("null",)),
        ("stop", '{"a": 1}', ('{"a": 1}',)),
        ("stop_token_ids", "[1, 2]", (1, 2)),
        ("stop_token_ids", "7", (7,)),
        ("allowed_token_ids", "[1, 2]", (1, 2)),
        ("allowed_token_ids", "7", (7,)),
        ("logit_bias", '{"5": -1.5, "7": 100}', {"5": -1.5, "7": 100.0}),
        ("logit_bias", "[[5, 1]]", {"5": 1.0}),
        ("bad_words", '["a b"]', ("a b",)),
    ],
)
def test_values_as_they_are_typed(name: str, text: str, value: object) -> None:
    sampling = Sampling()
    sampling.set(name, text)
    assert sampling.fields() == {name: value}
    sampling.set(name, "default")
    assert sampling.fields() == {}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("temperature", "warm", "temperature cannot be 'warm'"),
        ("temperature", "-1", "between 0 and 100"),
        ("top_p", "0", "top_p must be above 0"),
        ("max_tokens", "1.5", "max_tokens cannot be '1.5'"),
        ("colour", "red", "colour is not a sampling field"),
        ("logprobs", "1", "logprobs is not a sampling field"),
        ("prompt_logprobs", "1", "prompt_logprobs is not a sampling field"),
        ("grammar", "a", "grammar is not a sampling field"),
        ("bad_words_ids", "[[1]]", "bad_words_ids is not a sampling field"),
        ("logit_bias", "5", "logit_bias cannot be '5'"),
        ("logit_bias", '{"a": 1}', "logit_bias cannot be"),
        ("logit_bias", '{"5": 101}', "between -100 and 100"),
    ],
)
def test_wrong_values_change_nothing(name: str, text: str, message: str) -> None:
    sampling = Sampling()
    sampling.set("top_k", "5")
    with pytest.raises(ValueError, match=message):
        sampling.set(name, text)
    assert sampling.fields() == {"top_k": 5}


def test_a_value_is_shown_as_it_can_be_typed() -> None:
    for name, text in (("logit_bias", '{"5": -1.5}'), ("allowed_token_ids", "[1, 2]"), ("stop", '["a"]')):
        sampling = Sampling()
        sampling.set(name, text)
        assert sampling.get(name) == text


def test_the_fields_are_those_of_a_chats_body() -> None:
    assert set(SAMPLING_FIELDS) <= ChatBody.known_fields()


def test_the_system_message_goes_first_and_outlives_the_turns() -> None:
    conversation = Conversation("be brief")
    conversation.add("q", "a")
    roles = [message["role"] for message in conversation.messages("next")]
    assert roles == ["system", "user", "assistant", "user"]
    conversation.turns.clear()
    assert conversation.messages() == [{"role": "system", "content": "be brief"}]


def events(*blocks: bytes) -> list[bytes]:
    async def stream() -> AsyncIterator[bytes]:
        for block in blocks:
            yield block

    async def collect() -> list[bytes]:
        return [data async for data in _event_data(stream())]

    return asyncio.run(collect())


def test_events_end_at_newlines_alone() -> None:
    text = "one \u2028 \x85 line".encode()
    whole = b"data: " + text + b"\r\n\r\n: a comment\ndata:two\n\ndata: [DONE]\n\n"
    assert events(whole) == [text, b"two"]
    assert events(*(whole[at : at + 1] for at in range(len(whole)))) == [text, b"two"]


def test_a_stream_that_ends_early_is_an_error() -> None:
    with pytest.raises(ChatError, match="in the middle"):
        events(b"data: one\n\n")


@pytest.mark.parametrize(
    ("source", "done"),
    [
        ("one line", ""),
        ("a paragraph\n\nanother", ""),  # half a line may become anything
        ("a paragraph\n\nanother\n", "a paragraph\n\n"),
        ("a heading?\n---", ""),
        ("```\ncode\n\nmore code\n", ""),
        ("text\n```\ncode\n\n```\nafter\n", "text\n```\ncode\n\n```\n"),
        ("- one\n- two\n\n- three\n", ""),
        ("\n\n", ""),
    ],
)
def test_blocks_are_printed_when_they_cannot_change(source: str, done: str) -> None:
    assert source[: last_block(source)] == done


def test_the_line_after_an_answer() -> None:
    answer = TimedAnswer(tokens=11, finish="length", first=0.5, last=2.5)
    assert answer.describe() == "11 tokens, 5.0 tokens/s, first after 0.50 s, cut at the token limit"
    assert TimedAnswer(pieces=1, first=1.0, last=1.0).describe() == "about 1 token, first after 1.00 s"
    assert TimedAnswer().describe() == "about 0 tokens"


def test_the_url_of_a_local_server() -> None:
    assert local_url("0.0.0.0", 80) == "http://127.0.0.1:80/v1"
    assert local_url("::", 80) == "http://[::1]:80/v1"
    assert local_url("10.0.0.5", 80) == "http://10.0.0.5:80/v1"
