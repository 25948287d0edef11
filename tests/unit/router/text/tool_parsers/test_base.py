import json
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem.router.text.tool_parsers.base import ToolParser
from tandem.router.text.tool_parsers.table import TOOL_PARSERS
from tests.fakes.parts import joined

NAMES = ("f", "get_weather")
FRAGMENTS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_",
    "[TOOL_CALLS]",
    "[CALL_ID]",
    "[ARGS]",
    "<|python_tag|>",
    "<|py",
    '{"name": "f", "arguments": {"a": "}\\" <tool_call>", "b": [1, {}]}}',
    '{"name": "get_weather", "parameters": {}}',
    '{"arguments": {"x": 1}, "id": 5, "name": "f"}',
    '{"name": "f", "arguments": "{\\"a\\": 1}"}',
    '{"name": "f", "arguments": null}',
    '{"name": "f"}',
    '{"name": "other", "arguments": {}}',
    '{"name": "f", "arguments": {"a": ]',
    '{"name": 5}',
    '{"name": "f", "arguments": {',
    "get_weather",
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    ",",
    ";",
    " ",
    "\n",
    "hm é",
)
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join)


def make(name: str) -> ToolParser:
    return TOOL_PARSERS.load(name)(NAMES)


def parse(name: str, pieces: Sequence[str]) -> list[tuple[str, str]]:
    parser = make(name)
    return joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish())


def cut(text: str, places: Iterable[int]) -> list[str]:
    ends = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(ends)]


@pytest.mark.parametrize("name", TOOL_PARSERS.names)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, places=st.lists(st.integers(0, 300), max_size=12))
def test_cuts_do_not_matter(name: str, text: str, places: list[int]) -> None:
    whole = parse(name, [text])
    assert parse(name, cut(text, places)) == whole
    assert parse(name, list(text)) == whole


@pytest.mark.parametrize("name", TOOL_PARSERS.names)
@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
@example(text="[TOOL_CALLS]get_weather[TOOL_CALLS]")
@example(text="[TOOL_CALLS]get_weather[CALL_ID]a[ARG]")
def test_parts_depend_on_text_up_to_their_end(name: str, text: str) -> None:
    by_character, parts = make(name), []
    whole = make(name).feed(text)
    for end, character in enumerate(text, 1):
        new = by_character.feed(character)
        assert all(part.end <= end for part in new)
        parts += new
        assert joined(parts) == joined(make(name).feed(text[:end]))
        # Resumed streams rely on this: their events name positions in the text.
        if end in {part.end for part in whole}:
            assert joined(parts) == joined(part for part in whole if part.end <= end)


@pytest.mark.parametrize("name", TOOL_PARSERS.names)
@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_text_without_calls_is_content(name: str, text: str) -> None:
    parts = parse(name, [text])
    if all(kind == "content" for kind, _ in parts):
        assert "".join(content for _, content in parts) == text


CALL: dict[str, Any] = {"name": "f", "arguments": {"text": "x" * 50}}
LONG = {
    "hermes": [
        f"<tool_call>{json.dumps(CALL)}</tool_call>",
        '<tool_call>{"x": "',
        "<tool_cal",
        '<tool_call>{"name": "f", "arguments": {"a": "',
    ],
    "llama3_json": [json.dumps(CALL) + ";", '{"x": "', "<|python_ta"],
    "mistral": [f"[TOOL_CALLS][{json.dumps(CALL)}]", '[TOOL_CALLS]f[ARGS]{"a": "', '[TOOL_CALLS][{"x": "', "[TOOL_"],
    "json": ["[" + json.dumps(CALL) + ",", '{"x": "', " "],
}
FILLERS = ("a", " ", "\\", "{", "word ")


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("name", TOOL_PARSERS.names)
def test_work_per_token_is_constant(name: str) -> None:
    def seconds(pieces: list[str]) -> float:
        parser = make(name)
        started = time.thread_time()
        for piece in pieces:
            parser.feed(piece)
        parser.finish()
        return time.thread_time() - started

    for beginning in LONG[name]:
        for filler in (*FILLERS, beginning):
            # Rescanning would take 100 times as long for 10 times the text.
            short, long = [beginning, *[filler] * 500], [beginning, *[filler] * 5_000]
            assert seconds(long) < 40 * max(0.0003, min(seconds(short) for _ in range(3))), (beginning, filler)


@pytest.mark.usefixtures("no_collections")
def test_work_for_whole_text_is_linear() -> None:
    def seconds(num_marks: int) -> float:
        text, best = "<tool_call>" * num_marks, float("inf")
        for _ in range(3):
            parser, started = make("hermes"), time.thread_time()
            parser.feed(text)
            best = min(best, time.thread_time() - started)
        return best

    # A copy at each mark would take 400 times as long for 20 times the text.
    assert seconds(40_000) < 60 * seconds(2_000)
