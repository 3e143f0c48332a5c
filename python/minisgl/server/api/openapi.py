"""The OpenAPI document, made from the endpoints, the declarations of the bodies' fields and the types of the answers.

Bodies are pydantic models whose JSON Schemas are completed by each field's `RequestField`; answers are msgspec structs.
Specification: https://spec.openapis.org/oas/v3.1.0
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from pydantic.json_schema import models_json_schema

from minisgl import __version__
from minisgl.config import ServerConfig
from minisgl.limits import Limits
from minisgl.request_fields import RequestField, request_fields
from minisgl.sampling_params import SamplingParams
from minisgl.server.api.bodies.request_body import Body, RequestBody
from minisgl.server.api.http.gates import CONTROL_ROUTES, OPEN_ROUTES
from minisgl.server.api.routes.endpoint import Endpoint, Json

REF = "#/components/schemas/{model}"
EVENT_STREAM = "text/event-stream"
ERRORS = {
    400: "A field is wrong, out of range or not supported, or the body is not JSON; `param` names the field.",
    401: "There is no key, or a wrong one.",
    403: "The origin of a web page, or the name of the server, is not allowed.",
    404: "There is no such model or stored response.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not application/json, or is compressed.",
    499: "Somebody aborted the request.",
    500: "The engine gave the request up, or an internal error.",
    503: "The server is full, unhealthy or shutting down; try again after Retry-After.",
}
ERRORS_OF_ALL = (403, 500, 503)
ERRORS_OF_BODIES = (400, 404, 408, 413, 415)
TOKEN_ID_KEY = {"pattern": "^[0-9]{1,11}$"}  # an object's names are texts


def openapi_document(topics: Mapping[str, Sequence[Endpoint]], config: ServerConfig, limits: Limits) -> Json:
    """Return the document of these endpoints, by topic, with the limits of this server."""
    endpoints = [one for topic in topics.values() for one in topic if one.documented]
    bodies = list(dict.fromkeys(body for one in endpoints for body in one.bodies))
    answers = list(dict.fromkeys(answer for one in endpoints for answer in (one.error, *one.answers, *one.events)))
    schemas, answer_components = msgspec.json.schema_components(answers, ref_template=REF.format(model="{name}"))
    answer_schemas = dict(zip(answers, schemas, strict=True))
    components = body_components(bodies, config.sampling_defaults.fields, limits) | answer_components
    paths: dict[str, Json] = {}
    for topic, ones in topics.items():
        for one in ones:
            if one.documented:
                path = one.path.replace(":path}", "}")
                paths.setdefault(path, {}).update(_operations(one, path, topic, config, answer_schemas))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Minisgl", "version": __version__, "description": "OpenAI-compatible inference server."},
        "servers": [{"url": config.http.root_path or "/"}],
        "tags": [{"name": topic} for topic, ones in topics.items() if any(one.documented for one in ones)],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "--api-key"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "--api-key"},
            },
        },
    }


def _operations(
    endpoint: Endpoint, path: str, topic: str, config: ServerConfig, schemas: Mapping[Any, Json]
) -> Iterator[tuple[str, Json]]:
    content = {endpoint.media_type: {"schema": _one_of([schemas[answer] for answer in endpoint.answers])}}
    if endpoint.events:
        events = [schemas[event] for event in endpoint.events]
        content[EVENT_STREAM] = {"schema": _event_schema(events, ends_with_done=endpoint.ends_with_done)}
    wants_key = _wants_key(path, config)
    statuses = {*ERRORS_OF_ALL, *endpoint.errors}
    statuses |= {401} if wants_key else set()
    statuses |= set(ERRORS_OF_BODIES) if endpoint.bodies else set()
    error = {"application/json": {"schema": schemas[endpoint.error]}}
    operation: Json = {
        "tags": [topic],
        "summary": endpoint.summary,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            **{str(status): {"description": ERRORS[status], "content": error} for status in sorted(statuses)},
        },
        "security": [{"bearer": []}, {"x-api-key": []}] if wants_key else [],
    }
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if endpoint.bodies:
        operation["requestBody"] = _request_body(endpoint.bodies)
    for method in endpoint.methods:
        name = path.strip("/").translate(str.maketrans("/{}", "___")).rstrip("_")
        yield method.lower(), {**operation, "operationId": f"{method.lower()}_{name}"}


def _event_schema(events: Sequence[Json], *, ends_with_done: bool) -> Json:
    """Return the schema of a server-sent event, whose data is the JSON text of one of these, or [DONE] at the end."""
    data: Json = {"contentMediaType": "application/json", "contentSchema": _one_of(events)}
    if ends_with_done:
        data = _one_of([{"const": "[DONE]"}, data])
    return {"type": "object", "properties": {"data": {"type": "string", **data}}, "required": ["data"]}


def _wants_key(path: str, config: ServerConfig) -> bool:
    http = config.http
    if http.admin_api_key is not None and path in CONTROL_ROUTES:
        return True
    return bool(http.api_keys) and path not in OPEN_ROUTES


def _request_body(bodies: Sequence[type[Body]]) -> Json:
    schema = _one_of([{"$ref": REF.format(model=body.__name__)} for body in bodies])
    examples = {body.__name__: {"value": body_example(body)} for body in bodies}
    return {"required": True, "content": {"application/json": {"schema": schema, "examples": examples}}}


def _one_of(schemas: Sequence[Json]) -> Json:
    return schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}


def declaration_of(body: type[Body], name: str) -> RequestField:
    """Return a field's own declaration, or that of the sampling parameter with its name."""
    return request_fields(body).get(name) or request_fields(SamplingParams)[name]


