import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.text.tool_parsers.json_scanner import JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES, st.booleans(), st.integers(1, 5))
def test_end_of_value(value: object, ensure_ascii: bool, length: int) -> None:
    text = json.dumps(value, ensure_ascii=ensure_ascii)
    whole = f"{text}, 1]"
    scanner, position = JsonScanner(), 0
    for end in range(length, len(whole) + length, length):
        if not scanner.is_done:
            position = scanner.scan(whole[:end], position)
    assert (scanner.is_done, scanner.is_broken, whole[:position]) == (True, False, text)
    assert scanner.first == text[0]


@pytest.mark.parametrize(("text", "end"), [("]", 0), (",", 0), ("{]", 1), ("[1, {2]", 6), ("é", 0)])
def test_invalid_value(text: str, end: int) -> None:
    scanner = JsonScanner()
    assert scanner.scan(text, 0) == end and scanner.is_broken


@pytest.mark.parametrize("text", ["", "{", '"\\', '"\\"', '{"}', "12", "nul", "[[]"])
def test_unfinished_value(text: str) -> None:
    scanner = JsonScanner()
    assert scanner.scan(text, 0) == len(text) and not scanner.is_done and not scanner.is_broken
