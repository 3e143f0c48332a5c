"""The routes of embedding and reranker models: /v1/embeddings, /pooling, /classify, /score, /rerank."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request

from minisgl.core import InvalidRequest
from minisgl.pooling.pooling_config import NO_VECTORS, PoolingConfig
from minisgl.pooling.vectors import check_dimensions
from minisgl.server.api.answers.answer import Answer
from minisgl.server.api.http.errors import ApiError
from minisgl.server.api.pooling.bodies import (
    ClassifyBody,
    EmbeddingsBody,
    PoolBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
    document_text,
)
from minisgl.server.api.pooling.jobs import pair_job, text_job, vectors_job
from minisgl.server.api.pooling.objects import Classifications, Embeddings, PooledVectors, Ranking, Scores
from minisgl.server.api.pooling.writers import (
    ClassifyWriter,
    EmbeddingWriter,
    PoolingWriter,
    RerankWriter,
    ScoreWriter,
    VectorWriter,
)
from minisgl.server.api.requests.open_request import Job
from minisgl.server.api.routes.endpoint import Endpoint, Handler, Service
from minisgl.server.api.routes.generation import GENERATION_ERRORS

Pairs = list[tuple[int, int]]


class PoolingRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    def endpoints(self) -> list[Endpoint]:
        routes: list[tuple[tuple[str, ...], Handler, type[PoolingBody], type]] = [
            (("/v1/embeddings",), self.embeddings, EmbeddingsBody, Embeddings),
            (("/pooling",), self.pooling, PoolBody, PooledVectors),
            (("/classify",), self.classify, ClassifyBody, Classifications),
            (("/score", "/v1/score"), self.score, ScoreBody, Scores),
            (("/rerank", "/v1/rerank", "/v2/rerank"), self.rerank, RerankBody, Ranking),
        ]
        return [
            Endpoint(path, handler, ("POST",), (body,), (answer,), errors=GENERATION_ERRORS)
            for paths, handler, body, answer in routes
            for path in paths
        ]

    async def embeddings(self, request: Request) -> Answer:
        """Embed each input, as OpenAI does."""
        pooling = self._model("embedding")
        body = await self._service.parse(request, EmbeddingsBody)
        check_dimensions(body.dimensions, pooling)
        job = vectors_job(body.input, body, self._service.limits)
        return self._answer(request, job, EmbeddingWriter(self._service.config.model_name, pooling, body), body)

    async def pooling(self, request: Request) -> Answer:
        """Return what the model makes of each input, as vLLM does."""
        pooling = self._model()
        body = await self._service.parse(request, PoolBody)
        if body.task is not None and (body.task == "embed") != (pooling.makes == "embedding"):
            raise InvalidRequest("task", f"task {body.task}: this model makes {_PLURALS[pooling.makes]}")
        if pooling.makes == "embedding":
            check_dimensions(body.dimensions, pooling)
        elif body.dimensions is not None:
            raise InvalidRequest("dimensions", "dimensions are of embeddings, but this model makes classes")
        job = vectors_job(body.input, body, self._service.limits)
        return self._answer(request, job, PoolingWriter(self._service.config.model_name, pooling, body), body)

    async def classify(self, request: Request) -> Answer:
        """Return the probability of each class for each input, as vLLM does."""
        pooling = self._model("classes")
        body = await self._service.parse(request, ClassifyBody)
        job = vectors_job(body.input, body, self._service.limits)
        return self._answer(request, job, ClassifyWriter(self._service.config.model_name, pooling, body), body)

    async def score(self, request: Request) -> Answer:
        """Score pairs of texts, as vLLM does: by a reranker, or by the cosine of their embeddings."""
        pooling = self._scorer()
        body = await self._service.parse(request, ScoreBody)
        (first, queries), (second, documents) = body.texts()
        names = first, second
        job, pairs = _pairs_job(pooling, queries, documents, names, body.instruction or body.instruct, body)
        plain = body.use_activation is False
        writer = ScoreWriter(self._service.config.model_name, pooling, plain=plain, pairs=pairs)
        return self._answer(request, job, writer, body)

    async def rerank(self, request: Request) -> Answer:
        """Rank documents by their relevance to a query, as Jina, Cohere and vLLM do."""
        pooling = self._scorer()
        body = await self._service.parse(request, RerankBody)
        documents = [document_text(one, f"documents.{index}") for index, one in enumerate(body.documents)]
        queries, names = [body.query] * len(documents), ("query", "documents")
        job, pairs = _pairs_job(pooling, queries, documents, names, body.instruction or body.instruct, body)
        writer = RerankWriter(self._service.config.model_name, pooling, body, documents, pairs)
        return self._answer(request, job, writer, body)

    def _answer(self, request: Request, job: Job, writer: VectorWriter, body: PoolingBody) -> Answer:
        return self._service.answer(request, job, writer, stream=False, names=body.own_names)

    def _model(self, makes: str | None = None) -> PoolingConfig:
        """Return what the model makes; ApiError if it is not what the route answers with."""
        pooling = self._service.config.pooling
        if pooling is None:
            raise ApiError(400, NO_VECTORS, code="model_not_supported")
        if makes not in (None, pooling.makes):
            text = f"this model makes {_PLURALS[pooling.makes]}: ask {_ROUTES[pooling.makes]}"
            raise ApiError(400, text, code="model_not_supported")
        return pooling

    def _scorer(self) -> PoolingConfig:
        pooling = self._model()
        if pooling.makes == "classes" and not pooling.is_reranker:
            text = f"this model knows {pooling.size} classes and scores no pairs: ask /classify"
            raise ApiError(400, text, code="model_not_supported")
        return pooling


_PLURALS = {"embedding": "embeddings", "classes": "classes or scores"}
_ROUTES = {"embedding": "/v1/embeddings, /score or /rerank", "classes": "/classify, /score or /rerank"}


def _pairs_job(
    pooling: PoolingConfig,
    queries: Sequence[str],
    documents: Sequence[str],
    names: tuple[str, str],
    instruction: str | None,
    body: PoolingBody,
) -> tuple[Job, Pairs]:
    """Return the job that scores each query with its document, and of embeddings which ones are a pair."""
    if pooling.makes == "classes":
        return pair_job(queries, documents, names[1], instruction, body), []
    if instruction is not None:
        raise InvalidRequest("instruction", "instruction is for rerankers, but this model makes embeddings")
    distinct = list(dict.fromkeys(queries))  # most often one, of which one embedding will do
    places = {query: index for index, query in enumerate(distinct)}
    fields = [names[0] if len(distinct) == 1 else f"{names[0]}.{places[query]}" for query in distinct]
    fields += [f"{names[1]}.{index}" for index in range(len(documents))]
    pairs = [(places[query], len(distinct) + index) for index, query in enumerate(queries)]
    return text_job(fields, [*distinct, *documents], body), pairs
