"""What is printed from code: the OpenAPI document and the catalogue of errors."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from aiohttp import web

from supervisor.admin.openapi import openapi_document
from supervisor.admin.problems import problem_of
from supervisor.admin.routes import ROUTES
from supervisor.errors import PreconditionError

ROOT = Path(__file__).parents[3]

SHAPE: dict[str, Any] = {
    "type": "object",
    "required": ["openapi", "info", "paths"],
    "properties": {
        "openapi": {"pattern": r"^3\.1\.\d+$"},
        "info": {"type": "object", "required": ["title", "version"]},
        "paths": {
            "type": "object",
            "patternProperties": {
                "^/": {
                    "type": "object",
                    "propertyNames": {"enum": ["get", "post"]},
                    "additionalProperties": {"$ref": "#/$defs/operation"},
                }
            },
            "additionalProperties": False,
        },
        "components": {"type": "object", "required": ["schemas", "securitySchemes"]},
        "security": {"type": "array"},
        "servers": {"type": "array"},
    },
    "additionalProperties": False,
    "$defs": {
        "operation": {
            "type": "object",
            "required": ["operationId", "summary", "responses"],
            "properties": {
                "operationId": {"type": "string"},
                "summary": {"type": "string", "minLength": 10},
                "parameters": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["name", "in", "required", "schema"],
                        "properties": {"in": {"enum": ["query", "path", "header"]}},
                    },
                },
                "requestBody": {"type": "object", "required": ["content"]},
                "responses": {
                    "type": "object",
                    "propertyNames": {"pattern": r"^([1-5]\d\d|default)$"},
                    "additionalProperties": {
                        "type": "object",
                        "required": ["description"],
                    },
                },
                "security": {"type": "array"},
            },
            "additionalProperties": False,
        }
    },
}


def test_every_route_is_in_the_document_and_nothing_else() -> None:
    document = openapi_document()
    listed = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert listed == {(route.method, route.path) for route in ROUTES}
    ids = [item["operationId"] for p in document["paths"].values() for item in p.values()]
    assert len(ids) == len(set(ids))


def test_the_document_has_the_shape_of_openapi_3_1() -> None:
    document = openapi_document()
    jsonschema.Draft202012Validator(SHAPE).validate(document)
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for reference in re.findall(r"'\$ref': '([^']+)'", str(document)):
        node: Any = document
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]


def test_open_routes_are_marked_and_path_parameters_are_declared() -> None:
    for route in ROUTES:
        operation = openapi_document()["paths"][route.path][route.method.lower()]
        assert ({} in operation.get("security", [])) == route.is_open
        declared = {p["name"] for p in operation["parameters"] if p["in"] == "path"}
        assert declared == set(re.findall(r"{(\w+)}", route.path))
        assert ("requestBody" in operation) == (
            route.method == "POST" and bool(route.parameters.model_fields)
        )


def test_problems_of_our_errors_and_of_others() -> None:
    details = {"epoch": 3}
    problem = problem_of(PreconditionError("not now", hint="wait", details=details))
    assert problem == {
        "type": "urn:understudy:problem:precondition", "title": "Precondition", "status": 412,
        "code": "precondition", "detail": "not now", "hint": "wait", "details": details,
    }  # fmt: skip
    assert problem_of(web.HTTPNotFound())["code"] == "not_found"
    internal = problem_of(ValueError("password=1234"))
    assert (internal["status"], internal["code"]) == (500, "internal")
    assert "1234" not in str(internal)


def test_the_catalogue_of_errors_is_current() -> None:
    # In an interpreter of its own: it forbids torch, and other tests define errors too.
    printed = subprocess.run(
        [sys.executable, "-m", "supervisor.admin.errors_doc"],
        capture_output=True, text=True, check=True, cwd=ROOT, timeout=60,
    ).stdout  # fmt: skip
    assert (ROOT / "docs" / "errors.md").read_text() == printed, (
        "run: python -m supervisor.admin.errors_doc > docs/errors.md"
    )


def test_every_error_says_when_it_is_raised() -> None:
    rows = [line for line in (ROOT / "docs" / "errors.md").read_text().splitlines() if "`" in line]
    table = [row for row in rows if row.startswith("| `")]
    assert len(table) > 20
    for row in table:
        assert len(row.rstrip(" |").rsplit("|", 1)[-1].strip()) > 15, row


@pytest.mark.parametrize("code", ["precondition", "conflict", "not_found", "unauthorized"])
def test_the_catalogue_has_the_errors_of_the_api(code: str) -> None:
    assert f"| `{code}` |" in (ROOT / "docs" / "errors.md").read_text()
