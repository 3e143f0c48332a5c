"""Writers of the answers that pool. None of them is streamed; vectors become JSON in a thread."""

from __future__ import annotations

import base64
import time
import uuid
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, cast

import numpy as np
from msgspec import UNSET, Raw, Struct
from msgspec.json import encode

from minisgl.pooling.pooling_config import PoolingConfig
from minisgl.pooling.vectors import Float32Array, activated, cosine, embedding
from minisgl.server.api.answers.answer import Writer
from minisgl.server.api.answers.objects import Usage
from minisgl.server.api.pooling.bodies import ClassifyBody, EncodingFormat, RerankBody, VectorsBody
from minisgl.server.api.pooling.objects import (
    Classifications,
    Classified,
    Embedding,
    Embeddings,
    PooledVector,
    PooledVectors,
    Ranked,
    RankedDocument,
    Ranking,
    Score,
    Scores,
    Values,
)
from minisgl.server.api.requests.open_request import Delta, OpenRequest


class VectorWriter(Writer):
    """Writes one JSON object for the vectors of a request's prompts."""

    in_thread: ClassVar[bool] = True
    prefix: ClassVar[str]  # of the answer's id

    def __init__(self, model: str, pooling: PoolingConfig) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._pooling = pooling

    def begin(self, request: OpenRequest) -> None:
        pass

    def events(self, delta: Delta) -> bytes:
        raise NotImplementedError("vectors are not streamed")

    def last_events(self, usage: Usage) -> bytes:
        raise NotImplementedError("vectors are not streamed")

    def body(self, choices: list[Delta], usage: Usage) -> bytes:
        return encode(self.answer([np.frombuffer(choice.vector, dtype="<f4") for choice in choices], usage))

    @abstractmethod
    def answer(self, vectors: Sequence[Float32Array], usage: Usage) -> Struct:
        """Return the answer for the prompts' vectors, in order."""


class EmbeddingWriter(VectorWriter):
    prefix = "embd"

    def __init__(self, model: str, pooling: PoolingConfig, body: VectorsBody) -> None:
        super().__init__(model, pooling)
        self._body = body

    def answer(self, vectors: Sequence[Float32Array], usage: Usage) -> Struct:
        data = [Embedding(index, self._values(vector)) for index, vector in enumerate(vectors)]
        return Embeddings(self.id, self._created, self._model, data, usage)

    def _values(self, vector: Float32Array) -> Values:
        body = self._body
        return values(embedding(vector, self._pooling, body.dimensions, body.normalized), body.encoding_format)


class PoolingWriter(EmbeddingWriter):
    """Writes embeddings or classes, whichever the model makes."""

    prefix = "pool"

    def answer(self, vectors: Sequence[Float32Array], usage: Usage) -> Struct:
        data = [PooledVector(index, self._values(vector)) for index, vector in enumerate(vectors)]
        return PooledVectors(self.id, self._created, self._model, data, usage)

    def _values(self, vector: Float32Array) -> Values:
        if self._pooling.makes == "embedding":
            return super()._values(vector)
        plain = self._body.normalized is False
        return values(vector if plain else activated(vector, self._pooling.activation), self._body.encoding_format)


class ClassifyWriter(VectorWriter):
    prefix = "classify"

    def __init__(self, model: str, pooling: PoolingConfig, body: ClassifyBody) -> None:
        super().__init__(model, pooling)
        self._activation = "identity" if body.use_activation is False else pooling.activation

    def answer(self, vectors: Sequence[Float32Array], usage: Usage) -> Struct:
        labels = self._pooling.labels
        data = []
        for index, vector in enumerate(vectors):
            likeliest = labels[int(vector.argmax())]
            data.append(Classified(index, likeliest, activated(vector, self._activation).tolist(), len(labels)))
        return Classifications(self.id, self._created, self._model, data, usage)


class ScoreWriter(VectorWriter):
    """Writes the score of each pair: a reranker's, or the cosine of two embeddings.

    `pairs`: places of both texts among the embedded ones; a reranker's prompt is a pair, and they are not needed.
    """

    prefix = "score"

    def __init__(self, model: str, pooling: PoolingConfig, *, plain: bool, pairs: Sequence[tuple[int, int]]) -> None:
        super().__init__(model, pooling)
        self._activation = "identity" if plain else pooling.activation
        self._pairs = pairs

    def scores(self, vectors: Sequence[Float32Array]) -> list[float]:
        if self._pooling.makes == "embedding":
            return [cosine(vectors[first], vectors[second]) for first, second in self._pairs]
        return [float(activated(vector, self._activation)[0]) for vector in vectors]

    def answer(self, vectors: Sequence[Float32Array], usage: Usage) -> Struct:
        data = [Score(index, score) for index, score in enumerate(self.scores(vectors))]
        return Scores(self.id, self._created, self._model, data, usage)


class RerankWriter(ScoreWriter):
    """Writes the documents in the order of their scores, the best first."""

    prefix = "rerank"

    def __init__(
        self,
        model: str,
        pooling: PoolingConfig,
        body: RerankBody,
        documents: Sequence[str],
        pairs: Sequence[tuple[int, int]],
    ) -> None:
        super().__init__(model, pooling, plain=body.use_activation is False, pairs=pairs)
        self._body = body
        self._documents = documents

    def answer(self, vectors: Sequence[Float32Array], usage: Usage) -> Struct:
        scores = self.scores(vectors)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: self._body.top_n or None]
        shown = self._body.return_documents
        results = [
            Ranked(index, scores[index], RankedDocument(self._documents[index]) if shown else UNSET) for index in order
        ]
        return Ranking(self.id, self._model, results, usage)


def values(vector: Float32Array, form: EncodingFormat) -> Values:
    """Return a vector as a list of numbers, or its bytes in base64.

    The list is JSON already: each vector is written by itself, so that the event loop has its turns between them.
    """
    if form == "float":
        return cast(list[float], Raw(encode(vector.tolist())))
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
