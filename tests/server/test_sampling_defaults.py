"""Sampling defaults of a model's generation_config.json, through the real server and `LLM`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from minisgl.llm import LLM, SamplingParams
from minisgl.models.hub import demo_folder
from support.server import Server

VALUES = {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.3, "max_new_tokens": 6}
PROMPT = "Minisgl is"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, with recommendations."""
    folder = tmp_path_factory.mktemp("model")
    for file in demo_folder().iterdir():
        (folder / file.name).symlink_to(file)
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").write_text(json.dumps(generation | VALUES))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with Server("--model", str(folder), "--dtype", "float32") as server:
        yield server
        server.wait_idle()


def test_the_log_names_them(server: Server) -> None:
    (line,) = [line for line in server.log if "sampling defaults" in line]
    assert "temperature 0.7, top_k 5, repetition_penalty 1.3, max_new_tokens 6" in line


@pytest.mark.parametrize(
    ("path", "body", "asked"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, {"max_completion_tokens": 9}),
        ("/v1/completions", {"prompt": PROMPT}, {"max_tokens": 9}),
        ("/generate", {"prompt": PROMPT}, {"max_tokens": 9}),
        ("/generate", {"text": PROMPT}, {"sampling_params": {"max_new_tokens": 9}}),
    ],
)
def test_max_new_tokens_is_a_cap(server: Server, path: str, body: dict[str, object], asked: dict[str, object]) -> None:
    """The flag bounds the request's max_tokens, and the default of a request without it."""
    for fields in ({}, asked):
        answer = httpx.post(f"{server.url}{path}", json=body | fields, timeout=60).json()
        usage = answer.get("usage") or answer["meta_info"]
        assert usage["completion_tokens"] == 6


def test_requests_are_sampled_as_the_file_says(server: Server) -> None:
    params = {name: value for name, value in VALUES.items() if name != "max_new_tokens"}
    texts = {
        httpx.post(f"{server.url}/generate", json={"prompt": PROMPT, "seed": 4, **fields}, timeout=60).json()["text"]
        for fields in ({}, params, {"temperature": None})
    }
    assert len(texts) == 1
    greedy = {"temperature": 0, "repetition_penalty": 1, "seed": 4}
    assert (
        httpx.post(f"{server.url}/generate", json={"prompt": PROMPT} | greedy, timeout=60).json()["text"] not in texts
    )


def test_llm_uses_them_where_no_parameters_are_given(folder: Path) -> None:
    given = SamplingParams(max_tokens=9, ignore_eos=True)
    with LLM(str(folder), dtype="float32", max_running_req=2) as llm:
        assert llm._default_params == SamplingParams(temperature=0.7, top_k=5, repetition_penalty=1.3, max_tokens=6)
        assert len(llm.generate(PROMPT)[0]["token_ids"]) == 6
        alone = llm.generate(PROMPT, given)[0]["token_ids"]
    with LLM(str(folder), dtype="float32", max_running_req=2, generation_config="vllm") as llm:
        assert llm._default_params == SamplingParams()
        assert llm.generate(PROMPT, given)[0]["token_ids"] == alone
        assert len(alone) == 9
