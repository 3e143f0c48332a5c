"""The OpenAPI document says what the server does: routes, bounds of fields, examples and answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, get_args

import jsonschema
import pytest
from api_harness import RunningServer, make_config
from fake_engine import LIMITS
from fastapi.openapi.models import OpenAPI
from pydantic import BaseModel

from api_tables import PAGE, write_tables
from minisgl.message.to_tokenizer import Generate
from minisgl.server.api.anthropic.bodies import CountTokensBody, MessagesBody
from minisgl.server.api.app import TOPICS
from minisgl.server.api.bodies.read_body import validate
from minisgl.server.api.bodies.request_body import Body, Options, RequestBody
from minisgl.server.api.bodies.route_bodies import (
    AbortBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    SglangBody,
    TokenizeBody,
)
from minisgl.server.api.http.gates import CONTROL_ROUTES
from minisgl.server.api.openapi import body_example, declaration_of, openapi_document
from minisgl.server.api.responses.body import ResponsesBody
from minisgl.server.api.routes.service import Service

OWN = {"/openapi.json", "/docs", "/redoc", "/docs/{file}", "/", "/guide/{page}"}  # pages for people are not in it
ROUTES: dict[type[Body], str] = {
    ChatBody: "/v1/chat/completions",
    CompletionBody: "/v1/completions",
    ResponsesBody: "/v1/responses",
    GenerateBody: "/generate",
    SglangBody: "/generate",
    MessagesBody: "/v1/messages",
    CountTokensBody: "/v1/messages/count_tokens",
    TokenizeBody: "/tokenize",
    DetokenizeBody: "/detokenize",
    AbortBody: "/abort",
}
Json = dict[str, Any]


def document(**changes: Any) -> Json:
    config = make_config(**changes)
    service = Service(None, None, config, LIMITS, None)  # type: ignore[arg-type]
    made = openapi_document({name: topic(service).endpoints() for name, topic in TOPICS.items()}, config, LIMITS)
    return json.loads(json.dumps(made))  # type: ignore[no-any-return]


DOCUMENT = document()
COMPONENTS: dict[str, Json] = DOCUMENT["components"]["schemas"]


def beyond(schema: Json) -> Iterator[tuple[Any, bool]]:
    """Values of a field's schema on each of its bounds (True) and the nearest beyond it (False)."""
    for kind in schema.get("anyOf", [schema]):
        match kind.get("type"):
            case "integer":
                step: float = 1
            case "number":
                step = 0.001
            case "string":
                yield from ((("a" * length), ok) for length, ok in lengths(kind, "Length"))
                continue
            case "array":
                yield from list_values(kind)
                continue
            case "object":
                yield from ((biases(length), ok) for length, ok in lengths(kind, "Properties"))
                if "propertyNames" in kind:
                    yield {"x": 0}, False
                    yield from (({"5": value}, ok) for value, ok in beyond(kind["additionalProperties"]))
                continue
            case _:
                continue
        bounds = {**kind, **schema}
        for name, sign in (("minimum", -1), ("maximum", 1)):
            if name in bounds:
                yield bounds[name], True
                yield bounds[name] + sign * step, False
        if "exclusiveMinimum" in bounds:
            yield bounds["exclusiveMinimum"] + step, True
            yield bounds["exclusiveMinimum"], False


def biases(count: int) -> dict[str, int]:
    """Name every token id of the vocabulary."""
    return {f"{i % 1000:0{3 + i // 1000}}": 0 for i in range(count)}


def lengths(schema: Json, suffix: str) -> Iterator[tuple[int, bool]]:
    if (least := schema.get(f"min{suffix}")) is not None:
        yield least, True
        yield least - 1, False
    if (most := schema.get(f"max{suffix}")) is not None:
        yield most, True
        yield most + 1, False


def list_values(schema: Json) -> Iterator[tuple[list[Any], bool]]:
    entries = {"string": "a", "integer": 1, "object": {"role": "user", "content": "x"}}
    if (entry := entries.get(schema["items"]["type"])) is None:  # a list of lists
        return
    yield from (([entry] * length, ok) for length, ok in lengths(schema, "Items"))
    yield from (([value], ok) for value, ok in beyond(schema["items"]))


