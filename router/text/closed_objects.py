"""Closes the objects of JSON schemas: a weak model adds keys to an open object until its output is cut off."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_DEFINITIONS = ("$defs", "definitions")
_SCHEMAS_BY_NAME = ("properties", "patternProperties", *_DEFINITIONS)
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "additionalItems", "unevaluatedProperties")
# Keywords whose schemas are for the same object.
_COMPOSING = ("allOf", "anyOf", "oneOf", "$ref")
_SAYS_OTHERS = ("additionalProperties", "unevaluatedProperties")


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy in which objects with `properties` take no others, unless they say which.

    Objects that several schemas describe together stay open: each of them would forbid the others' properties. Raises
    RecursionError.
    """
    shared: set[str] = set()
    while True:
        num_before = len(shared)
        shared |= {ref for place in _places(schema, shared) if place.is_part and (ref := place.schema.get("$ref"))}
        if len(shared) == num_before:
            break
    return _closed(schema, "#" in shared, shared)


class _Place(NamedTuple):
    """Attributes: is_part: whether other schemas describe the same object."""

    schema: Mapping[str, Any]
    is_part: bool


def _places(schema: Any, shared: set[str]) -> Iterator[_Place]:
    waiting = [_Place(schema, "#" in shared)]
    while waiting:
        place = waiting.pop()
        if not isinstance(place.schema, dict):
            continue
        is_part = place.is_part or _is_composed(place.schema)
        yield _Place(place.schema, is_part)
        for key, value in place.schema.items():
            waiting += [_Place(inner, inner_is_part) for _, inner, inner_is_part in _inner(key, value, is_part, shared)]


def _inner(key: str, value: Any, is_part: bool, shared: set[str]) -> Iterator[tuple[Any, Any, bool]]:
    """Yields name or index, schema, and whether it is a part of an object."""
    if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
        for name, inner in value.items():
            yield name, inner, key in _DEFINITIONS and _pointer(key, name) in shared
    elif key in _SCHEMA_LISTS and isinstance(value, list):
        for index, inner in enumerate(value):
            yield index, inner, is_part and key in _COMPOSING
    elif key in _SCHEMAS:
        yield None, value, False


def _closed(schema: Any, is_part: bool, shared: set[str]) -> Any:
    if not isinstance(schema, dict):
        return schema
    is_part = is_part or _is_composed(schema)
    found = dict(schema)
    for key, value in schema.items():
        inner = [(name, _closed(of, part, shared)) for name, of, part in _inner(key, value, is_part, shared)]
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            found[key] = dict(inner)
        elif key in _SCHEMA_LISTS and isinstance(value, list):
            found[key] = [schema for _, schema in inner]
        elif inner:
            [(_, found[key])] = inner
    if "properties" in schema and not is_part and not any(name in schema for name in _SAYS_OTHERS):
        found["additionalProperties"] = False
    return found


def _is_composed(schema: Mapping[str, Any]) -> bool:
    parts = [name for name in _COMPOSING if name in schema]
    every = schema.get("allOf")
    num_parts = len(parts) + (len(every) - 1 if isinstance(every, list) else 0)
    return num_parts > (0 if "properties" in schema else 1)


def _pointer(key: str, name: str) -> str:
    return f"#/{key}/{name.replace('~', '~0').replace('/', '~1')}"
