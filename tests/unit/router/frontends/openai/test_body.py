"""JSON to the letter."""

import pytest
from starlette.exceptions import HTTPException

from router.frontends.openai.body import parse_json


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"a": "\xff"}', "the body is not valid UTF-8 at byte 7"),
        (rb'{"a": "\ud800"}', "the body holds a lone surrogate, which is half a character"),
        (b'{"a": 1', "the body is not valid JSON at character 7: Expecting ',' delimiter"),
        (b'{"a": NaN}', "the body is not valid JSON: NaN is no number there"),
        (b"1" * 5000, "the body holds a number with too many digits"),
        (b"[" * 100_000, "the body is nested too deeply"),
    ],
)
def test_what_is_no_json_is_said_to_be_none(body: bytes, message: str) -> None:
    with pytest.raises(HTTPException) as refused:
        parse_json(body)
    assert (refused.value.status_code, refused.value.detail) == (400, message)


def test_two_halves_make_a_character() -> None:
    assert parse_json(rb'["\ud83d\ude00", 1.5, null]') == ["\N{GRINNING FACE}", 1.5, None]
