"""/generate as SGLang's clients use it."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from api_harness import RunningServer
from api_sse import parse_events
from fake_engine import answer

from minisgl.message.packed_ids import pack_ids
from minisgl.message.to_tokenizer import Generate, IdsPrompt, TextPrompt
from minisgl.sampling_params import Grammar


def generate(server: RunningServer, **body: Any) -> dict[str, Any]:
    response = server.post("/generate", json={"text": "one two", **body})
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def test_answers_have_sglangs_format(server: RunningServer) -> None:
    begin = time.perf_counter()
    body = generate(server, sampling_params={"max_new_tokens": 3}, rid="mine")
    seconds = time.perf_counter() - begin
    assert body.keys() == {"text", "output_ids", "meta_info"}
    assert (body["text"], body["output_ids"]) == (answer("one two", 0, 3), [0, 1, 2])
    meta = body["meta_info"]
    assert 0 < meta.pop("e2e_latency") < seconds
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "cached_tokens": 1,
    }
    stopped = generate(server, text="stop it", sampling_params={"max_new_tokens": 3})
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": "END"}


def test_stream_is_the_answer_so_far(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(tick=0.1)  # tokens that come while the server is busy share an event
    body = {"text": "one two", "stream": True, "sampling_params": {"max_new_tokens": 7}}
    body |= {"return_logprob": True, "logprob_start_len": 0}
    events = parse_events(server.post("/generate", json=body).text)
    assert len(events) > 1
    for before, after in pairwise(events):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
    assert events[-1]["text"] == answer("one two", 0, 7)
    assert events[-1]["output_ids"] == list(range(7))
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 7}
    assert len(events[-1]["meta_info"]["output_token_logprobs"]) == 7
    assert events[-1]["meta_info"]["input_token_logprobs"] == [[None, 0, None], [-0.5, 1, None]]


def test_parameters_reach_the_engine(server: RunningServer) -> None:
    params = {
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "stop": "x",
        "stop_token_ids": [3],
        "no_stop_trim": True,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.25,
        "repetition_penalty": 1.5,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "sampling_seed": 8,
        "regex": "a+",
        "json_schema": None,
        "n": 1,
    }
    generate(server, sampling_params=params, priority=4, extra_key="salt")
    (sent,) = server.engine.of_type(Generate)
    sampling = sent.sampling
    assert sent.prompt == TextPrompt("one two")
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature) == (9, 2, 0.5)
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (0.9, 4, 0.1)
    assert (sampling.stop, sampling.stop_token_ids, sampling.seed) == (("x",), (3,), 8)
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (0.5, 0.25, 1.5)
    assert (sampling.ignore_eos, sampling.grammar) == (True, Grammar("regex", "a+"))
    assert (sent.text.include_stop, sent.text.skip_special_tokens) == (True, False)
    assert (sent.priority, sent.cache_salt) == (4, "salt")


def test_defaults_and_ids(server: RunningServer) -> None:
    assert server.post("/generate", json={"input_ids": [5, 6]}).status_code == 200
    (sent,) = server.engine.of_type(Generate)
    assert sent.prompt == IdsPrompt(pack_ids([5, 6]))
    assert (sent.sampling.max_tokens, sent.sampling.temperature, sent.sampling.logprobs) == (128, 1.0, None)


def test_logprobs_have_sglangs_format(server: RunningServer) -> None:
    params = {"max_new_tokens": 2}
    meta = generate(server, sampling_params=params, return_logprob=True)["meta_info"]
    assert meta["output_token_logprobs"] == [[-1.0, 0, None], [-1.0, 1, None]]
    assert meta["input_token_logprobs"] == []
    assert "output_top_logprobs" not in meta
    everything = {
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 1,
        "return_text_in_logprobs": True,
    }
    meta = generate(server, sampling_params=params, **everything)["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 0, None], [-0.5, 1, " two"]]
    assert meta["input_top_logprobs"] == [None, [[-0.5, 1, " two"]]]
    assert meta["output_top_logprobs"][0] == [[-0.25, 100, "bytes:\\xe4\\xb8"]]
    meta = generate(server, sampling_params=params, **{**everything, "logprob_start_len": 1})["meta_info"]
    assert meta["input_token_logprobs"] == [[-0.5, 1, " two"]]


def test_abort_by_rid(server: RunningServer) -> None:
    with server.stream("/generate", json={"text": "endless", "stream": True, "rid": "r1"}) as response:
        lines = response.iter_lines()
        next(lines)
        assert server.post("/abort_request", json={"rid": "r1"}).json() == {"aborted": 1}
        assert any("request_aborted" in line for line in lines)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": ["a", "b"]}, "text"),
        ({"input_ids": [1000]}, "input_ids.0"),
        ({"input_ids": []}, "input_ids"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": "x"}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
        ({"text": "a", "sampling_params": {"n": 2}}, "sampling_params.n"),
        ({"text": "a", "sampling_params": {"stop_regex": "x"}}, "sampling_params.stop_regex"),
        ({"text": "a", "sampling_params": []}, "sampling_params"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
    ],
)
def test_errors_name_the_clients_field(server: RunningServer, body: dict[str, Any], param: str) -> None:
    response = server.post("/generate", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not server.engine.of_type(Generate)
