"""Anthropic's form of the list of models.

Specification: https://docs.anthropic.com/en/api/models-list
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Literal

import msgspec

from minisgl.sampling_params import InvalidRequest
from minisgl.server.api.bodies.list_query import page_limit

MAX_PAGE = 1000


class ModelInfo(msgspec.Struct, frozen=True, tag_field="type", tag="model"):
    id: str
    display_name: str
    created_at: datetime
    max_input_tokens: int
    max_tokens: int
    lifecycle: Literal["active"] = "active"


class ModelPage(msgspec.Struct, frozen=True):
    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


def model_page(models: list[ModelInfo], query: Mapping[str, str]) -> ModelPage:
    """Return the page of models that a query asks for; InvalidRequest for a parameter that is wrong."""
    ids = [model.id for model in models]
    for name in ("after_id", "before_id"):
        if name in query and query[name] not in ids:
            raise InvalidRequest(name, f"{name}: there is no model {query[name]:.80}")
    limit = page_limit(query, MAX_PAGE)
    start = ids.index(query["after_id"]) + 1 if "after_id" in query else 0
    end = ids.index(query["before_id"]) if "before_id" in query else len(ids)
    backwards = "before_id" in query and "after_id" not in query
    page = models[max(start, end - limit) : end] if backwards else models[start : min(start + limit, end)]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return ModelPage(page, has_more=max(end - start, 0) > limit, first_id=first, last_id=last)