# Allowed together with other fields only, which is in the field's sentence and has tests of its own.
TOGETHER = {"best_of", "top_logprobs", "min_tokens", "max_tokens", "max_completion_tokens"}
EDGES = [
    (body, name, value, ok)
    for body in ROUTES
    for name, schema in COMPONENTS[body.__name__]["properties"].items()
    for value, ok in beyond(schema)
    if not (ok and name in TOGETHER)
]


def short(value: object) -> str:
    return re.sub(r"\W+", "-", str(value))[:24]


def test_the_document_is_openapi() -> None:
    OpenAPI.model_validate(DOCUMENT)
    assert DOCUMENT["openapi"] == "3.1.0"
    text = json.dumps(DOCUMENT)
    used = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert used == set(COMPONENTS), "each component is used, and each that is used is there"
    for schema in COMPONENTS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    operations = [one for path in DOCUMENT["paths"].values() for one in path.values()]
    ids = [one["operationId"] for one in operations]
    assert len(ids) == len(set(ids))
    assert all(one["summary"] for one in operations)
    for path, methods in DOCUMENT["paths"].items():
        for one in methods.values():
            assert [parameter["name"] for parameter in one.get("parameters", [])] == re.findall(r"{(\w+)}", path)


def test_a_field_that_may_be_null_may_be_left_out() -> None:
    bodies: list[type[BaseModel]] = [Options, Body]
    for one in bodies:  # which grows
        bodies += one.__subclasses__()
    fields = [(one.__name__, name, field) for one in bodies for name, field in one.model_fields.items()]
    nullable = [(*names, field) for *names, field in fields if type(None) in get_args(field.annotation)]
    assert len(nullable) > 100
    assert not [names for *names, field in nullable if field.is_required()]


def test_the_document_lists_every_route_and_no_other(server: RunningServer) -> None:
    served = server.get("/openapi.json").json()
    assert served["paths"].keys() == DOCUMENT["paths"].keys()
    routes: set[tuple[str, str]] = set()
    for route in server.app.routes:
        methods = route.methods - ({"HEAD"} if "GET" in route.methods else set())  # type: ignore[attr-defined]
        path = route.path.replace(":path}", "}")  # type: ignore[attr-defined]
        routes |= {(path, method.lower()) for method in methods if path not in OWN}
    assert {(path, method) for path, ones in served["paths"].items() for method in ones} == routes
    assert {route.path for route in server.app.routes} >= OWN  # type: ignore[attr-defined]
    assert server.app.openapi() == served


@pytest.mark.parametrize("body", ROUTES, ids=lambda body: body.__name__)
def test_every_field_of_a_body_is_documented(body: type[Body]) -> None:
    properties = COMPONENTS[body.__name__]["properties"]
    assert list(properties) == list(body.model_fields)
    for name, schema in properties.items():
        assert schema["description"] == declaration_of(body, name).help
        for example in schema.get("examples", []):
            jsonschema.validate(example, {**schema, "components": DOCUMENT["components"]})
            assert body.model_fields[name].is_required() or not refusal(body, {name: example})


NESTED = ["ResponseFormat", "JsonSchemaFormat", "StructuredOutputs", "Thinking", "OutputConfig", "OutputFormat"]


@pytest.mark.parametrize("model", NESTED)
def test_the_fields_of_nested_objects_are_documented(model: str) -> None:
    for schema in COMPONENTS[model]["properties"].values():
        assert schema["description"]
        for example in schema.get("examples", []):
            jsonschema.validate(example, {**schema, "components": DOCUMENT["components"]})


def refusal(body: type[Body], change: Json) -> Exception | None:
    """Validate the body's example with this change."""
    try:
        made = validate({**body_example(body), **change}, body, LIMITS)
        if isinstance(made, RequestBody):
            made.sampling(LIMITS)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("body", ROUTES, ids=lambda body: body.__name__)
