"""Closing of schemas' objects, by what the grammars made from them take."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from tandem.grammar_limits import LIMITS
from tandem.router.text import closed_objects, grammar_check
from tandem.router.text.closed_objects import close_objects

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}


def takes(schema: Any, value: Any, *, closes_objects: bool = True) -> bool:
    grammar = grammar_check.translate("json_schema", json.dumps(schema), closes_objects)
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(grammar_check._Bytes())), grammar, log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(list(json.dumps(value).encode())) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (A, [{"a": 1}], [{"a": 1, "b": 2}]),
        ({"type": "object", "properties": {}}, [{}], [{"b": 2}]),
        # Any object.
        ({"type": "object"}, [{}, {"b": 2}], []),
        ({**A, "additionalProperties": True}, [{"a": 1}, {"a": 1, "b": "x"}], []),
        ({**A, "additionalProperties": {"type": "integer"}}, [{"a": 1, "b": 2}], [{"a": 1, "b": "x"}]),
        ({"type": "array", "items": A}, [[{"a": 1}]], [[{"a": 1, "b": 2}]]),
        ({"type": "object", "properties": {"x": A}}, [{"x": {"a": 1}}], [{"x": {"a": 1, "b": 2}}]),
        ({"anyOf": [A, B]}, [{"a": 1}, {"b": 1}], [{"a": 1, "c": 2}, {"a": 1, "b": 1}]),
        ({"anyOf": [A, {"type": "null"}]}, [{"a": 1}, None], [{"a": 1, "b": 2}]),
        # A pydantic model in another, and one in a list of one.
        ({"$defs": {"A": A}, "$ref": "#/$defs/A"}, [{"a": 1}], [{"a": 1, "b": 2}]),
        ({"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}]}, [{"a": 1}], [{"a": 1, "b": 2}]),
        # Objects that several schemas describe: closed, they would take nothing.
        ({"allOf": [A, B]}, [{"a": 1, "b": 2}], [{"a": 1}]),
        ({**A, "allOf": [B]}, [{"a": 1, "b": 2}], [{"a": 1}]),
        ({"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}, B]}, [{"a": 1, "b": 2}], [{"a": 1}]),
        (
            {"$defs": {"A": A, "C": {"allOf": [{"$ref": "#/$defs/A"}]}}, "allOf": [{"$ref": "#/$defs/C"}, B]},
            [{"a": 1, "b": 2}],
            [{"a": 1}],
        ),
        ({**A, "anyOf": [B, {"properties": {"c": {"type": "null"}}}]}, [{"a": 1, "b": 2}], []),
        # Inside of such an object, others are closed.
        (
            {"allOf": [{"type": "object", "properties": {"x": A}, "required": ["x"]}, B]},
            [{"x": {"a": 1}, "b": 2}],
            [{"x": {"a": 1, "z": 1}, "b": 2}],
        ),
    ],
)
def test_objects_are_closed_unless_they_say_otherwise(schema: Any, good: list[Any], bad: list[Any]) -> None:
    assert all(takes(schema, value) for value in good)
    assert not any(takes(schema, value) for value in bad)


def test_open_objects_stay_as_json_schema_has_them() -> None:
    assert takes(A, {"a": 1, "b": 2}, closes_objects=False)
    assert not takes({**A, "additionalProperties": False}, {"a": 1, "b": 2}, closes_objects=False)


def test_only_schemas_are_looked_at_and_the_client_s_stays() -> None:
    schema = {**A, "default": {"properties": {}}, "enum": [{"properties": {}}], "properties": {"properties": A}}
    before = json.dumps(schema)
    closed = close_objects(schema)
    assert json.dumps(schema) == before
    assert (closed["default"], closed["enum"]) == (schema["default"], schema["enum"])
    assert closed["properties"]["properties"]["additionalProperties"] is False


def test_schemas_that_refer_to_themselves() -> None:
    node: dict[str, Any] = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}
    assert takes(node, {"next": {"next": None}}) and not takes(node, {"next": {"x": None}})
    with pytest.raises(ValueError, match="nested too deeply"):
        deep: Any = {}
        for _ in range(900):
            deep = {"items": deep}
        grammar_check.translate("json_schema", json.dumps(deep))


def test_a_chain_of_references_costs_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    num_looks = 0
    look = closed_objects._is_composed

    def counted(schema: Any) -> bool:
        nonlocal num_looks
        num_looks += 1
        return look(schema)

    monkeypatch.setattr(closed_objects, "_is_composed", counted)
    length = 200
    definitions = {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(length)} | {f"a{length}": A}
    closed = close_objects({"$defs": definitions, "allOf": [{"$ref": "#/$defs/a0"}, B]})
    assert "additionalProperties" not in closed["$defs"][f"a{length}"]
    assert num_looks < 4 * length


def test_a_reference_that_is_no_text_is_left_to_the_grammar() -> None:
    schema = {"allOf": [{"$ref": {"a": 1}}, B]}
    assert close_objects(schema) == schema


def test_a_part_by_reference_may_be_anywhere() -> None:
    both = {"allOf": [{"$ref": "#/properties/x"}, B]}
    schema = {"type": "object", "properties": {"x": A, "y": both}, "required": ["x", "y"]}
    assert takes(schema, {"x": {"a": 1}, "y": {"a": 1, "b": 2}})
    assert not takes(schema, {"x": {"a": 1}, "y": {"a": 1, "b": 2}, "z": 3})
