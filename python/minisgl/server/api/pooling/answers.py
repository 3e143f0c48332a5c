"""Answers of the routes that pool, in the forms of OpenAI, vLLM and Jina. None of them is streamed."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, TypeVar, cast

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from msgspec.json import encode

from minisgl.pooling.pooling_config import Activation, PoolingConfig
from minisgl.pooling.vectors import Float32Array, activated, cosine, embedding
from minisgl.server.api.answers.answer import Usage, Writer
from minisgl.server.api.pooling.bodies import RerankBody, VectorsBody
from minisgl.server.api.requests.open_request import Delta

Item = TypeVar("Item")
Values = list[float] | str  # or, in base64, little-endian float32


class ItemList(msgspec.Struct, Generic[Item], frozen=True, tag_field="object", tag="list"):
    """One item for each input, in order."""

    id: str
    created: int
    model: str
    data: list[Item]
    usage: Usage


class Embedding(msgspec.Struct, frozen=True, tag_field="object", tag="embedding"):
    index: int
    embedding: Values


class PooledVector(msgspec.Struct, frozen=True, tag_field="object", tag="pooling"):
    index: int
    data: Values


class Classified(msgspec.Struct, frozen=True):
    index: int
    label: str  # of the likeliest class
    probs: list[float]
    num_classes: int


class Score(msgspec.Struct, frozen=True, tag_field="object", tag="score"):
    index: int
    score: float


class Embeddings(ItemList[Embedding], frozen=True):
    """Answer of /v1/embeddings."""


class PooledVectors(ItemList[PooledVector], frozen=True):
    """Answer of /pooling."""


class Classifications(ItemList[Classified], frozen=True):
    """Answer of /classify."""


class Scores(ItemList[Score], frozen=True):
    """Answer of /score."""


class RankedDocument(msgspec.Struct, frozen=True):
    text: str


class Ranked(msgspec.Struct, frozen=True):
    index: int  # of the document in the request
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class Ranking(msgspec.Struct, frozen=True):
    """The best document first."""

    id: str
    model: str
    results: list[Ranked]
    usage: Usage


class VectorWriter(Writer):
    """Writes one JSON object for the vectors of a request's prompts, in a thread.

    `answer` makes it of the answer's id, the vectors float32[size] in the order of the prompts, and the usage.
    """

    in_thread: ClassVar[bool] = True

    def __init__(self, prefix: str, answer: Callable[[str, list[Float32Array], Usage], msgspec.Struct]) -> None:
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._answer = answer

    def events(self, delta: Delta) -> bytes:
        raise NotImplementedError("vectors are not streamed")

    def last_events(self, usage: Usage) -> bytes:
        raise NotImplementedError("vectors are not streamed")

    def body(self, choices: list[Delta], usage: Usage) -> bytes:
        return encode(self._answer(self.id, [np.frombuffer(choice.vector, dtype="<f4") for choice in choices], usage))


def list_writer(
    prefix: str, kind: type[ItemList[Item]], model: str, items: Callable[[list[Float32Array]], list[Item]]
) -> VectorWriter:
    """Return the writer of a list of the items that the vectors become."""
    created = int(time.time())
    return VectorWriter(prefix, lambda id, vectors, usage: kind(id, created, model, items(vectors), usage))


def values_of(vector: Float32Array, pooling: PoolingConfig, body: VectorsBody) -> Values:
    """Return an embedding or classes, whichever the model makes, as a list of numbers or its bytes in base64.

    The list is JSON already: each vector is written by itself, so that the event loop has its turns between them.
    """
    if pooling.makes == "embedding":
        vector = embedding(vector, pooling, body.dimensions, body.normalized)
    elif body.normalized is not False:
        vector = activated(vector, pooling.activation)
    if body.encoding_format == "float":
        return cast(list[float], msgspec.Raw(encode(vector.tolist())))
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def classified(index: int, logits: Float32Array, pooling: PoolingConfig, activation: Activation) -> Classified:
    """Return the likeliest class of an input, and what is told of all."""
    labels = pooling.labels
    return Classified(index, labels[int(logits.argmax())], activated(logits, activation).tolist(), len(labels))


def scores_of(
    vectors: Sequence[Float32Array], pooling: PoolingConfig, activation: Activation, pairs: Sequence[tuple[int, int]]
) -> list[float]:
    """Return the score of each pair: a reranker's, whose prompts are pairs, or the cosine of two embeddings.

    `pairs`: places of both texts among the embedded ones.
    """
    if pooling.makes == "embedding":
        return [cosine(vectors[first], vectors[second]) for first, second in pairs]
    return [float(activated(logits, activation)[0]) for logits in vectors]


def ranked(scores: Sequence[float], documents: Sequence[str], body: RerankBody) -> list[Ranked]:
    """Return the documents in the order of their scores, the best first."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    shown = body.return_documents
    return [Ranked(index, scores[index], RankedDocument(documents[index]) if shown else UNSET) for index in order]
