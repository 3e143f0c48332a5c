"""The routes of embedding and reranker models: /v1/embeddings, /pooling, /classify, /score, /rerank."""

from __future__ import annotations

from starlette.requests import Request

from minisgl.pooling.pooling_config import NO_VECTORS, ClassActivation, PoolingConfig
from minisgl.pooling.vectors import Float32Array, check_dimensions
from minisgl.sampling_params import InvalidRequest
from minisgl.server.api.answers.answer import Answer, Usage
from minisgl.server.api.http.errors import ApiError
from minisgl.server.api.pooling.answers import (
    Classifications,
    Classified,
    Embedding,
    Embeddings,
    PooledVector,
    PooledVectors,
    Ranking,
    Score,
    Scores,
    VectorWriter,
    classified,
    list_writer,
    ranked,
    scores_of,
    values_of,
)
from minisgl.server.api.pooling.bodies import (
    ClassifyBody,
    EmbeddingsBody,
    PoolBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
    document_text,
)
from minisgl.server.api.pooling.jobs import pairs_job, vectors_job
from minisgl.server.api.requests.open_request import Job
from minisgl.server.api.routes.endpoint import Endpoint, Routes
from minisgl.server.api.routes.service import Service

_PLURALS = {"embedding": "embeddings", "classes": "classes or scores"}
_ROUTES = {"embedding": "/v1/embeddings, /score or /rerank", "classes": "/classify, /score or /rerank"}


class PoolingRoutes(Routes):
    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._name = service.config.model_name

    def endpoints(self) -> list[Endpoint]:
        route = Endpoint.for_engine
        return [
            route("/v1/embeddings", self.embeddings, (EmbeddingsBody,), (Embeddings,)),
            route("/pooling", self.pooling, (PoolBody,), (PooledVectors,)),
            route("/classify", self.classify, (ClassifyBody,), (Classifications,)),
            route("/score", self.score, (ScoreBody,), (Scores,)),
            route("/v1/score", self.score, (ScoreBody,), (Scores,)),
            route("/rerank", self.rerank, (RerankBody,), (Ranking,)),
            route("/v1/rerank", self.rerank, (RerankBody,), (Ranking,)),
            route("/v2/rerank", self.rerank, (RerankBody,), (Ranking,)),
        ]

    async def embeddings(self, request: Request) -> Answer:
        """Embed each input, as OpenAI does."""
        pooling = self._model("embedding")
        body = await self._service.parse(request, EmbeddingsBody)
        check_dimensions(body.dimensions, pooling)
        job = vectors_job(body, self._service.limits)

        def items(vectors: list[Float32Array]) -> list[Embedding]:
            return [Embedding(index, values_of(one, pooling, body)) for index, one in enumerate(vectors)]

        return self._answer(request, job, list_writer("embd", Embeddings, self._name, items), body)

    async def pooling(self, request: Request) -> Answer:
        """Return the model's vector of each input, embedding or classes, as vLLM does."""
        pooling = self._model()
        body = await self._service.parse(request, PoolBody)
        if body.task is not None and (body.task == "embed") != (pooling.makes == "embedding"):
            raise InvalidRequest("task", f"task {body.task}: this model makes {_PLURALS[pooling.makes]}")
        if pooling.makes == "embedding":
            check_dimensions(body.dimensions, pooling)
        elif body.dimensions is not None:
            raise InvalidRequest("dimensions", "dimensions are of embeddings, but this model makes classes")
        job = vectors_job(body, self._service.limits)

        def items(vectors: list[Float32Array]) -> list[PooledVector]:
            return [PooledVector(index, values_of(one, pooling, body)) for index, one in enumerate(vectors)]

        return self._answer(request, job, list_writer("pool", PooledVectors, self._name, items), body)

    async def classify(self, request: Request) -> Answer:
        """Return the probability of each class for each input, as vLLM does."""
        pooling = self._model("classes")
        body = await self._service.parse(request, ClassifyBody)
        activation = _activation(body.use_activation, pooling)
        job = vectors_job(body, self._service.limits)

        def items(vectors: list[Float32Array]) -> list[Classified]:
            return [classified(index, one, pooling, activation) for index, one in enumerate(vectors)]

        return self._answer(request, job, list_writer("classify", Classifications, self._name, items), body)

    async def score(self, request: Request) -> Answer:
        """Score pairs of texts, as vLLM does: by a reranker, or by the cosine of their embeddings."""
        pooling = self._scorer()
        body = await self._service.parse(request, ScoreBody)
        (first, queries), (second, documents) = body.texts()
        activation = _activation(body.use_activation, pooling)
        job, pairs = pairs_job(pooling, queries, documents, (first, second), body)

        def items(vectors: list[Float32Array]) -> list[Score]:
            return [Score(*one) for one in enumerate(scores_of(vectors, pooling, activation, pairs))]

        return self._answer(request, job, list_writer("score", Scores, self._name, items), body)

    async def rerank(self, request: Request) -> Answer:
        """Rank documents by their relevance to a query, as Jina, Cohere and vLLM do."""
        pooling = self._scorer()
        body = await self._service.parse(request, RerankBody)
        documents = [document_text(one, f"documents.{index}") for index, one in enumerate(body.documents)]
        activation = _activation(body.use_activation, pooling)
        job, pairs = pairs_job(pooling, [body.query] * len(documents), documents, ("query", "documents"), body)

        def ranking(id: str, vectors: list[Float32Array], usage: Usage) -> Ranking:
            results = ranked(scores_of(vectors, pooling, activation, pairs), documents, body)
            return Ranking(id, self._name, results, usage)

        return self._answer(request, job, VectorWriter("rerank", ranking), body)

    def _answer(self, request: Request, job: Job, writer: VectorWriter, body: PoolingBody) -> Answer:
        return self._service.answer(request, job, writer, stream=False, names=body.own_names)

    def _model(self, makes: str | None = None) -> PoolingConfig:
        """Return the model's pooling; ApiError if it does not make what the route answers with."""
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


def _activation(use_activation: bool | None, pooling: PoolingConfig) -> ClassActivation:
    return "identity" if use_activation is False else pooling.activation
