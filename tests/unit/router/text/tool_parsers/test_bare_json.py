import pytest

from tandem.router.text.tool_parsers.bare_json import JsonParser, Llama3Parser
from tandem.router.text.tool_parsers.base import ToolParser
from tests.fakes.parts import joined

NAMES = ("f", "g")
LLAMA = {
    '{"name": "f", "parameters": {"a": 1}}': [("call", "f"), ("arguments", '{"a": 1}')],
    ' <|python_tag|>{"name": "f", "arguments": {}}': [("call", "f"), ("arguments", "{}")],
    '{"name": "f", "parameters": {}}; {"name": "g"}': [
        ("call", "f"),
        ("arguments", "{}"),
        ("call", "g"),
        ("arguments", "{}"),
    ],
    '{"name": "f", "parameters": {}}\n{"name": "g"}': [
        ("call", "f"),
        ("arguments", "{}"),
        ("call", "g"),
        ("arguments", "{}"),
    ],
    'Well. <|python_tag|>{"name": "f"}': [("content", "Well."), ("call", "f"), ("arguments", "{}")],
    '{"name": "h", "parameters": {}}': [("content", '{"name": "h", "parameters": {}}')],
    '{"city": "Bern"}': [("content", '{"city": "Bern"}')],
    "<|python_tag|>print(1)": [("content", "<|python_tag|>print(1)")],
    'So: {"name": "f"}': [("content", 'So: {"name": "f"}')],
    '{"name": "f", "parameters": {}}; x': [("call", "f"), ("arguments", "{}"), ("content", "; x")],
}
JSON = {
    '{"name": "f", "arguments": {"a": 1}}': [("call", "f"), ("arguments", '{"a": 1}')],
    '\n[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]\n': [
        ("call", "f"),
        ("arguments", "{}"),
        ("call", "g"),
        ("arguments", "{}"),
        ("content", "\n"),
    ],
    '[{"name": "h"}]': [("content", '[{"name": "h"}]')],
    "[1, 2]": [("content", "[1, 2]")],
    "[": [("content", "[")],
    '{"name": "f"': [("call", "f")],
    '{"name": "': [("content", '{"name": "')],
}


def parts_of(parser: ToolParser, text: str) -> list[tuple[str, str]]:
    return joined(parser.feed(text) + parser.finish())


@pytest.mark.parametrize("text", LLAMA)
def test_llama(text: str) -> None:
    assert parts_of(Llama3Parser(NAMES), text) == LLAMA[text]


@pytest.mark.parametrize("text", JSON)
def test_json(text: str) -> None:
    assert parts_of(JsonParser(NAMES), text) == JSON[text]
