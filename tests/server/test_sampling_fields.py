"""Effect of each sampling field on an answer, through the whole server, on both routes. The built-in model, greedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from minisgl.models.hub import demo_folder
from minisgl.models.load_config import load_model_config
from minisgl.tokenizer.text import TextTokenizer
from support.server import Server

ROUTES = ["/v1/completions", "/v1/chat/completions"]
QUESTION = "What is Minisgl?"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # a tiny model, perhaps on a busy machine
        with Server("--page-size", "4") as server:
            yield server
            server.wait_idle()


TOKENIZER = TextTokenizer.from_folder(demo_folder())
CONVERSATION = [{"role": "user", "content": QUESTION}]
PROMPT = TOKENIZER.encode_chat(CONVERSATION).tolist()  # the same, so that both routes answer alike
CLIENT = httpx.Client(timeout=300)


@pytest.fixture(scope="module")
def ids() -> dict[str, int]:
    """The token of each letter."""
    return {letter: int(TOKENIZER.encode(letter)[0]) for letter in "abcdefghijklmnopqrstuvwxyz"}


def ask(server: Server, route: str, **fields: Any) -> dict[str, Any]:
    """The one choice, with its text as `text`."""
    chat = route.endswith("chat/completions")
    prompt = {"messages": CONVERSATION} if chat else {"prompt": PROMPT}
    body = {"max_tokens": 60, "temperature": 0, "return_token_ids": True, **prompt, **fields}
    response = CLIENT.post(server.url + route, json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice | {"text": choice["message"]["content"] if chat else choice["text"]}


@pytest.fixture(params=ROUTES, ids=lambda route: route.removeprefix("/v1/"))
def route(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def plain(server: Server, route: str) -> dict[str, Any]:
    choice = ask(server, route)
    assert "inference server" in choice["text"]
    return choice


def test_logit_bias(server: Server, route: str, ids: dict[str, int], plain: dict[str, Any]) -> None:
    first = plain["token_ids"][0]
    assert ask(server, route, logit_bias={str(first): -100})["token_ids"][0] != first
    choice = ask(server, route, logit_bias={str(ids["q"]): 100}, max_tokens=9)
    assert choice["text"] == "q" * 9


def test_allowed_token_ids(server: Server, route: str, ids: dict[str, int]) -> None:
    text = ask(server, route, allowed_token_ids=[ids["a"], ids["b"]], max_tokens=9)["text"]
    assert len(text) == 9
    assert set(text) <= {"a", "b"}


def test_bad_words(server: Server, route: str, plain: dict[str, Any]) -> None:
    choice = ask(server, route, bad_words=["server", "fast"])
    assert "server" not in choice["text"]
    assert "fast" not in choice["text"]
    assert choice["text"].startswith(plain["text"].partition("fast")[0][:-1])  # the same as far as it may be


def test_min_tokens(server: Server, route: str, ids: dict[str, int]) -> None:
    stop = [ids["e"], ids["n"]]
    early = ask(server, route, stop_token_ids=stop)
    assert early["finish_reason"] == "stop"
    late = ask(server, route, stop_token_ids=stop, min_tokens=40)
    assert late["finish_reason"] == "stop"
    assert len(early["token_ids"]) < 40 < len(late["token_ids"]) + 1
    assert not set(stop) & set(late["token_ids"][:40])
    text = ask(server, route, stop=["e"], min_tokens=30)
    assert len(text["token_ids"]) > 30
    assert "e" not in text["text"][30:]


def test_min_tokens_and_the_end_of_the_sequence(server: Server, route: str) -> None:
    end = load_model_config(demo_folder()).eos_token_ids[0]

    def tokens(**fields: Any) -> list[int]:
        token_ids: list[int] = ask(server, route, max_tokens=8, logit_bias={str(end): 100}, **fields)["token_ids"]
        return token_ids

    assert tokens() == [end]
    *late, last = tokens(min_tokens=4)
    assert len(late) == 4
    assert last == end
    assert end not in late
    # Where it ends nothing, it is not forbidden.
    assert tokens(ignore_eos=True) == tokens(ignore_eos=True, min_tokens=4) == [end] * 8


def test_stop_reason_names_the_requested_stop(server: Server, route: str, plain: dict[str, Any]) -> None:
    """A token or string that the request named; nothing for the model's own end, as in vLLM."""
    end = load_model_config(demo_folder()).eos_token_ids[0]
    own = ask(server, route, logit_bias={str(end): 100})
    assert (own["finish_reason"], own["stop_reason"]) == ("stop", None)
    named = ask(server, route, stop_token_ids=plain["token_ids"][3:4])
    assert (named["finish_reason"], named["stop_reason"]) == ("stop", plain["token_ids"][3])


