"""Closes the objects of JSON schemas: a weak model adds keys to an open object until its output is cut off."""

from collections.abc import Iterator, Mapping
from typing import Any

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
    shared = _shared_references(schema)
    return _closed(schema, "#" in shared, shared)


def _shared_references(schema: Mapping[str, Any]) -> set[str]:
    """Returns the references to schemas that describe an object together with others. Visits each schema twice at
    most."""
    shared: set[str] = set()
    targets: dict[str, list[Any]] = {"#": [schema]}
    waiting: list[tuple[Any, bool]] = [(schema, False)]
    visited: set[tuple[int, bool]] = set()
    while waiting:
        found, is_part = waiting.pop()
        if not isinstance(found, dict) or (id(found), is_part) in visited:
            continue
        visited.add((id(found), is_part))
        is_part = is_part or _is_composed(found)
        reference = found.get("$ref")
        if is_part and isinstance(reference, str) and reference not in shared:
            shared.add(reference)
            waiting += [(target, True) for target in targets.get(reference, ())]
        for key, value in found.items():
            for name, inner, inner_is_part in _inner(key, value, is_part, shared):
                if key in _DEFINITIONS:
                    targets.setdefault(_pointer(key, name), []).append(inner)
                waiting.append((inner, inner_is_part))
    return shared


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
