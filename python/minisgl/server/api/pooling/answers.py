"""Jobs of the pooling routes, and their answers in the forms of OpenAI, vLLM and Jina. None is streamed."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar, cast

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from msgspec.json import encode

from minisgl.limits import Limits
from minisgl.message.to_tokenizer import IdsPrompt, PairPrompt, Prompt, TextPrompt
from minisgl.message.types import TextOptions, pack_ids
from minisgl.pooling.pooling_config import ClassActivation, PoolingConfig
from minisgl.pooling.vectors import Float32Array, activated, cosine, embedding
from minisgl.sampling_params import CONTEXT_LENGTH_EXCEEDED, InvalidRequest, SamplingParams
from minisgl.server.api.answers.answer import Usage, Writer
from minisgl.server.api.bodies.plain_prompts import PROMPT_KINDS, checked_ids, is_ids
from minisgl.server.api.pooling.bodies import PairsBody, PoolingBody, RerankBody, VectorsBody
from minisgl.server.api.requests.open_request import Delta, Job

Item = TypeVar("Item")
Values = list[float] | str  # str: little-endian float32 in base64

MAX_INPUTS = 2048  # inputs of a request, as OpenAI has it
MAX_PAIR_CHARS = 16 * 1024 * 1024  # characters of all queries, which each pair carries


# From bodies to jobs.


def vectors_job(value: Any, body: PoolingBody, limits: Limits) -> Job:
    """Return the job that makes a vector of each input; InvalidRequest naming the input that is wrong."""
    if isinstance(value, str) or is_ids(value):
        return make_job([_prompt(value, "input", body, limits)], ["input"], body)
    if not isinstance(value, list) or not value:
        raise InvalidRequest("input", f"input must be {PROMPT_KINDS}, and not empty")
    check_count("input", len(value))
    names = [f"input.{index}" for index in range(len(value))]
    if len(set(map(type, value))) > 1:
        raise InvalidRequest("input", f"input must be {PROMPT_KINDS}")
    return make_job([_prompt(one, name, body, limits) for name, one in zip(names, value, strict=True)], names, body)


def pairs_job(
    pooling: PoolingConfig, queries: Sequence[str], documents: Sequence[str], names: tuple[str, str], body: PairsBody
) -> tuple[Job, list[tuple[int, int]]]:
    """Return the job that scores queries[i] with documents[i], and the pairs of prompts to compare.

    A reranker scores each pair as one prompt, so the list of pairs is empty. For an embedding model the prompts are the
    distinct queries, then the documents, and a pair is the indices of two prompts. `names`: the client's fields of
    queries and documents.
    """
    if pooling.makes == "classes":
        return _reranking_job(queries, documents, names[1], body), []
    if body.task is not None:
        raise InvalidRequest("instruction", "instruction is for rerankers, but this model makes embeddings")
    distinct = list(dict.fromkeys(queries))  # mostly one query, which is embedded once
    places = {query: index for index, query in enumerate(distinct)}
    fields = [names[0] if len(distinct) == 1 else f"{names[0]}.{places[query]}" for query in distinct]
    fields += [f"{names[1]}.{index}" for index in range(len(documents))]
    texts = [*distinct, *documents]
    check_count(names[1], len(texts))
    pairs = [(places[query], len(distinct) + index) for index, query in enumerate(queries)]
    return make_job([TextPrompt(text, body.add_special_tokens) for text in texts], fields, body), pairs


def _reranking_job(queries: Sequence[str], documents: Sequence[str], name: str, body: PairsBody) -> Job:
    check_count(name, len(documents))
    if sum(map(len, queries)) > MAX_PAIR_CHARS:
        raise InvalidRequest(
            name,
            f"{name}: with the query of each they have more than {MAX_PAIR_CHARS} characters: send fewer at a time",
        )
    if body.truncation_side == "left":
        raise InvalidRequest("truncation_side", "truncation_side: the document of a pair is cut at its end")
    pairs = [PairPrompt(query, document, body.task) for query, document in zip(queries, documents, strict=True)]
    return make_job(pairs, [f"{name}.{index}" for index in range(len(pairs))], body)


def make_job(prompts: Sequence[Prompt], names: Sequence[str], body: PoolingBody) -> Job:
    """Return the job that pools these prompts; `names` are their fields, for errors."""
    return Job(
        SamplingParams(max_tokens=0),
        TextOptions(),
        body.priority,
        prompts=prompts,
        truncate=body.tokens_to_keep,
        keep_first=body.truncation_side != "left",
        prompt_fields=names,
        cache_salt=body.cache_salt or "",
        pools=True,
    )


def check_count(name: str, count: int) -> None:
    """Raise InvalidRequest if there are more inputs than a request may have."""
    if count > MAX_INPUTS:
        raise InvalidRequest(name, f"{name}: at most {MAX_INPUTS} are allowed in a request, not {count}")


def _prompt(value: Any, name: str, body: PoolingBody, limits: Limits) -> Prompt:
    if isinstance(value, str):
        return TextPrompt(value, body.add_special_tokens)
    if not isinstance(value, list) or not value:
        raise InvalidRequest(name, f"{name} must be a text or a list of token ids, and not empty")
    if body.truncate_prompt_tokens is None and len(value) > limits.max_seq_len:
        raise InvalidRequest(
            name, f"{name} has {len(value)} tokens, but {limits.context_limit}", CONTEXT_LENGTH_EXCEEDED
        )
    most = limits.max_seq_len
    kept = value[-most:] if body.truncation_side == "left" else value[:most]
    return IdsPrompt(pack_ids(checked_ids(kept, limits, name)))


# Answers.


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
    label: str  # label of the most likely class
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
    prefix: str, kind: type[ItemList[Item]], model: str, items: Callable[[list[Float32Array]], list[Item]]
) -> VectorWriter:
    """Return the writer of an `ItemList`; `items` makes its items from the vectors."""
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
