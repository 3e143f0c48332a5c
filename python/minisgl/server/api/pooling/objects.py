"""Answers of the routes that pool, in the forms of OpenAI, vLLM and Jina."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from minisgl.server.api.answers.objects import Usage

Values = list[float] | str  # or, in base64, little-endian float32


class Embedding(msgspec.Struct, frozen=True, tag_field="object", tag="embedding"):
    index: int
    embedding: Values


class Embeddings(msgspec.Struct, frozen=True, tag_field="object", tag="list"):
    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: Usage


class PooledVector(msgspec.Struct, frozen=True, tag_field="object", tag="pooling"):
    index: int
    data: Values


class PooledVectors(msgspec.Struct, frozen=True, tag_field="object", tag="list"):
    id: str
    created: int
    model: str
    data: list[PooledVector]
    usage: Usage


class Classified(msgspec.Struct, frozen=True):
    index: int
    label: str  # of the likeliest class
    probs: list[float]
    num_classes: int


class Classifications(msgspec.Struct, frozen=True, tag_field="object", tag="list"):
    id: str
    created: int
    model: str
    data: list[Classified]
    usage: Usage


class Score(msgspec.Struct, frozen=True, tag_field="object", tag="score"):
    index: int
    score: float


class Scores(msgspec.Struct, frozen=True, tag_field="object", tag="list"):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: Usage


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
