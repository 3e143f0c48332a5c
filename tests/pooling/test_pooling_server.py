"""Embeddings of a real server of two ranks, asked by many clients at once, equal those of transformers."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from pooling_models import Reference, save_embedder, texts

from support.server import PATIENCE, Server, wait_until

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_embedder(tmp_path_factory.mktemp("models") / "embedder")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    flags = "--tp", "2", "--page-size", "4", "--max-prefill-length", "32", "--max-running-requests", "8"
    with Server("--model", str(folder), "--served-model-name", "embedder", *flags) as server:
        yield server
        server.wait_idle()


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder, "Model")


def embed(server: Server, inputs: Any, **fields: Any) -> np.ndarray[Any, Any]:
    answer = server.client.embeddings.create(model="embedder", input=inputs, **fields)
    assert [one.index for one in answer.data] == list(range(len(answer.data)))
    vectors: list[Any] = [one.embedding for one in answer.data]
    if isinstance(vectors[0], str):  # the client decodes only what it has not been asked for
        return np.array([np.frombuffer(base64.b64decode(vector), "<f4") for vector in vectors])
    return np.array(vectors, dtype=np.float32)


def is_close(found: np.ndarray[Any, Any], expected: Sequence[np.ndarray[Any, Any]]) -> bool:
    return found.shape == (len(expected), len(expected[0])) and bool(np.abs(found - expected).max() < TOLERANCE)


def test_requests_of_all_forms_at_once(server: Server, reference: Reference) -> None:
    prompts = texts(12)
    ids = [reference.ids(text) for text in prompts]
    expected = [reference.embedding(one) for one in ids]
    with ThreadPoolExecutor(6) as pool:
        jobs = [
            (pool.submit(embed, server, prompts), expected),
            (pool.submit(embed, server, ids, encoding_format="float"), expected),
            (pool.submit(embed, server, prompts[3]), expected[3:4]),
            (pool.submit(embed, server, ids[5], encoding_format="base64"), expected[5:6]),
            (
                pool.submit(embed, server, prompts[::-1], dimensions=9),
                [reference.embedding(one, 9) for one in ids[::-1]],
            ),
            (pool.submit(embed, server, prompts, encoding_format="float", dimensions=48), expected),
        ]
        assert [is_close(job.result(), wanted) for job, wanted in jobs] == [True] * len(jobs)
    usage = server.client.embeddings.create(model="embedder", input=prompts).usage
    assert usage.prompt_tokens == usage.total_tokens == sum(map(len, ids))


def test_long_inputs_are_refused_or_cut(server: Server, reference: Reference) -> None:
    text = "of the " * 200
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512") as refused:
        embed(server, ["short", text])
    assert (refused.value.param, refused.value.code) == ("input.1", "context_length_exceeded")
    ids = reference.ids(text)
    cut = embed(server, [text], extra_body={"truncate_prompt_tokens": 20})
    assert is_close(cut, [reference.embedding([*ids[:19], ids[-1]])])  # the end that the tokenizer adds stays
    most = embed(server, [text], extra_body={"truncate_prompt_tokens": -1})
    assert is_close(most, [reference.embedding([*ids[:511], ids[-1]])])
    left = embed(server, [text], extra_body={"truncate_prompt_tokens": 20, "truncation_side": "left"})
    assert is_close(left, [reference.embedding(ids[-20:])])
    with pytest.raises(openai.BadRequestError, match="between 1 and 48"):
        embed(server, "x", dimensions=49)


def test_scores_are_cosines(server: Server, reference: Reference) -> None:
    query, *documents = texts(5, seed=4)
    vectors = [reference.embedding(reference.ids(text)) for text in (query, *documents)]
    expected = [float(vectors[0] @ other) for other in vectors[1:]]
    body = {"queries": query, "documents": documents}
    scores = httpx.post(f"{server.url}/score", json=body, timeout=PATIENCE).json()
    assert [one["score"] for one in scores["data"]] == pytest.approx(expected, abs=TOLERANCE)
    body = {"query": query, "documents": documents, "top_n": 2}
    ranked = httpx.post(f"{server.url}/v2/rerank", json=body, timeout=PATIENCE).json()["results"]
    best = sorted(range(4), key=lambda index: -expected[index])[:2]
    assert [one["index"] for one in ranked] == best
    assert [one["document"]["text"] for one in ranked] == [documents[index] for index in best]


def test_a_pooling_model_refuses_generation(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="generates no text"):
        server.client.chat.completions.create(model="embedder", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="generates no text"):
        server.client.completions.create(model="embedder", prompt="x", stream=True)
    assert httpx.get(f"{server.url}/health_generate", timeout=PATIENCE).status_code == 200


def test_a_client_that_leaves_takes_its_prompts_with_it(server: Server, reference: Reference) -> None:
    """Hundreds of its prompts are running when it leaves; other clients are answered, and no page stays in use."""
    body = json.dumps({"input": [[5 + index % 200, *range(200)] for index in range(600)]}).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0)) as leaving:
        leaving.sendall(head + body)
        wait_until(lambda: server.info()["scheduler-0"]["requests_running"] > 0)
    assert is_close(embed(server, "of the"), [reference.embedding(reference.ids("of the"))])
    server.wait_idle()
