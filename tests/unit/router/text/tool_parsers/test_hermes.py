import pytest

from tandem.router.text.tool_parsers.hermes import HermesParser
from tests.fakes.parts import joined

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>"}}\n</tool_call>'
ARGUMENTS = '{"a": "</tool_call>"}'
F = [("call", "f"), ("arguments", ARGUMENTS)]
TEXTS = {
    CALL: F,
    f"{CALL}\n{CALL}": [*F, *F],
    f"I look.\n\n{CALL}\n\nDone.": [("content", "I look."), *F, ("content", "\n\nDone.")],
    CALL.removesuffix("</tool_call>") + CALL: [*F, *F],
    CALL.removesuffix("}\n</tool_call>"): F,
    '<tool_call>{"name": "f"}\n{"name": "g"}</tool_call>': [
        ("call", "f"),
        ("arguments", "{}"),
        ("call", "g"),
        ("arguments", "{}"),
    ],
    '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>.': [
        ("call", "f"),
        ("arguments", '{"a": 1}'),
        ("content", "."),
    ],
    '<tool_call>{"name": "f", "arguments": {"a": 1}}}\n</tool_call>': [("call", "f"), ("arguments", '{"a": 1}')],
    # Unknown functions: the client tells the model.
    '<tool_call>{"name": "h"}</tool_call>': [("call", "h"), ("arguments", "{}")],
    "<tool_call>f()</tool_call>": [("content", "<tool_call>f()</tool_call>")],
    '<tool_call>{"arguments": {"a": 1}}</tool_call>': [("content", '<tool_call>{"arguments": {"a": 1}}</tool_call>')],
    '<tool_call>{"name": "': [("content", '<tool_call>{"name": "')],
    "a <tool_cal": [("content", "a <tool_cal")],
    " \n ": [("content", " \n ")],
    '<tool_call>{"name": "f", "arguments": {"a": ]}}</tool_call>': [
        ("call", "f"),
        ("arguments", '{"a": '),
        ("content", "]}}</tool_call>"),
    ],
    '<tool_call>{"name": "f", "arguments": {a: 1}}</tool_call>': [("call", "f"), ("arguments", "{a: 1}")],
}


@pytest.mark.parametrize("text", TEXTS)
def test_calls(text: str) -> None:
    parser = HermesParser(("f",))
    assert joined(parser.feed(text) + parser.finish()) == TEXTS[text]


@pytest.mark.parametrize("cut", ["<", "</tool", "\n</tool_call", "\n"])
def test_a_closing_mark_that_is_cut_off_is_no_content(cut: str) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}'
    parser = HermesParser(("f",))
    assert joined(parser.feed(call + cut) + parser.finish()) == [("call", "f"), ("arguments", "{}")]
    # Other text is, and so is an opening mark that is cut off.
    for text in ("</div", "</tool_call> <tool"):
        parser = HermesParser(("f",))
        assert joined(parser.feed(call + text) + parser.finish())[-1][0] == "content"


def test_arguments_are_streamed() -> None:
    parser = HermesParser(("f",))
    assert parser.feed('Hm. <tool_call>{"name": "f"')[-1].kind == "call"
    assert [part.text for part in parser.feed(', "arguments": {"a')] == ['{"a']
    assert [part.text for part in parser.feed('": 1')] == ['": 1']
    assert [part.text for part in parser.feed("}}</tool")] == ["}"]
    assert parser.feed("_call>") == [] and parser.finish() == []
