"""The OpenAPI 3.1 document of the admin API, made from the route table that registers handlers."""

import re
from functools import cache
from typing import Any, Final

import msgspec

from supervisor.admin.controller import Operation
from supervisor.admin.problems import CONTENT_TYPE
from supervisor.admin.routes import ROUTES, Route

__all__ = ["openapi_document"]

_REF: Final = "#/components/schemas/"
_ANY_OBJECT: Final = {"type": "object", "additionalProperties": True}

_PROBLEM: Final = {
    "type": "object",
    "description": "An error, as RFC 9457 describes it. Match on `code`.",
    "required": ["type", "title", "status", "code", "detail", "hint"],
    "properties": {
        "type": {"type": "string", "description": "`urn:understudy:problem:` and the code"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "code": {"type": "string", "description": "Stable; see docs/errors.md"},
        "detail": {"type": "string", "description": "One sentence for people"},
        "hint": {"type": "string", "description": "What to do next; may be empty"},
        "details": _ANY_OBJECT,
    },
}


@cache
def openapi_document(version: str = "1") -> dict[str, Any]:
    """The whole document. The same object every time: do not change it."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {"Problem": _PROBLEM, **_operation_schemas()}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
        if route.method == "POST" and route.parameters.model_fields:
            schema = route.parameters.model_json_schema(ref_template=_REF + "{model}")
            schemas[route.parameters.__name__] = schema
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Understudy admin API",
            "version": version,
            "description": "Over the Unix socket no token is needed. Over TCP everything needs the "
            "token of `state_dir/admin.token` but what is marked without security here.",
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "parameters": [*_path_parameters(route), *_query_parameters(route)],
        "responses": _responses(route),
    }
    if route.is_open:
        operation["security"] = [{}, {"token": []}]
    if route.method == "POST":
        operation["parameters"].append(_IDEMPOTENCY_KEY)
        if route.parameters.model_fields:
            operation["requestBody"] = {
                "required": False,
                "content": {
                    "application/json": {"schema": {"$ref": _REF + route.parameters.__name__}}
                },
            }
    return operation


_IDEMPOTENCY_KEY: Final = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "The same key gives the same operation for ten minutes.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
}


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", route.path)
    ]


def _query_parameters(route: Route) -> list[dict[str, Any]]:
    properties = route.parameters.model_json_schema().get("properties", {})
    return [
        {
            "name": name,
            "in": "query",
            "required": False,
            "description": schema.get("description", ""),
            "schema": {k: v for k, v in schema.items() if k not in {"description", "title"}},
        }
        for name, schema in properties.items()
    ]


def _responses(route: Route) -> dict[str, Any]:
    answer: dict[str, Any]
    if route.answer == "operation":
        schema = {
            "type": "object",
            "required": ["operation"],
            "properties": {"operation": {"$ref": _REF + "Operation"}},
        }
        answer = {"application/json": {"schema": schema}}
    elif route.answer == "text":
        answer = {"text/plain": {"schema": {"type": "string"}}}
    else:
        answer = {"application/json": {"schema": _ANY_OBJECT}}
        if route.answer == "events":
            answer["text/event-stream"] = {"schema": {"type": "string"}}
    responses = {"200": {"description": "Done." if route.method == "POST" else "Found."}}
    responses["200"]["content"] = answer  # type: ignore[assignment]
    if route.may_be_unavailable:
        responses["503"] = responses["200"] | {"description": "Not so now."}
    problem = {CONTENT_TYPE: {"schema": {"$ref": _REF + "Problem"}}}
    default = {"description": "A problem document.", "content": problem}
    return responses | {"default": default}


def _operation_schemas() -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components([Operation], ref_template=_REF + "{name}")
    return dict(schemas)
