"""Forms of embeddings, scores and classes: OpenAI's, vLLM's, Jina's; and what is refused, by name."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from api_harness import RunningServer

from minisgl.message.to_tokenizer import Generate, PairPrompt
from minisgl.pooling.pooling_config import PoolingConfig

Start = Callable[..., RunningServer]

EMBEDDER = PoolingConfig(makes="embedding", method="last", size=4, dimensions=(2,))
RERANKER = PoolingConfig(
    makes="classes", method="last", size=1, labels=("LABEL_0",), activation="sigmoid", answer_ids=(1, 2)
)
CLASSIFIER = PoolingConfig(makes="classes", method="last", size=3, labels=("bad", "fair", "good"), activation="softmax")


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def refusal(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["param"]


def test_embeddings_in_every_encoding(start_server: Start) -> None:
    server = start_server(pooling=EMBEDDER)
    answer = server.post("/v1/embeddings", json={"input": ["vector 3 4 0 0", "vector 0 0 0 2"]}).json()
    assert answer["object"] == "list"
    assert [(one["object"], one["index"]) for one in answer["data"]] == [("embedding", 0), ("embedding", 1)]
    assert [one["embedding"] for one in answer["data"]] == [pytest.approx([0.6, 0.8, 0, 0]), [0, 0, 0, 1]]
    packed = {"input": "vector 3 4 5 6", "dimensions": 2, "encoding_format": "base64"}
    data = server.post("/v1/embeddings", json=packed).json()["data"]
    assert np.frombuffer(base64.b64decode(data[0]["embedding"]), "<f4").tolist() == pytest.approx([0.6, 0.8])
    plain = {"input": "vector 3 4 5 6", "use_activation": False, "task": "embed"}
    assert server.post("/pooling", json=plain).json()["data"][0]["data"] == [3, 4, 5, 6]


def test_a_reranker(start_server: Start) -> None:
    server = start_server(pooling=RERANKER)
    documents = ["vector -1", {"text": "vector 2"}, "vector 0.5"]
    body = {"query": "q", "documents": documents, "instruct": "Judge"}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        results = server.post(path, json=body).json()["results"]
        assert [one["index"] for one in results] == [1, 2, 0]
        assert [one["relevance_score"] for one in results] == pytest.approx([sigmoid(2), sigmoid(0.5), sigmoid(-1)])
    assert server.engine.of_type(Generate)[-3].prompt == PairPrompt("q", "vector -1", "Judge")
    logits = {**body, "top_n": 1, "return_documents": False, "use_activation": False}
    assert server.post("/rerank", json=logits).json()["results"] == [{"index": 1, "relevance_score": 2.0}]
    pairs = {"text_1": ["a", "b"], "text_2": ["vector 1", "vector 3"], "truncate_prompt_tokens": 9}
    answer = server.post("/v1/score", json=pairs).json()
    assert [one["score"] for one in answer["data"]] == pytest.approx([sigmoid(1), sigmoid(3)])
    sent = server.engine.of_type(Generate)[-2:]
    assert [(one.prompt.query, one.truncate, one.sampling.max_tokens) for one in sent] == [("a", 9, 0), ("b", 9, 0)]


def test_classes_and_their_probabilities(start_server: Start) -> None:
    server = start_server(pooling=CLASSIFIER)
    (found,) = server.post("/classify", json={"input": "vector 0 1 3"}).json()["data"]
    total = 1 + math.e + math.e**3
    assert (found["label"], found["num_classes"]) == ("good", 3)
    assert found["probs"] == pytest.approx([1 / total, math.e / total, math.e**3 / total])
    for activation, values in ((None, found["probs"]), (True, found["probs"]), (False, [0, 1, 3])):
        body = {"input": "vector 0 1 3", "use_activation": activation}
        assert server.post("/pooling", json=body).json()["data"][0]["data"] == pytest.approx(values)
    assert "/classify" in server.post("/rerank", json={"query": "q", "documents": ["d"]}).json()["error"]["message"]
    assert refusal(server.post("/pooling", json={"input": "vector 0 1 3", "task": "embed"})) == (400, "task")


def test_wrong_fields_are_named(start_server: Start) -> None:
    server = start_server(pooling=EMBEDDER)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"input": []}, "input"),
        ({"input": ["a", 5]}, "input"),
        ({"input": [[5], []]}, "input.1"),
        ({"input": [[5], [1000]]}, "input.1.0"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [[1] * 4097]}, "input.0"),
        ({"input": ["a", "refuse"]}, "max_tokens"),
        ({"input": "a", "dimensions": 3}, "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
    ]
    assert [refusal(server.post("/v1/embeddings", json=body)) for body, _ in wrong] == [
        (400, name) for _, name in wrong
    ]
    scores = [
        ({"queries": ["a", "b"], "documents": ["c", "d", "e"]}, "queries"),
        ({"queries": "a", "text_1": "b", "documents": "c"}, "queries"),
        ({"queries": "a"}, "documents"),
        ({"queries": [], "documents": "b"}, "queries"),
        ({"queries": "a", "documents": {"text": "b"}}, "documents"),
        ({"queries": "a", "documents": ["b", 5]}, "documents.1"),
        ({"queries": "a", "documents": "b", "instruction": "c"}, "instruction"),
    ]
    assert [refusal(server.post("/score", json=body)) for body, _ in scores] == [(400, name) for _, name in scores]


def test_a_reranker_limits_documents_and_makes_no_embeddings(start_server: Start) -> None:
    reranker = start_server(pooling=RERANKER)
    large = {"query": "q" * 20_000, "documents": ["d"] * 1000}
    assert refusal(reranker.post("/rerank", json=large)) == (400, "documents")
    instructed = {"query": "q", "instruction": "i" * 20_000, "documents": ["d"] * 1000}
    assert refusal(reranker.post("/rerank", json=instructed)) == (400, "documents")
    assert refusal(reranker.post("/v1/embeddings", json={"input": "a"})) == (400, None)


def test_each_kind_of_model_names_the_other(server: RunningServer, start_server: Start) -> None:
    for path in ("/v1/embeddings", "/score", "/rerank", "/pooling", "/classify"):
        error = server.post(path, json={"input": "x"}).json()["error"]
        assert (error["code"], "--runner pooling" in error["message"]) == ("model_not_supported", True)
    pools = start_server(pooling=EMBEDDER)
    asked = {"model": "test-model", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    for path, body in (
        ("/v1/chat/completions", asked),
        ("/v1/messages", asked),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/generate", {"prompt": "x"}),
    ):
        answer = pools.post(path, json=body)
        assert (answer.status_code, "generates no text" in answer.text) == (400, True)
    assert pools.get("/model_info").json()["is_generation"] is False
