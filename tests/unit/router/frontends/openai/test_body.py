"""Strict JSON bodies."""

import contextlib
import json
import time
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from tandem.router.frontends.openai.body import MAX_DIGITS, FieldRefusal, check_structure, parse_json


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


@pytest.mark.parametrize("offset", range(0, 64, 7))
def test_integers_have_a_limit_of_digits(offset: int) -> None:
    largest, text = "9" * MAX_DIGITS, "8" * 2 * MAX_DIGITS
    taken = f'{" " * offset}[{largest}, -1{largest[1:-1]}, "{text}", 0.{text}]'
    assert parse_json(taken.encode())[:3] == [int(largest), -int(f"1{largest[1:-1]}"), text]
    with pytest.raises(HTTPException) as refused:
        parse_json(f"{' ' * offset}[1, {largest}9]".encode())
    assert refused.value.detail == "the body holds a number with too many digits"


@pytest.mark.usefixtures("no_collections")
def test_long_integers_take_no_longer_than_others() -> None:
    def cpu_s(number: str) -> float:
        body = f"[{','.join([number] * (2**22 // len(number)))}]".encode()
        began = time.thread_time()
        with contextlib.suppress(HTTPException):
            parse_json(body)
        return time.thread_time() - began

    # Meanwhile no other thread runs.
    assert cpu_s("9" * 4000) < cpu_s("9" * 100)


def test_two_halves_make_a_character() -> None:
    assert parse_json(rb'["\ud83d\ude00", 1.5, null]') == ["\N{GRINNING FACE}", 1.5, None]


MAX_ITEMS = 300_000
MESSAGE = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
BIAS = {str(i): -100 for i in range(300)}


@pytest.mark.parametrize(
    "content",
    [
        {"prompt": [[1] * 2048] * 128, "logit_bias": BIAS, "stop_token_ids": [1] * 300},
        {"messages": [MESSAGE] * 2048, "logit_bias": BIAS},
        # All of this is inside one string.
        {"prompt": ',[{"' * 400_000},
        {"prompt": '\\"' * 400_000},
        {"prompt": "\\" * 400_001},
    ],
    ids=["token ids", "messages", "structure in text", "escapes", "backslashes"],
)
def test_what_could_be_served_is_read(content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    check_structure(body, MAX_ITEMS)
    assert parse_json(body) == content


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b"[" + b"1," * 300_001 + b"1]", "the body has more than 300000 items", None),
        (b"[" + b"[]," * 20_000 + b"1]", "the body has more than 16384 lists and objects", None),
        (b"[" + b"{}," * 20_000 + b"1]", "the body has more than 16384 lists and objects", None),
        (b"[" + b'"",' * 40_000 + b"1]", "the body has more than 32768 strings", None),
        # The string does not hide the text after it.
        (b'["\\\\", "\\"' + b"," * 9 + b'", ' + b"1," * 300_001 + b"1]", "the body has more than 300000 items", None),
        (
            b'{"logit_bias": {' + b'"1":1,' * 40_000 + b'"1":1}}',
            "logit_bias: at most 300 items are taken",
            "logit_bias",
        ),
        (b'{"stop_token_ids": [' + b"1," * 300_001 + b"1]}", "stop_token_ids: at most 300 items", "stop_token_ids"),
        (b'{"messages": [' + b'{"role":1},' * 20_000 + b"{}]}", "messages: at most 2048 items are taken", "messages"),
    ],
    ids=["items", "lists", "objects", "strings", "escapes", "logit_bias", "stop_token_ids", "messages"],
)
def test_what_nothing_takes_is_not_read(body: bytes, message: str, param: str | None) -> None:
    with pytest.raises(HTTPException) as refused:
        check_structure(body, MAX_ITEMS)
    assert refused.value.status_code == 400
    assert message in refused.value.detail
    assert (refused.value.param if isinstance(refused.value, FieldRefusal) else None) == param
