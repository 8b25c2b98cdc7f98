"""The shapes that the protocol's REST schema promises for answers; ``schema.json`` names its source."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

FILE = Path(__file__).with_name("schema.json")


@cache
def described() -> Any:
    """All of ``schema.json``."""
    return json.loads(FILE.read_text("utf-8"))


@cache
def _validator(name: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": described()["components"]})


def violations(name: str, value: Any) -> list[str]:
    """In what a value differs from the shape of this name."""
    found = sorted(_validator(name).iter_errors(value), key=lambda each: each.json_path)
    return [f"{name} {each.json_path}: {' '.join(each.message.split())[:120]}" for each in found]


def resolve(document: dict[str, Any], node: Any) -> Any:
    """The target of a node of an OpenAPI document that is a reference, or else the node itself."""
    while isinstance(node, dict) and "$ref" in node:
        target: Any = document
        for part in node["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        node = target
    return node
