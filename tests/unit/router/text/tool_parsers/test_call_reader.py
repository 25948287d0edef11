import pytest

from tandem.router.text.tool_parsers.call_reader import CallReader

READ = {
    '{"name": "f", "arguments": {"a": [1, "}"]}}': ("f", '{"a": [1, "}"]}'),
    '{"name":"f","parameters":{}}': ("f", "{}"),
    '{"arguments": {"a": 1}, "name": "f"}': ("f", '{"a": 1}'),
    '{"type": "function", "id": 5, "name": "f", "arguments": {}, "more": [{}]}': ("f", "{}"),
    '{"name": "f"}': ("f", "{}"),
    '{"name": "f", "arguments": null}': ("f", "{}"),
    '{"name": "f", "arguments": "{\\"a\\": 1}"}': ("f", '{"a": 1}'),
    '{"arguments": "{\\"a\\": 1}", "name": "f"}': ("f", '{"a": 1}'),
    '{"name": "f", "arguments": [1]}': ("f", "[1]"),
    '{"name": "f", "arguments": 5 }': ("f", "5"),
    '{"name": "\\u0066", "arguments": {}, "name": "g", "arguments": {"b": 1}}': ("f", "{}"),
}
BROKEN = ["[", "{}", '{"name"}', '{"name": 5}', '{"name": ""}', '{"name": "h"}', '{name: "f"}', '{"a": 1,}', '{"a" 1}']


def read(text: str, names: tuple[str, ...] | None = ("f", "g")) -> tuple[CallReader, list[str], list[str]]:
    found_names: list[str] = []
    arguments: list[str] = []
    reader = CallReader(lambda name, _: found_names.append(name), lambda piece, _: arguments.append(piece), names)
    reader.read(text, 0)
    return reader, found_names, arguments


@pytest.mark.parametrize("text", READ)
def test_name_and_arguments(text: str) -> None:
    reader, names, arguments = read(text)
    assert reader.is_done and not reader.is_broken
    assert (names, "".join(arguments)) == ([READ[text][0]], READ[text][1])


@pytest.mark.parametrize("text", BROKEN)
def test_not_a_call(text: str) -> None:
    reader, names, arguments = read(text)
    assert reader.is_broken and not (reader.has_started or names or arguments)


def test_any_name_is_accepted_without_names() -> None:
    assert read('{"name": "h"}', None)[1] == ["h"]


def test_rest_at_end_of_text() -> None:
    reader, _, arguments = read('{"name": "f", "arguments": "{\\"a')
    assert (arguments, reader.rest()) == ([], '"{\\"a')
    assert read('{"name": "f", "arguments": {"a')[0].rest() == ""
