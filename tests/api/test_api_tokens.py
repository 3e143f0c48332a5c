"""Answers of completions and /generate besides text: log-probabilities, token ids, echoes, the best of several."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pytest
from api_harness import MODEL, RunningServer
from api_sse import parse_events
from fake_engine import answer

from minisgl.message.logprobs import PositionLogprobs, TokenLogprob
from minisgl.server.api.answers.large_json import VALUES_A_PIECE, JsonList, encode_large
from minisgl.server.api.answers.logprob_forms import (
    LOWEST,
    ChatLogprobs,
    TextLogprobs,
    TextLogprobsWriter,
    chat_logprobs,
    mean_logprob,
    prompt_logprobs,
    token_text,
)

PATH = "/v1/completions"


def complete(server: RunningServer, **body: Any) -> dict[str, Any]:
    response = server.post(PATH, json={"prompt": "one two", "max_tokens": 4, **body})
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def streamed(server: RunningServer, path: str = PATH, **body: Any) -> list[dict[str, Any]]:
    response = server.post(path, json={"prompt": "one two", "max_tokens": 4, "stream": True, **body})
    assert response.status_code == 200, response.text
    return parse_events(response.text)


def words(choice: int = 0, count: int = 4, prompt: str = "one two") -> list[str]:
    return [f"{prompt}·{choice}·{i} " for i in range(count)]


def test_the_likeliest_answer_is_not_the_shortest() -> None:
    """`best_of` compares means, whatever the lengths."""

    def positions(*values: float) -> list[PositionLogprobs]:
        return [PositionLogprobs(TokenLogprob(1, b"a", logprob), 1, []) for logprob in values]

    assert mean_logprob(positions(-1.0, -0.5, -0.75)) == -0.75
    assert mean_logprob(positions(-0.5, -0.5, -0.5)) > mean_logprob(positions(-1.0))
    assert mean_logprob(positions(-1.0, float("-inf"))) == (-1.0 + LOWEST) / 2
    assert mean_logprob([]) == LOWEST


def test_logprobs_of_a_completion(server: RunningServer) -> None:
    (choice,) = complete(server, logprobs=2)["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == words()
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"] == [-1.0] * 4
    assert logprobs["text_offset"] == [choice["text"].index(word) for word in words()]
    assert logprobs["top_logprobs"] == [{"bytes:\\xe4\\xb8": -0.25, word: -1.0} for word in words()]
    (choice,) = complete(server, logprobs=0)["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{word: -1.0} for word in words()], "the token itself, always"
    (choice,) = complete(server, logprobs=5)["choices"]
    assert choice["logprobs"]["top_logprobs"][0][" z"] == LOWEST, "JSON has no infinity"
    assert complete(server)["choices"][0]["logprobs"] is None


def test_sdk_reads_logprobs(server: RunningServer) -> None:
    completion = server.sdk.completions.create(model=MODEL, prompt="one two", max_tokens=3, logprobs=1)
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == words(count=3)
    assert logprobs.token_logprobs == [-1.0] * 3


def test_streamed_logprobs_are_the_same(server: RunningServer) -> None:
    """Chunks include tokens whose text is still held back."""
    whole = complete(server, logprobs=2, n=2, max_tokens=7)
    parts: dict[int, dict[str, list[Any]]] = {0: {}, 1: {}}
    texts = {0: "", 1: ""}
    for chunk in streamed(server, logprobs=2, n=2, max_tokens=7):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            parts[choice["index"]].setdefault(name, []).extend(values)
    for choice in whole["choices"]:
        assert parts[choice["index"]] == choice["logprobs"]
        assert texts[choice["index"]] == choice["text"]


def test_echo_with_logprobs(server: RunningServer) -> None:
    """lm-eval reads it so: the prompt's tokens stand before the answer's, and only the first has no values."""
    (choice,) = complete(server, echo=True, logprobs=1, max_tokens=2)["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "one two" + answer("one two", 0, 2)
    assert logprobs["tokens"] == ["one", " two", *words(count=2)]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"] == [None, -0.5, -1.0, -1.0]
    assert logprobs["text_offset"] == [0, 3, 7, 7 + len(words()[0])]
    assert logprobs["top_logprobs"][:2] == [None, {" two": -0.5}]
    assert max(logprobs["top_logprobs"][1].values()) == logprobs["token_logprobs"][1]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_an_answer(server: RunningServer, stream: bool) -> None:
    body = {"echo": True, "logprobs": 1, "max_tokens": 0}
    if stream:
        first, last = streamed(server, **body)
        (choice,), (end,) = first["choices"], last["choices"]
    else:
        (choice,) = (end,) = complete(server, **body)["choices"]
    assert choice["text"] == "one two"
    assert choice["logprobs"]["tokens"] == ["one", " two"]
    assert end["finish_reason"] == "length"
    assert complete(server, echo=True, max_tokens=0)["choices"][0]["text"] == "one two"
    assert complete(server, echo=True, max_tokens=0)["usage"]["completion_tokens"] == 0


def test_echo_of_ids_is_their_text(server: RunningServer) -> None:
    """The tokenizer worker knows it."""
    body = complete(server, prompt=[[5, 6], [7]], echo=True, max_tokens=1)
    assert [choice["text"] for choice in body["choices"]] == ["ids 5 6ids 5 6·0·0 ", "ids 7ids 7·0·0 "]


def test_prompt_logprobs(server: RunningServer) -> None:
    expected = [
        None,
        {
            "1": {"logprob": -0.5, "rank": 1, "decoded_token": " two"},
            "900": {"logprob": -4.0, "rank": 2, "decoded_token": "?"},
        },
    ]
    (choice,) = complete(server, prompt_logprobs=2)["choices"]
    assert choice["prompt_logprobs"] == expected
    (choice,) = complete(server, prompt_logprobs=0)["choices"]
    assert choice["prompt_logprobs"] == [None, {"1": expected[1]["1"]}]  # type: ignore[index]
    (choice,) = complete(server, prompt_logprobs=1, echo=True, logprobs=2)["choices"]
    assert choice["prompt_logprobs"] == [None, {"1": expected[1]["1"]}]  # type: ignore[index]
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2
    first, *others = streamed(server, prompt_logprobs=2)
    assert first["choices"][0]["prompt_logprobs"] == expected
    assert not any("prompt_logprobs" in chunk["choices"][0] for chunk in others)
    assert "prompt_logprobs" not in complete(server)["choices"][0]


@pytest.mark.parametrize("path", [PATH, "/generate"])
def test_token_ids(server: RunningServer, path: str) -> None:
    whole = server.post(path, json={"prompt": "one two", "max_tokens": 5, "return_token_ids": True}).json()
    whole = whole["choices"][0] if "choices" in whole else whole
    assert whole["token_ids"] == [0, 1, 2, 3, 4]
    assert whole["prompt_token_ids"] == [0, 1]
    chunks = streamed(server, path, max_tokens=5, return_token_ids=True)
    chunks = [chunk["choices"][0] if "choices" in chunk else chunk for chunk in chunks]
    assert [token for chunk in chunks for token in chunk.get("token_ids", [])] == [0, 1, 2, 3, 4]
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [[0, 1]]
    assert chunks[0]["prompt_token_ids"] == [0, 1]
    plain = server.post(path, json={"prompt": "one two"}).text
    assert "token_ids" not in plain


def test_generate_with_logprobs(server: RunningServer) -> None:
    body = server.post("/generate", json={"prompt": "one two", "max_tokens": 2, "logprobs": 1}).json()
    assert body["logprobs"]["tokens"] == words(count=2)


def test_best_of(server: RunningServer) -> None:
    """A choice of the fake engine is the likelier the higher its number."""
    body = complete(server, prompt=["one", "two"], n=2, best_of=4)
    texts = [answer(prompt, choice, 4) for prompt in ("one", "two") for choice in (3, 2)]
    assert [choice["text"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["completion_tokens"] == 2 * 4 * 4, "tokens of dropped choices count too"
    assert all(choice["logprobs"] is None for choice in body["choices"]), "no log probabilities were requested"
    (choice,) = complete(server, best_of=3, logprobs=1)["choices"]
    assert choice["logprobs"]["tokens"] == words(choice=2)
    assert choice["text"] == answer("one two", 2, 4)
    assert complete(server, n=2, best_of=2)["choices"][0]["text"] == answer("one two", 0, 4), "choices keep their order"


def test_continuous_usage(server: RunningServer) -> None:
    options = {"continuous_usage_stats": True, "include_usage": True}
    *chunks, last = streamed(server, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0] < 4, counts[-1]) == (True, 4)
    assert all(chunk["usage"]["prompt_tokens"] == 2 for chunk in chunks)
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 6)
    chunks = streamed(server, stream_options={"continuous_usage_stats": True})
    assert all(chunk["choices"] and chunk["usage"]["total_tokens"] for chunk in chunks)


# --- the forms by themselves ---


def position(text: bytes, *top: tuple[bytes, float], logprob: float = -1.0, special: bool = False) -> PositionLogprobs:
    tokens = [TokenLogprob(10 + i, alternative, value) for i, (alternative, value) in enumerate(top)]
    return PositionLogprobs(TokenLogprob(1, text, logprob), 1, tokens, special)


def joined(parts: Iterable[TextLogprobs]) -> TextLogprobs:
    return msgspec.json.decode(encode_large(TextLogprobs.join(parts)), type=TextLogprobs)


def test_offsets_of_parts_of_characters() -> None:
    parts = [position(b"a"), position(b"\xf0\x9f"), position(b"\x99\x82"), position(b"z")]
    assert joined(TextLogprobsWriter(0).write(parts)).text_offset == [0, 1, 2, 2]


def test_offsets_of_bytes_that_are_no_character() -> None:
    """Such bytes are decoded as U+FFFD."""
    parts = [position(text) for text in (b"\x80", b"a", b"\xe4\xb8", b"b", b"\xff\xff", b"c")]
    text = b"".join(part.chosen.text for part in parts).decode(errors="replace")
    offsets = joined(TextLogprobsWriter(0).write(parts)).text_offset
    assert offsets == [0, 1, 2, 3, 4, 6]
    assert [text[offset] for offset in offsets] == ["\ufffd", "a", "\ufffd", "b", "\ufffd", "c"]
    echo = joined(TextLogprobsWriter(0).prompt(b"\x80", "\ufffdab", [position(b"a"), position(b"b")]))
    assert echo.text_offset == [0, 1, 2]


@pytest.mark.parametrize(
    ("prompt", "tokens", "offsets"),
    [
        ("ab c", [b" ab", b" c"], [0, 2]),
        (" ab", [b"<s>", b"  ", b"ab"], [0, 0, 1]),
        ("  ab", [b"  ", b" ab", b"c"], [0, 2, 4]),
        (" ab", [b" ab", b"c"], [0, 3]),
        ("  ab", [b"  ", b"ab"], [0, 2]),
    ],
)
def test_a_space_that_the_tokenizer_adds_is_not_in_an_echoed_prompt(
    prompt: str, tokens: list[bytes], offsets: list[int]
) -> None:
    echo = joined(TextLogprobsWriter(0).prompt(tokens[0], prompt, [position(token) for token in tokens[1:]]))
    assert echo.text_offset == offsets


@pytest.mark.parametrize(("skip", "offsets"), [(True, [0, 1, 1, 2]), (False, [0, 1, 5, 6])])
def test_special_tokens_take_the_place_that_they_have_in_the_text(skip: bool, offsets: list[int]) -> None:
    parts = [position(b"a"), position(b"<s>!", special=True), position(b"b"), position(b"c")]
    writer = TextLogprobsWriter(0, skip_special_tokens=skip)
    assert joined(writer.write(parts)).text_offset == offsets
    text = "abc" if skip else "a<s>!bc"
    writer = TextLogprobsWriter(0, skip_special_tokens=skip)
    assert joined(writer.prompt(b"a", text, parts[1:])).text_offset == offsets
    assert joined(writer.write([position(b"d")])).text_offset == [len(text)], "the answer's come behind the prompt's"


def test_an_answer_follows_a_prompt_that_the_tokenizer_has_normalized() -> None:
    """The echo is the text as it was sent, and its tokens may have other characters."""
    writer = TextLogprobsWriter(0)
    joined(writer.prompt("é".encode(), "e\N{COMBINING ACUTE ACCENT}a", [position(b"a")]))
    assert joined(writer.write([position(b"b")])).text_offset == [3]


def test_an_echo_as_it_was_sent_has_the_special_tokens_that_were_written() -> None:
    """The tokenizer added the first of the two."""
    parts = [position(b" ab"), position(b"</s>", special=True), position(b"c")]
    assert joined(TextLogprobsWriter(0).prompt(b"<s>", "ab</s>c", parts)).text_offset == [0, 0, 2, 6]


def test_tokens_that_read_alike() -> None:
    """The most likely of alternatives with one text counts; the chosen token is always listed."""
    written = joined(TextLogprobsWriter(3).write([position(b"x", (b"y", -0.1), (b"y", -0.5), (b"w", -2.0))]))
    assert written.top_logprobs == [{"y": -0.1, "w": -2.0, "x": -1.0}]


def test_the_value_is_its_entry_bit_for_bit() -> None:
    value = -0.10536051541566849
    written = joined(TextLogprobsWriter(1).write([position(b"x", (b"x", value), logprob=value)]))
    assert written.token_logprobs[0] == max((written.top_logprobs[0] or {}).values())


def test_a_special_token_in_front_of_an_echo_takes_no_place() -> None:
    echo = joined(TextLogprobsWriter(1).prompt(b"<s>", "ab", [position(b"a"), position(b"b")]))
    assert echo.tokens == ["<s>", "a", "b"]
    assert echo.text_offset == [0, 0, 1]


def test_chats_form() -> None:
    (written,) = chat_logprobs([position("é".encode(), (b"\xc3", -0.5), ("é".encode(), -1.0))]).content
    assert (written.token, written.logprob, written.bytes) == ("é", -1.0, [0xC3, 0xA9])
    assert [(top.token, top.bytes) for top in written.top_logprobs] == [("bytes:\\xc3", [0xC3]), ("é", [0xC3, 0xA9])]
    assert token_text(b"\xff") == "bytes:\\xff"


@pytest.mark.parametrize("count", [0, 1, VALUES_A_PIECE - 1, VALUES_A_PIECE, VALUES_A_PIECE + 1, 3 * VALUES_A_PIECE])
def test_forms_that_are_written_in_pieces_are_those_of_all_positions(count: int) -> None:
    positions = [position(b"%d" % i, (b"\x00", -0.5), (b'"', -1.5), logprob=-i) for i in range(count)]
    chat = msgspec.json.decode(encode_large(chat_logprobs(positions)), type=ChatLogprobs).content
    assert [(one.token, one.logprob, len(one.top_logprobs)) for one in chat] == [(str(i), -i, 2) for i in range(count)]
    text = joined(TextLogprobsWriter(2).write(positions))
    assert text.tokens == [str(i) for i in range(count)]
    assert text.top_logprobs == [{"\x00": -0.5, '"': -1.5, str(i): -i} for i in range(count)]
    assert text.text_offset == [sum(len(str(j)) for j in range(i)) for i in range(count)]
    lists = TextLogprobs(["\x00"], [-1.0], prompt_logprobs(positions, 1), [0])  # type: ignore[arg-type]
    first, *others = msgspec.json.decode(encode_large(lists))["top_logprobs"]
    assert first is None
    assert others == [
        {
            "10": {"logprob": -0.5, "rank": 1, "decoded_token": "\x00"},
            "1": {"logprob": -i, "rank": 1, "decoded_token": f"{i}"},
        }
        for i in range(count)
    ]


def test_only_a_few_positions_are_objects_at_a_time() -> None:
    """All of them would hold up the event loop while they are decoded, collected or freed."""
    alive: weakref.WeakSet[Counted] = weakref.WeakSet()
    most = 0

    def values() -> Iterator[Counted]:
        nonlocal most
        for _ in range(10 * VALUES_A_PIECE):
            made = Counted(1)
            alive.add(made)
            most = max(most, len(alive))
            yield made

    assert len(msgspec.json.decode(b"".join(JsonList.of(values()).pieces()))) == 10 * VALUES_A_PIECE
    assert 0 < most <= 2 * VALUES_A_PIECE


class Counted(msgspec.Struct, weakref=True, eq=False):
    value: int
