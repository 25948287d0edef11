"""Closes the objects of JSON schemas: a weak model adds keys to an open object until its output is cut off."""

from collections.abc import Iterator, Mapping
from typing import Any

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "additionalItems", "unevaluatedProperties")
# Keywords whose schemas are for the same object.
_COMPOSING_LISTS = ("allOf", "anyOf", "oneOf")
_COMPOSING = (*_COMPOSING_LISTS, "$ref")
_SAYS_OTHERS = ("additionalProperties", "unevaluatedProperties")


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy in which objects with `properties` take no others, unless they say which.

    Objects that several schemas describe together stay open: each of them would forbid the others' properties. Raises
    RecursionError.
    """
    return _closed(schema, "#", _parts(dict(_schemas(schema))))


def _schemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields all schemas in a schema, with their JSON pointers."""
    waiting: list[tuple[str, Any]] = [("#", schema)]
    while waiting:
        pointer, found = waiting.pop()
        if isinstance(found, dict):
            yield pointer, found
            waiting += [(place, inner) for key in found for _, place, inner in _inner(found, key, pointer)]


def _parts(schemas: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Returns the pointers of schemas that describe an object together with others."""
    parts: set[str] = set()
    waiting = [pointer for pointer, schema in schemas.items() if _is_composed(schema)]
    while waiting:
        pointer = waiting.pop()
        if pointer in parts or (schema := schemas.get(pointer)) is None:
            continue
        parts.add(pointer)
        if isinstance(reference := schema.get("$ref"), str):
            waiting.append(reference)
        waiting += [inner for key in _COMPOSING_LISTS for _, inner, _ in _inner(schema, key, pointer)]
    return parts


def _inner(schema: Mapping[str, Any], key: str, pointer: str) -> list[tuple[Any, str, Any]]:
    """Returns name or index, JSON pointer and schema, for each schema under a keyword."""
    value = schema.get(key)
    if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
        return [(name, f"{pointer}/{key}/{_escaped(name)}", inner) for name, inner in value.items()]
    if key in _SCHEMA_LISTS and isinstance(value, list):
        return [(index, f"{pointer}/{key}/{index}", inner) for index, inner in enumerate(value)]
    if key in _SCHEMAS:
        return [(None, f"{pointer}/{key}", value)]
    return []


def _closed(schema: Any, pointer: str, parts: set[str]) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for key, value in schema.items():
        inner = [(name, _closed(of, place, parts)) for name, place, of in _inner(schema, key, pointer)]
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            found[key] = dict(inner)
        elif key in _SCHEMA_LISTS and isinstance(value, list):
            found[key] = [closed for _, closed in inner]
        elif inner:
            [(_, found[key])] = inner
    if "properties" in schema and pointer not in parts and not any(name in schema for name in _SAYS_OTHERS):
        found["additionalProperties"] = False
    return found


def _is_composed(schema: Mapping[str, Any]) -> bool:
    parts = [name for name in _COMPOSING if name in schema]
    every = schema.get("allOf")
    num_parts = len(parts) + (len(every) - 1 if isinstance(every, list) else 0)
    return num_parts > (0 if "properties" in schema else 1)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