def test_penalties_vary_the_tokens(server: Server, route: str, ids: dict[str, int]) -> None:
    """Among letters that the model did not mean to say, a penalty makes for more different ones."""
    letters = {"allowed_token_ids": [ids[letter] for letter in "abcdefgh"], "max_tokens": 16}

    def variety(**penalty: float) -> int:
        return len(set(ask(server, route, **letters, **penalty)["token_ids"]))

    none = variety()
    assert variety(presence_penalty=2) > none
    assert variety(frequency_penalty=2) > none
    assert variety(repetition_penalty=10) > none
    assert variety(frequency_penalty=-2, presence_penalty=-2) < variety(frequency_penalty=2)


def test_filters_and_seeds(server: Server, route: str, ids: dict[str, int], plain: dict[str, Any]) -> None:
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert ask(server, route, temperature=2, **narrow)["token_ids"] == plain["token_ids"]
    for temperature in (1e-6, 1e-38, 1e-320):  # by which float32 cannot divide
        assert ask(server, route, temperature=temperature)["token_ids"] == plain["token_ids"]
    letters = {"allowed_token_ids": [ids[letter] for letter in "abcdefgh"], "max_tokens": 16}
    drawn = [ask(server, route, temperature=2, seed=seed, **letters)["token_ids"] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_stop_strings_and_ignore_eos(server: Server, route: str, plain: dict[str, Any]) -> None:
    before, stop, _ = plain["text"].partition("fast")
    assert ask(server, route, stop="fast")["text"] == before
    kept = ask(server, route, stop=["no such", "fast"], include_stop_str_in_output=True)
    assert kept["text"] == before + stop
    assert kept["finish_reason"] == "stop"
    assert len(ask(server, route, ignore_eos=True, max_tokens=150)["token_ids"]) == 150


def test_logprobs_describe_the_answer(server: Server, route: str, plain: dict[str, Any]) -> None:
    chat = route.endswith("chat/completions")
    asked = {"logprobs": True, "top_logprobs": 3} if chat else {"logprobs": 3}
    choice = ask(server, route, **asked, prompt_logprobs=1, stream=False)
    assert choice["token_ids"] == plain["token_ids"]
    if chat:
        content = choice["logprobs"]["content"]
        assert bytes(byte for one in content for byte in one["bytes"]).decode().startswith(plain["text"])
        assert all(one["logprob"] == one["top_logprobs"][0]["logprob"] for one in content)
        assert all(len(one["top_logprobs"]) == 3 for one in content)
    else:
        logprobs = choice["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(plain["token_ids"])
        for value, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
            assert value == max(top.values())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 3),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-40),
        ("min_tokens", 61),
        ("logit_bias", {"100000000": 1}),
        ("logit_bias", {"1": 101}),
        ("allowed_token_ids", []),
        ("bad_words", ["x" * 17]),
        ("prompt_logprobs", 21),
    ],
)
def test_limits_are_named(server: Server, route: str, field: str, value: object) -> None:
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 60, field: value}
    response = CLIENT.post(server.url + route, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field or error["param"].startswith(field)
    assert any(character.isdigit() for character in error["message"]), "the limit"
