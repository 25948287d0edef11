from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.router.text.output_parser import OutputParser
from tandem.router.text.output_parts import Part
from tandem.router.text.reasoning import Beginning, ReasoningParser
from tandem.router.text.tool_parsers.hermes import HermesParser

FRAGMENTS = (
    "<think>",
    "</think>",
    '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
    '<tool_call>{"arguments": {"a": 1}, "name": "g"}</tool_call>',
    "<tool_call>{",
    "hm",
    "\n",
    "<",
)
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)


def make(num_seen: int = 0, max_calls: int | None = None) -> OutputParser:
    reasoning, tools = ReasoningParser(Beginning.OPEN), HermesParser()
    return OutputParser(reasoning, tools, max_calls=max_calls, num_seen=num_seen)


def joined(parts: list[Part]) -> list[tuple[str, str, int]]:
    found: list[tuple[str, str, int]] = []
    for part in parts:
        call = part.call if part.kind in ("call", "arguments") else 0
        if found and found[-1][0] == part.kind != "call":
            found[-1] = (part.kind, found[-1][1] + part.text, call)
        else:
            found.append((part.kind, part.text, call))
    return found


@settings(deadline=None)
@given(TEXTS, st.lists(st.integers(0, 200), max_size=6), st.integers(0, 200))
def test_resumed_client_gets_the_rest(text: str, places: list[int], num_seen: int) -> None:
    expected = make().feed(text, is_last=True)
    ends = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    pieces = [text[start:end] for start, end in pairwise(ends)]
    num_seen = min(num_seen, len(text))
    seen = make().feed(text[:num_seen])
    parser = make(num_seen)
    rest = [part for piece in pieces for part in parser.feed(piece)] + parser.feed("", is_last=True)
    assert joined(seen + rest) == joined(expected)
    assert all(part.end > num_seen for part in rest if part.kind in ("call", "arguments"))


def test_reasoning_comes_first_and_hides_calls() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    parser = make()
    parts = parser.feed(f"<think>{call}</think>Well. {call}{call}", is_last=True)
    assert joined(parts) == [
        ("reasoning", call, 0),
        ("content", "Well.", 0),
        ("call", "f", 0),
        ("arguments", "{}", 0),
        ("call", "f", 1),
        ("arguments", "{}", 1),
    ]
    assert (parser.num_calls, parser.has_reasoned) == (2, True)


def test_max_calls() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    parser = make(max_calls=1)
    assert joined(parser.feed(f"{call}\n{call}", is_last=True)) == [("call", "f", 0), ("arguments", "{}", 0)]
    assert parser.num_calls == 1
