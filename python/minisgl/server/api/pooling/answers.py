"""Answers of the pooling routes in the forms of OpenAI, vLLM and Jina. None is streamed."""

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

from minisgl.pooling.pooling_config import ClassActivation, PoolingConfig
from minisgl.pooling.vectors import Float32Array, activated, cosine, embedding
from minisgl.server.api.answers.answer import Usage, Writer
from minisgl.server.api.pooling.bodies import RerankBody, VectorsBody
from minisgl.server.api.requests.open_request import Delta

Item = TypeVar("Item")
Values = list[float] | str  # str: little-endian float32 in base64


class PooledList(msgspec.Struct, Generic[Item], frozen=True, tag_field="object", tag="list"):
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
    label: str  # label of the most likely class
    probs: list[float]
    num_classes: int


class Score(msgspec.Struct, frozen=True, tag_field="object", tag="score"):
    index: int
    score: float


class Embeddings(PooledList[Embedding], frozen=True):
    """Answer of /v1/embeddings."""


class PooledVectors(PooledList[PooledVector], frozen=True):
    """Answer of /pooling."""


class Classifications(PooledList[Classified], frozen=True):
    """Answer of /classify."""


class Scores(PooledList[Score], frozen=True):
    """Answer of /score."""


class RankedDocument(msgspec.Struct, frozen=True):
    text: str


class Ranked(msgspec.Struct, frozen=True):
    index: int  # index of the document in the request
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class Ranking(msgspec.Struct, frozen=True):
    """Answer of /rerank, best document first."""

    id: str
    model: str
    results: list[Ranked]
    usage: Usage


class VectorWriter(Writer):
    """Writes the vectors of a request's prompts as one JSON object, in a thread.

    `answer` makes the object from the answer's id, the vectors float32[size] in the order of the prompts, and the
    usage.
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
    prefix: str, kind: type[PooledList[Item]], model: str, items: Callable[[list[Float32Array]], list[Item]]
) -> VectorWriter:
    """Return the writer of a `PooledList`; `items` makes its items from the vectors."""
    created = int(time.time())
    return VectorWriter(prefix, lambda id, vectors, usage: kind(id, created, model, items(vectors), usage))


def values_of(vector: Float32Array, pooling: PoolingConfig, body: VectorsBody) -> Values:
    """Return the vector that the model makes, an embedding or classes, as a list of numbers or base64.

    The list is encoded to JSON here, one vector at a time, so that this thread releases the GIL between vectors.
    """
    if pooling.makes == "embedding":
        vector = embedding(vector, pooling, body.dimensions, body.normalized)
    elif body.normalized is not False:
        vector = activated(vector, pooling.activation)
    if body.encoding_format == "float":
        return cast(list[float], msgspec.Raw(encode(vector.tolist())))
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def classified(index: int, logits: Float32Array, pooling: PoolingConfig, activation: ClassActivation) -> Classified:
    """Return the most likely class of an input and the probabilities of all."""
    labels = pooling.labels
    return Classified(index, labels[int(logits.argmax())], activated(logits, activation).tolist(), len(labels))


def scores_of(
    vectors: Sequence[Float32Array],
    pooling: PoolingConfig,
    activation: ClassActivation,
    pairs: Sequence[tuple[int, int]],
) -> list[float]:
    """Return the score of each pair: the reranker's, or the cosine of two embeddings, whose indices `pairs` has."""
    if pooling.makes == "embedding":
        return [cosine(vectors[first], vectors[second]) for first, second in pairs]
    return [float(activated(logits, activation)[0]) for logits in vectors]


def ranked(scores: Sequence[float], documents: Sequence[str], body: RerankBody) -> list[Ranked]:
    """Return the documents by descending score."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    shown = body.return_documents
    return [Ranked(index, scores[index], RankedDocument(documents[index]) if shown else UNSET) for index in order]
