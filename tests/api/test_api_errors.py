"""Every kind of wrong request, and the error that its client gets."""

from __future__ import annotations

import gzip
import json
import logging
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import openai
import pytest
from api_harness import MODEL, RawClient, RunningServer
from fake_engine import LIMITS

from minisgl.message.to_tokenizer import Generate
from minisgl.server.api.bodies.route_bodies import ChatBody
from minisgl.server.api.routes.service import MAX_LOGGED, UNKNOWN_FIELD, LogOnce

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def check_error(response: Any, status: int, param: str | None) -> dict[str, Any]:
    """Check that the body is OpenAI's error object and nothing else."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert response.json().keys() == {"error"}
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert error["message"]
    if param is not None:
        name = param.split(".")[0]
        assert name in error["message"] or name.replace("_", " ").rstrip("s") in error["message"]
    return error  # type: ignore[no-any-return]


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    # Types: strict, as OpenAI's.
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": []}, "temperature"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop.1"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids.0"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"seed": 1.5}, "seed"),
    ({"n": "2"}, "n"),
    ({"ignore_eos": 0}, "ignore_eos"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"stream_options": True, "stream": True}, "stream_options"),
    ({"stream_options": {"include_usage": "x"}, "stream": True}, "stream_options.include_usage"),
    # Ranges.
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": -3}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 1e6}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": 2**63}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop": ["x"] * 33}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [LIMITS.vocab_size]}, "stop_token_ids"),
    ({"stop_token_ids": [0] * 257}, "stop_token_ids"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream_options": {}, "stream": False}, "stream_options"),
    # Numbers that no machine holds.
    ({"max_tokens": 10**29}, "max_tokens"),
    ({"seed": 10**29}, "seed"),
    ({"top_k": -(10**29)}, "top_k"),
    ({"temperature": 10**400}, "temperature"),
    ({"messages": [{**HELLO[0], "weight": 10**29}]}, "messages.0.weight"),
    ({"tools": [{"type": "function", "function": {"name": "f", "x": [1, 10**29]}}]}, "tools.0.function.x.1"),
    ({"chat_template_kwargs": {"a": 10**29}}, "chat_template_kwargs.a"),
    ({"no_such_field": 10**29}, "no_such_field"),
    # Messages.
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": {}}, "messages"),
    ({"messages": ["hello"]}, "messages.0"),
    ({"messages": [None]}, "messages.0"),
    ({"messages": [{}] * 8193}, "messages"),
    ({"messages": [{}]}, "messages.0.role"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": 5, "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages.0.role"),
    ({"messages": [*HELLO, {"role": "user"}]}, "messages.1.content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "assistant"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": {"type": "text"}}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages.0.content.0.text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "user", "content": [{}]}]}, "messages.0.content.0.type"),
    # Tools.
    ({"tools": {}}, "tools"),
    ({"tools": ["f"]}, "tools.0"),
    ({"tools": [{}]}, "tools.0.type"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"guided_json": [1]}, "guided_json"),
    # Log-probabilities, penalties, biases.
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias.a"),
    ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
    ({"logit_bias": {"1" * 30: 1}}, "logit_bias." + "1" * 30),
    ({"logit_bias": {"5": "x"}}, "logit_bias.5"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": dict.fromkeys(map(str, range(1025)), 0)}, "logit_bias"),
    ({"logit_bias": {str(LIMITS.vocab_size): 1}}, "logit_bias"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [LIMITS.vocab_size]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["x"] * 129}, "bad_words"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": LIMITS.max_seq_len + 1}, "truncate_prompt_tokens"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 1025}, "cache_salt"),
    # Structured output.
    ({"response_format": "text"}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_regex": 5}, "guided_regex"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"foo": 1}}, "structured_outputs.foo"),
    ({"structured_outputs": {"regex": "a", "foo": False}}, "structured_outputs.foo"),
    (
        {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
        "structured_outputs.disable_any_whitespace",
    ),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
    ({"ebnf": "root ::= x", "structured_outputs": {"json_object": True}}, "structured_outputs.json_object"),
    # Fields that would change the answer and cannot be honoured.
    ({"parallel_tool_calls": 0}, "parallel_tool_calls"),
    ({"audio": {"voice": "alloy"}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"documents": [{"text": "x"}]}, "documents"),
    ({"chat_template": "x"}, "chat_template"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ({"add_special_tokens": True}, "add_special_tokens"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"stop_regex": "a+"}, "stop_regex"),
    ({"lora_path": "x"}, "lora_path"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"moderation": {"model": "omni-moderation-latest"}}, "moderation"),
    ({"truncation_side": "right"}, "truncation_side"),
    ({"repetition_detection": {"max_pattern_size": 4}}, "repetition_detection"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"return_prompt_text": True}, "return_prompt_text"),
    ({"input_ids": [1]}, "input_ids"),
    ({"return_meta_info": True}, "return_meta_info"),
]


@pytest.mark.parametrize(("change", "param"), BAD_CHATS, ids=lambda value: str(value)[:60])
def test_bad_chat(server: RunningServer, change: dict[str, Any], param: str) -> None:
    body = json.dumps({"model": MODEL, "messages": HELLO, **change})
    check_error(server.post(CHAT, content=body), 400, param)
    assert not server.engine.of_type(Generate), "nothing of it reached the engine"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"messages": ["x"]}, "messages.0 must be an object"),
        ({"stream_options": 5, "stream": True}, "stream_options must be an object"),
        ({"response_format": "json"}, "response_format must be an object"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag is not supported"),
        ({"temperature": 3}, "temperature must be between 0 and 2, not 3.0"),
    ],
    ids=str,
)
def test_refusals_speak_of_json_and_not_of_python(server: RunningServer, change: dict[str, Any], sentence: str) -> None:
    answer = server.post(CHAT, json={"messages": HELLO, **change})
    assert answer.json()["error"]["message"] == sentence


BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt.0"),
    ({"prompt": [None]}, "prompt.0"),
    ({"prompt": ["a", 5]}, "prompt.1"),
    ({"prompt": [5, "a"]}, "prompt.1"),
    ({"prompt": [True]}, "prompt.0"),
    ({"prompt": [1.0]}, "prompt.0"),
    ({"prompt": [-1]}, "prompt.0"),
    ({"prompt": [0, LIMITS.vocab_size]}, "prompt.1"),
    ({"prompt": [10**29]}, "prompt.0"),
    ({"prompt": [[1], [2, 10**29]]}, "prompt.1.1"),
    ({"prompt": [[1], "a"]}, "prompt.1"),
    ({"prompt": [[[1]]]}, "prompt.0.0"),
    ({"prompt": [1] * LIMITS.max_seq_len}, "prompt"),
    ({"prompt": [[1], [1] * 5000]}, "prompt.1"),
    ({"prompt": ["a"] * 8193}, "prompt"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 65}, "best_of"),
    ({"best_of": 0}, "best_of"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": "x"}, "echo"),
    ({"temperature": 2.5}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"),
]


@pytest.mark.parametrize(("change", "param"), BAD_COMPLETIONS, ids=lambda value: str(value)[:60])
def test_bad_completion(server: RunningServer, change: dict[str, Any], param: str) -> None:
    check_error(server.post(COMPLETIONS, content=json.dumps({"prompt": "hello", **change})), 400, param)
    assert not server.engine.of_type(Generate)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"]}, "prompt.0"),
        ({"n": 2}, "n"),
        ({"sampling_params": {"temperature": 1}}, "sampling_params"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_bad_generate(server: RunningServer, change: dict[str, Any], param: str) -> None:
    check_error(server.post("/generate", json={"prompt": "hello", **change}), 400, param)


def test_limits_of_the_operator_are_enforced(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(max_choices=2, max_stop_strings=1, max_logprobs=3)
    for path, change, param in (
        (CHAT, {"n": 3}, "n"),
        (CHAT, {"stop": ["a", "b"]}, "stop"),
        (CHAT, {"logprobs": True, "top_logprobs": 4}, "top_logprobs"),
        (COMPLETIONS, {"best_of": 3}, "best_of"),
        (COMPLETIONS, {"logprobs": 4}, "logprobs"),
        ("/generate", {"prompt_logprobs": 4}, "prompt_logprobs"),
    ):
        body = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
        check_error(server.post(path, json={**body, **change}), 400, param)
    allowed = {"messages": HELLO, "n": 2, "stop": "a", "logprobs": True, "top_logprobs": 3}
    assert server.post(CHAT, json=allowed).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"hello",
        b"{} {}",
        b"null",
        b"[]",
        b'"text"',
        b"5",
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "\\udc00 x"}]}',
        b'{"temperature": NaN}',
        b'{"temperature": -Infinity}',
        b'{"messages": [{"role": "user", "content": "x", "extra": NaN}]}',
        b'{"seed": ' + b"1" * 5000 + b"}",
        b"[" * 60_000,
        b"[" * 60_000 + b"]" * 60_000,
        b'{"a":' * 30_000 + b"1" + b"}" * 30_000,
        b'{"messages":' + b"[" * 300 + b"]" * 300 + b"}",
        b"\x00",
    ],
    ids=lambda body: repr(body[:40]),
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/generate", "/tokenize", "/abort"])
def test_not_json(server: RunningServer, path: str, body: bytes) -> None:
    check_error(server.post(path, content=body), 400, None)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/abort"])
def test_a_compressed_body_is_refused_by_its_header(server: RunningServer, path: str) -> None:
    body = gzip.compress(
        b'{"model": "tiny", "max_tokens": 1, "all": true, "messages": [{"role": "user", "content": "a"}]}'
    )
    response = server.post(path, content=body, headers={"content-encoding": "gzip"})
    assert response.status_code == 415
    assert "Content-Encoding: gzip" in response.json()["error"]["message"]
    assert response.headers["accept-encoding"] == "identity"


def test_a_body_that_is_said_to_be_sent_as_it_is_is_taken(server: RunningServer) -> None:
    headers = {"content-encoding": "identity"}
    assert server.post("/generate", json={"prompt": "a", "max_tokens": 1}, headers=headers).status_code == 200


def test_infinite_number(server: RunningServer) -> None:
    body = b'{"messages": [{"role": "user", "content": "x", "extra": 1e999}]}'
    check_error(server.post(CHAT, content=body), 400, "messages.0.extra")


def test_deepest_json_that_is_taken(server: RunningServer) -> None:
    """A body that passes must survive the way to the tokenizer."""
    extra = b"[" * 190 + b"]" * 190
    body = b'{"messages": [{"role": "user", "content": "x", "extra": ' + extra + b"}]}"
    assert server.post(CHAT, content=body).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_body_too_large(server: RunningServer, stream: bool) -> None:
    """Announced by its length or found out on the way."""
    body = json.dumps({"messages": [{"role": "user", "content": "x" * server.config.http.max_body_bytes}]}).encode()
    content = iter([body[: len(body) // 2], body[len(body) // 2 :]]) if stream else body
    error = check_error(server.post(CHAT, content=content), 413, None)
    assert str(server.config.http.max_body_bytes) in error["message"]


def test_unknown_model(server: RunningServer) -> None:
    response = server.post(CHAT, json={"model": "gpt-99", "messages": HELLO})
    assert check_error(response, 404, "model")["code"] == "model_not_found"
    assert response.json()["error"]["message"].endswith(f"does not exist; this server has '{MODEL}'")
    with pytest.raises(openai.NotFoundError):
        server.sdk.completions.create(model="gpt-99", prompt="x")
    check_error(server.get("/v1/models/gpt-99"), 404, "model")
    assert server.post(CHAT, json={"messages": HELLO}).status_code == 200, "no model means the model"


def test_unknown_routes_and_methods(server: RunningServer) -> None:
    check_error(server.get("/nothing"), 404, None)
    check_error(server.post("/v1/chat/completions/"), 404, None)
    check_error(server.get(CHAT), 405, None)
    check_error(server.post("/v1/models"), 405, None)
    response = server.post("/v1/responses/resp_1")  # GET and DELETE are two routes of this path
    check_error(response, 405, None)
    assert response.headers["allow"] == "DELETE, GET, HEAD"


def test_clients_do_not_retry_permanent_errors(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """openai's client repeats a request after most server errors, unless a header forbids it."""
    calls = []

    def broken(*_args: object) -> None:
        calls.append(1)
        raise RuntimeError

    monkeypatch.setattr("minisgl.server.api.routes.service.read_fields", broken)
    with pytest.raises(openai.InternalServerError):
        server.sdk.with_options(max_retries=3).completions.create(model=MODEL, prompt="x")
    assert len(calls) == 1


