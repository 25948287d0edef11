"""Random JSON schemas over all supported features.

Each bounds its values: a random model would fill an unbounded string or list to max_tokens.
"""

import random
from typing import Any

MAX_DEPTH = 3
MAX_STRING = 8
WORDS = ("name", "age", "kind", "tags", "origin", "size", "äöü", 'a "quoted" one')


def random_schema(rng: random.Random) -> dict[str, Any]:
    defined = {"small": _value(rng, MAX_DEPTH - 1, {})}
    schema = _object(rng, 0, defined)
    return {**schema, "$defs": defined}


def _value(rng: random.Random, depth: int, defined: dict[str, Any]) -> dict[str, Any]:
    kinds = [_string, _integer, _number, _choice, _constant, _plain]
    if depth < MAX_DEPTH:
        kinds += [_object, _array, _either]
    if defined and rng.random() < 0.1:
        return {"$ref": f"#/$defs/{rng.choice(list(defined))}"}
    return rng.choice(kinds)(rng, depth, defined)


def _object(rng: random.Random, depth: int, defined: dict[str, Any]) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth + 1, defined) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int, defined: dict[str, Any]) -> dict[str, Any]:
    least = rng.randint(0, 2)
    items = _value(rng, depth + 1, defined)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _either(rng: random.Random, depth: int, defined: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [_value(rng, depth + 1, defined) for _ in range(2)]}


def _string(rng: random.Random, depth: int, defined: dict[str, Any]) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"type": "string", "pattern": rng.choice(["^[a-c]{1,5}$", "^[0-9]{3}-[A-Z]{2}$", "^(yes|no)$"])}
    if rng.random() < 0.2:
        return {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])}
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, MAX_STRING)}


def _integer(rng: random.Random, depth: int, defined: dict[str, Any]) -> dict[str, Any]:
    least = rng.randint(-1000, 1000)
    bounds = rng.choice([("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")])
    return {"type": "integer", bounds[0]: least, bounds[1]: least + rng.randint(2, 5000)}


def _number(rng: random.Random, depth: int, defined: dict[str, Any]) -> dict[str, Any]:
    # multipleOf bounds the number of digits.
    return {"type": "number", "multipleOf": rng.choice([1, 5]), "minimum": 0, "maximum": rng.randint(5, 1000)}


def _choice(rng: random.Random, depth: int, defined: dict[str, Any]) -> dict[str, Any]:
    return {"enum": rng.sample(["red", "dark green", 1, 2.5, None, True, "a\nb", '"'], rng.randint(1, 4))}


def _constant(rng: random.Random, depth: int, defined: dict[str, Any]) -> dict[str, Any]:
    return {"const": rng.choice([0, "x", None, False, ["a", 1], {"b": 2}])}


def _plain(rng: random.Random, depth: int, defined: dict[str, Any]) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null"])}
