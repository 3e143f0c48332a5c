"""/v1/models: the served model, under each of its names."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from minisgl.server.api.answers.responses import ModelCard, ModelList
from minisgl.server.api.routes.endpoint import Endpoint
from minisgl.server.api.service import Service, json_response


class ModelRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("/v1/models", self.models, answers=(ModelList,)),
            Endpoint("/v1/models/{model:path}", self.model, answers=(ModelCard,), errors=(404,)),
            Endpoint("/get_model_info", self.model_info),  # SGLang's
        ]

    async def models(self, _request: Request) -> Response:
        """List the model under each of its names."""
        return json_response(ModelList([self._card(name) for name in self._service.config.model_names]))

    async def model(self, request: Request) -> Response:
        """Describe the model under one of its names."""
        name = request.path_params["model"]
        self._service.check_model(name)
        return json_response(self._card(name))

    def _card(self, name: str) -> ModelCard:
        service = self._service
        return ModelCard(name, service.created, service.config.engine.model_path, service.limits.max_seq_len)

    async def model_info(self, _request: Request) -> Response:
        """Tell where the model comes from."""
        config = self._service.config
        return json_response(
            {
                "model_path": config.engine.model_path,
                "tokenizer_path": str(config.tokenizer_folder),
                "served_model_name": config.model_name,
                "is_generation": True,
                "max_model_len": self._service.limits.max_seq_len,
            }
        )
