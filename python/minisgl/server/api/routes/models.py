"""The model and its tokenizer: /v1/models, /tokenize, /detokenize, /tokenizer_info.

Anthropic's clients, which send their version, get the models in Anthropic's form. Bodies and answers of the tokenizer's
routes have vLLM's form.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from minisgl.message.packed_ids import pack_ids, unpack_ids
from minisgl.message.to_api import Decoded, Described, Encoded
from minisgl.message.to_tokenizer import ChatPrompt, Decode, Describe, Encode, TextPrompt
from minisgl.sampling_params import InvalidRequest
from minisgl.server.api.anthropic.models import ModelInfo, ModelPage, model_page
from minisgl.server.api.bodies.plain_prompts import checked_ids
from minisgl.server.api.bodies.route_bodies import DetokenizeBody, TokenizeBody
from minisgl.server.api.http.request_head import speaks_anthropic
from minisgl.server.api.routes.endpoint import Endpoint, Routes, json_response
from minisgl.tokenizer.conversation import template_messages


class ModelCard(msgspec.Struct, frozen=True, tag_field="object", tag="model"):
    id: str
    created: int
    root: str
    max_model_len: int
    owned_by: str = "minisgl"


class ModelList(msgspec.Struct, frozen=True, tag_field="object", tag="list"):
    data: list[ModelCard]


class Tokenized(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True):
    prompt: str


class ModelRoutes(Routes):
    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("/v1/models", self.models, answers=(ModelList, ModelPage)),
            Endpoint("/v1/models/{model:path}", self.model, answers=(ModelCard, ModelInfo), errors=(404,)),
            Endpoint("/model_info", self.model_info),  # SGLang's
            Endpoint("/get_model_info", self.model_info),  # its older name
        ]

    async def models(self, request: Request) -> Response:
        """List the model under each of its names."""
        names = self._service.config.model_names
        if speaks_anthropic(request.scope):
            return json_response(model_page([self._info(name) for name in names], request.query_params))
        return json_response(ModelList([self._card(name) for name in names]))

    async def model(self, request: Request) -> Response:
        """Describe the model under one of its names."""
        name = request.path_params["model"]
        self._service.check_model(name)
        return json_response(self._info(name) if speaks_anthropic(request.scope) else self._card(name))

    def _info(self, name: str) -> ModelInfo:
        created, max_tokens = datetime.fromtimestamp(self._service.created, UTC), self._service.limits.max_seq_len
        return ModelInfo(name, name, created, max_tokens, max_tokens)

    def _card(self, name: str) -> ModelCard:
        service = self._service
        return ModelCard(name, service.created, service.config.engine.model_path, service.limits.max_seq_len)

    async def model_info(self, _request: Request) -> Response:
        """Return the paths and names of the model."""
        config = self._service.config
        return json_response(
            {
                "model_path": config.engine.model_path,
                "tokenizer_path": str(config.tokenizer_folder),
                "served_model_name": config.model_name,
                "is_generation": config.pooling is None,
                "max_model_len": self._service.limits.max_seq_len,
            }
        )


class TokenRoutes(Routes):
    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("/tokenize", self.tokenize, ("POST",), (TokenizeBody,), (Tokenized,)),
            Endpoint("/detokenize", self.detokenize, ("POST",), (DetokenizeBody,), (Detokenized,)),
            Endpoint("/tokenizer_info", self.tokenizer_info),
        ]

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a text or a conversation."""
        body = await self._service.parse(request, TokenizeBody)
        prompt = tokenize_prompt(body)
        reply = await self._service.ask_tokenizer(
            lambda query_id: Encode(query_id, prompt, body.return_token_strs), Encoded
        )
        ids = unpack_ids(reply.ids).tolist()
        strings = cast(list[str], msgspec.Raw(reply.strings or b"null"))
        return json_response(Tokenized(len(ids), self._service.limits.max_seq_len, ids, strings))

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids."""
        body = await self._service.parse(request, DetokenizeBody)
        ids = pack_ids(checked_ids(body.tokens, self._service.limits, "tokens"))
        reply = await self._service.ask_tokenizer(lambda query_id: Decode(query_id, ids), Decoded)
        return json_response(Detokenized(reply.text))

    async def tokenizer_info(self, _request: Request) -> Response:
        """Return the tokenizer's configuration in the model folder, chat template included."""
        reply = await self._service.ask_tokenizer(Describe, Described)
        return json_response(reply.config)


def tokenize_prompt(body: TokenizeBody) -> TextPrompt | ChatPrompt:
    """Return the prompt to tokenize, a text or a conversation; InvalidRequest if the body has not exactly one."""
    if body.prompt is not None and body.messages is None:
        return TextPrompt(body.prompt, True if body.add_special_tokens is None else body.add_special_tokens)
    if body.messages is None or body.prompt is not None:
        raise InvalidRequest("prompt", "prompt or messages must be given, and not both")
    if body.add_special_tokens:
        raise InvalidRequest("add_special_tokens", "add_special_tokens: the chat template of messages writes them")
    return body.chat_prompt(body.tool_use(), template_messages(body.messages))