def test_the_example_of_a_body_is_accepted(server: RunningServer, body: type[Body]) -> None:
    content = DOCUMENT["paths"][ROUTES[body]]["post"]["requestBody"]["content"]["application/json"]
    example = content["examples"][body.__name__]["value"]
    assert example == body_example(body)
    assert example
    jsonschema.validate(example, {**COMPONENTS[body.__name__], "components": DOCUMENT["components"]})
    response = server.post(ROUTES[body], json=example)
    assert response.status_code == 200, response.text
    answers_at_once = {TokenizeBody, CountTokensBody, DetokenizeBody, AbortBody}
    assert bool(server.engine.of_type(Generate)) == (body not in answers_at_once)


@pytest.mark.parametrize(
    ("body", "name", "value", "ok"), EDGES, ids=lambda value: getattr(value, "__name__", short(value))
)
def test_a_documented_bound_is_the_servers(body: type[Body], name: str, value: Any, ok: bool) -> None:
    """A value on a bound of the schema is accepted, and one beyond is refused by the field's name."""
    schema = {**COMPONENTS[body.__name__]["properties"][name], "components": DOCUMENT["components"]}
    assert jsonschema.Draft202012Validator(schema).is_valid(value) == ok
    refused = refusal(body, {name: value})
    assert (refused is None) == ok, refused
    if refused is not None:
        field = getattr(refused, "field", None) or refused.detail.param  # type: ignore[attr-defined]
        assert field.split(".")[0] == name
        assert name in str(refused)


def test_there_are_bounds_to_test() -> None:
    bounded = {(body.__name__, name) for body, name, _, ok in EDGES if not ok}
    for name in ("temperature", "top_p", "seed", "stop", "logit_bias", "priority", "cache_salt", "n", "top_logprobs"):
        assert ("ChatBody", name) in bounded
    assert ("DetokenizeBody", "tokens") in bounded
    assert len(bounded) > 70
    assert COMPONENTS["ChatBody"]["properties"]["n"]["maximum"] == LIMITS.max_choices
    assert COMPONENTS["ChatBody"]["properties"]["temperature"]["maximum"] == 2
    assert COMPONENTS["GenerateBody"]["properties"]["temperature"]["maximum"] == 100


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, GenerateBody], ids=lambda body: body.__name__)
def test_a_bound_is_refused_over_http_by_name(server: RunningServer, body: type[Body]) -> None:
    beyonds = {name: value for one, name, value, ok in EDGES if one is body and not ok}
    assert len(beyonds) > 20
    for name, value in beyonds.items():
        response = server.post(ROUTES[body], json={**body_example(body), name: value})
        assert response.status_code == 400, (name, value)
        assert response.json()["error"]["param"].split(".")[0] == name
    assert not server.engine.of_type(Generate)


STREAMS: list[tuple[str, Json]] = [
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True}),
    ("/v1/completions", {"logprobs": 2, "echo": True}),
    ("/generate", {"logprobs": 2}),
    ("/v1/responses", {}),
    ("/v1/messages", {}),
]