def test_a_full_server_is_asked_again(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(max_queued_requests=1)
    client = RawClient(server.port)
    client.post("/generate", {"prompt": "hold"})
    server.engine.wait_for(Generate)
    refused = server.post(COMPLETIONS, json={"prompt": "x"})
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert "x-should-retry" not in refused.headers
    threading.Timer(0.3, client.leave).start()
    answer = server.sdk.with_options(max_retries=100).completions.create(model=MODEL, prompt="x", max_tokens=1)
    assert answer.choices[0].text


def test_sdk_gets_the_field(server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.sdk.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], n=0)
    assert caught.value.param == "n"
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_refused_by_the_tokenizer(server: RunningServer, stream: bool, field: str) -> None:
    """A plain 400 even where a stream was asked for, under the name that the client used."""
    body = {"messages": [{"role": "user", "content": "refuse this"}], "stream": stream, "n": 2, field: 9}
    error = check_error(server.post(CHAT, json=body), 400, field)
    assert error["message"] == f"{field} is too large for this prompt"
    server.assert_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_a_worker_is_no_error_of_the_client(server: RunningServer, stream: bool) -> None:
    """Once such an error was a 400 with the text of the exception."""
    body = {"messages": [{"role": "user", "content": "broken"}], "stream": stream}
    response = server.post(CHAT, json=body)
    error = check_error(response, 500, None)
    assert (error["type"], error["message"]) == ("server_error", "internal server error")
    assert check_error(server.post("/tokenize", json={"prompt": "broken"}), 500, None) == error
    busy = server.post(CHAT, json={**body, "messages": [{"role": "user", "content": "busy"}]})
    assert check_error(busy, 503, None)["message"] == "too many grammars wait; try again later"
    assert int(busy.headers["retry-after"]) >= 1


