"""JSON Schema of what `--json` prints, made from the dataclasses themselves: `flashpatch COMMAND --json-schema`."""

from __future__ import annotations

import dataclasses
import types
import typing

SIMPLE = {str: "string", int: "integer", bool: "boolean", type(None): "null"}


def json_schema(report: type) -> dict:
    """The schema of one command's document: the report's fields, and the exit code."""
    schema = _object(report)
    schema["properties"]["exit_code"] = {"type": "integer"}
    schema["required"].append("exit_code")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": report.__name__, **schema}


def _object(kind: type) -> dict:
    hints = typing.get_type_hints(kind, include_extras=True)
    properties = {field.name: _value(hints[field.name]) for field in dataclasses.fields(kind)}
    return {
        "type": "object",
        "description": (kind.__doc__ or "").strip(),
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _value(hint) -> dict:
    if dataclasses.is_dataclass(hint):
        return _object(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return {**_value(arguments[0]), "description": arguments[1]}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_value(argument) for argument in arguments]}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is tuple and arguments[-1] is not Ellipsis:
        return {"type": "array", "prefixItems": [_value(argument) for argument in arguments], "items": False}
    if origin in (list, tuple):
        return {"type": "array", "items": _value(arguments[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _value(arguments[1])}
    if hint is float:
        return {"type": ["number", "null"]}  # null: not a finite number
    if hint in SIMPLE:
        return {"type": SIMPLE[hint]}
    raise TypeError(f"no JSON Schema for {hint}")