@pytest.mark.parametrize(
    ("path", "change"),
    [
        *STREAMS,
        *[(path, change | {"stream": True}) for path, change in STREAMS],
        ("/tokenize", {"return_token_strs": True}),
        ("/v1/messages/count_tokens", {}),
        ("/v1/responses/input_tokens", {}),
        ("/detokenize", {}),
        ("/abort", {}),
        *[(path, None) for path in ("/v1/models", "/v1/models/test-model", "/get_model_info", "/health", "/ready")],
        *[(path, None) for path in ("/version", "/server_info", "/flush_cache", "/health_generate")],
        *[(path, None) for path in ("/model_info", "/v1/loads", "/get_loads", "/get_load", "/load")],
    ],
    ids=short,
)
def test_answers_are_as_documented(server: RunningServer, path: str, change: Json | None) -> None:
    operation = DOCUMENT["paths"][path.replace("test-model", "{model}")]["get" if change is None else "post"]
    content = operation["responses"]["200"]["content"]
    if change is None:
        response = server.get(path)
    else:
        examples = operation["requestBody"]["content"]["application/json"]["examples"]
        example = next(iter(examples.values()))["value"]
        response = server.post(path, json={**example, **change})
    assert response.status_code == 200, response.text
    kind = response.headers["content-type"].partition(";")[0]
    schema = content[kind]["schema"]
    texts = [response.text]
    if kind == "text/event-stream":
        datas = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        for data in datas:
            jsonschema.validate({"data": data}, schema)
        data_schema = schema["properties"]["data"]
        done, data_schema = data_schema.get("anyOf", [{}, data_schema])
        ends = [data for data in datas if data == done.get("const")]
        assert ends == datas[len(datas) - ("const" in done) :], "the last event, where there is such an end"
        assert data_schema["contentMediaType"] == "application/json"
        schema, texts = data_schema["contentSchema"], datas[: len(datas) - len(ends)]
    assert texts
    for text in texts:
        jsonschema.validate(json.loads(text), {**schema, "components": DOCUMENT["components"]})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_errors_are_as_documented(server: RunningServer, path: str) -> None:
    response = server.post(path, json={"messages": []})
    responses = DOCUMENT["paths"][path]["post"]["responses"]
    schema = responses[str(response.status_code)]["content"]["application/json"]["schema"]
    jsonschema.validate(response.json(), {**schema, "components": DOCUMENT["components"]})


@pytest.mark.parametrize("page", ["/docs", "/redoc"])
def test_pages_load_nothing_from_elsewhere(server: RunningServer, page: str) -> None:
    response = server.get(page)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert "http" not in response.text.replace("http-equiv", ""), "an address of another host"
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "http" not in policy
    files = re.findall(r"""(?:src|href|spec-url)=["']([^"']+)|url: '([^']+)'""", response.text)
    names = {one or other for one, other in files}
    assert "openapi.json" in names
    assert len(names) >= 3
    for name in names:
        found = server.get(f"/{name}")  # relative to /docs or /redoc
        assert found.status_code == 200, name
        assert found.content


@pytest.mark.parametrize("path", ["/docs/nothing.js", "/docs/%2e%2e/core.py", "/docs/..%2fcore.py", "/docs/"])
def test_only_the_files_of_the_pages_are_served(server: RunningServer, path: str) -> None:
    response = server.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["message"].startswith("there is no route")


def test_pages_need_no_key_and_say_that_others_do(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(api_keys=("secret",), admin_api_key="boss", root_path="/x")
    for path in ("/docs", "/redoc", "/openapi.json", "/docs/swagger-ui.css", "/x/docs", "/x/docs/favicon.png"):
        assert server.get(path).status_code == 200, path
    served = server.get("/x/openapi.json").json()
    assert served["servers"] == [{"url": "/x"}]
    assert "secret" not in json.dumps(served)
    assert served["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    paths = served["paths"]
    assert paths["/v1/completions"]["post"]["security"] == [{"bearer": []}, {"x-api-key": []}]
    assert "401" in paths["/v1/completions"]["post"]["responses"]
    assert paths["/health"]["get"]["security"] == []
    assert not paths_with_key(DOCUMENT), "a server without keys"
    assert paths_with_key(document(admin_api_key="boss")) == CONTROL_ROUTES


def paths_with_key(document: Json) -> set[str]:
    return {path for path, methods in document["paths"].items() for one in methods.values() if one["security"]}


def test_pages_of_a_foreign_name_are_refused(server: RunningServer) -> None:
    for path in ("/docs", "/openapi.json"):
        assert server.get(path, headers={"host": "evil.example"}).status_code == 403


def test_defaults_are_those_of_the_model() -> None:
    assert COMPONENTS["ChatBody"]["properties"]["temperature"]["default"] == 1.0
    assert COMPONENTS["GenerateBody"]["properties"]["temperature"]["default"] == 0.0
    assert COMPONENTS["ChatBody"]["required"] == ["messages"]


def test_the_tables_of_the_docs_are_current() -> None:
    page = PAGE.read_text()
    assert page.count("| `temperature` | number") == 6, "there are tables"
    assert write_tables(page) == page, "python tools/api_tables.py"