def test_refused_prompt_of_a_list(server: RunningServer) -> None:
    """The whole request is refused, and the prompts that were taken are aborted."""
    response = server.post(COMPLETIONS, json={"prompt": ["endless a", "refuse b"], "stream": True})
    assert response.status_code == 400
    server.assert_idle()


def test_request_id(server: RunningServer) -> None:
    headers = {"x-request-id": "abc-123"}
    assert server.get("/health", headers=headers).headers["x-request-id"] == "abc-123"
    assert server.get("/nope", headers=headers).headers["x-request-id"] == "abc-123"
    stream = server.post(CHAT, json={"messages": HELLO, "stream": True}, headers=headers)
    assert stream.headers["x-request-id"] == "abc-123"
    strange = server.get("/health", headers={"x-request-id": "a b" + "c" * 300}).headers["x-request-id"]
    assert len(strange) == 32


def test_internal_error_hides_internals(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_args: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("minisgl.server.api.routes.service.read_fields", broken)
    response = server.post(CHAT, json={"messages": HELLO})
    assert "secret" not in response.text
    assert check_error(response, 500, None)["type"] == "server_error"
    (record,) = [record for record in caplog.records if record.exc_info]
    assert "secret detail" in str(record.exc_info)


@pytest.mark.parametrize("stream", [False, True])
def test_internal_error_while_answering(server: RunningServer, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    def broken(*_args: object) -> bytes:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("minisgl.server.api.answers.chat_writer.ChatWriter.events", broken)
    monkeypatch.setattr("minisgl.server.api.answers.chat_writer.ChatWriter.body", broken)
    response = server.post(CHAT, json={"messages": [{"role": "user", "content": "x"}], "stream": stream})
    assert "secret" not in response.text
    assert "internal server error" in response.text
    assert response.status_code == (200 if stream else 500)
    server.assert_idle()


def test_unknown_fields_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    unknown = {"messages", "tempreature", "user"} - ChatBody.known_fields()
    fields = LogOnce(UNKNOWN_FIELD)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            fields.log(unknown)
        assert [record.args for record in caplog.records] == [("tempreature",)]
        fields.log({f"field{index}" for index in range(300)})
        fields.log({"another"})
    assert len(caplog.records) == MAX_LOGGED, "the log is bounded too"


def test_long_names_of_unknown_fields_are_not_kept() -> None:
    """A name may be as long as a body: a hundred of them, which stayed until the server's end, were 800 MB."""
    fields = LogOnce(UNKNOWN_FIELD)
    tracemalloc.start()
    try:
        for index in range(MAX_LOGGED + 1):
            fields.log({f"{index} {'x' * 1_000_000}"})
        assert tracemalloc.get_traced_memory()[0] < 1_000_000, "one name has more"
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "\U0010ffff" * 100_000}, "model"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"p" * 10**6: 1}}}}
                ]
            },
            "tools",
        ),
        ({"metadata": {"k" * 10**6: 2**70}}, "metadata"),
        ({"structured_outputs": {"s" * 10**6: 1}}, "structured_outputs"),
    ],
)
def test_an_error_does_not_repeat_a_name_of_any_length(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    """A model's name of 8 MB was answered with 23 MB."""
    response = server.post(CHAT, json={"messages": HELLO} | fields)
    error = response.json()["error"]
    assert error["param"].startswith(param)
    assert error["message"].removeprefix("the ").startswith(param)
    assert len(response.content) < 20_000


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/generate", {"text": "a", "sampling_params": {"lora_path": "x"}}, "sampling_params.lora_path"),
        ("/v1/responses/input_tokens", {"input": "refuse"}, "input"),
    ],
)
def test_the_text_about_a_translated_body_has_the_clients_name(
    server: RunningServer, path: str, body: dict[str, Any], field: str
) -> None:
    error = server.post(path, json=body).json()["error"]
    assert error["param"] == field
    assert error["message"].startswith(f"{field} ")