def body_example(body: type[Body]) -> Json:
    """Return a body with the `example_fields` of its class, each with its declaration's example."""
    return {name: declaration_of(body, name).example for name in body.example_fields}


def body_components(bodies: Sequence[type[Body]], sampling_defaults: Json, limits: Limits) -> dict[str, Json]:
    """Return schemas by name of the bodies and the types inside them, with the model's defaults of sampling."""
    _, document = models_json_schema([(body, "validation") for body in bodies], ref_template=REF)
    components: dict[str, Json] = document.get("$defs", {})
    for component in components.values():
        component.pop("title", None)
        for schema in component.get("properties", {}).values():
            schema.pop("title", None)
    for body in bodies:
        component = components[body.__name__]
        component["description"] = _description(body)
        for name, schema in component["properties"].items():
            if issubclass(body, RequestBody) and name in sampling_defaults:
                schema["default"] = sampling_defaults[name]
            _complete(schema, declaration_of(body, name), limits)
    return components


def _description(body: type[Body]) -> str:
    text = "A null counts as a field that is left out."
    if body.no_effect:
        text += f" Without effect: {', '.join(sorted(body.no_effect))}."
    if body.not_supported:
        text += f" Refused unless they change nothing: {', '.join(sorted(body.not_supported))}."
    return text


def _complete(schema: Json, field: RequestField, limits: Limits) -> None:
    """Add a field's sentence, example and bounds to its JSON Schema, for each type that it may have."""
    if schema.get("default", "") is None:  # null means the same as leaving the field out
        del schema["default"]
    schema |= field.schema(limits)
    for kind in schema.get("anyOf", [schema]):
        match kind.get("type"):
            case "string" if field.entries:  # one text in place of a list
                kind |= field.entries[0].length_schema("string", limits)
            case "string" | "array" | "object" as name:
                kind |= field.length_schema(name, limits)
        if field.entries and kind.get("type") == "array":
            kind["items"] = kind["items"] | _entry(field.entries[0], kind["items"], limits)
        elif field.entries and kind.get("type") == "object":
            kind["propertyNames"] = TOKEN_ID_KEY
            value = kind["additionalProperties"]
            kind["additionalProperties"] = value | _entry(field.entries[1], value, limits)


def _entry(field: RequestField, schema: Json, limits: Limits) -> Json:
    lengths = field.length_schema("string", limits) if schema.get("type") == "string" else {}
    return field.schema(limits) | lengths
