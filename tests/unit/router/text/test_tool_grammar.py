import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from tandem.grammar_limits import LIMITS
from tandem.router.text.grammar_check import _Bytes, translate
from tandem.router.text.structured_output import StructuredOutput, after_reasoning, either, tool_calls
from tandem.router.text.tool_grammar import CALL_STYLES
from tandem.router.text.tool_parsers.table import TOOL_PARSERS

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"name": {"enum": ["Bern", "Zürich"]}},
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False, "x-guidance": {"lenient": True}}
FUNCTIONS = [("weather", json.dumps(CITY)), ("now", json.dumps(NOTHING))]


def grammar_of(wanted: StructuredOutput) -> str:
    return translate(wanted.kind, wanted.content)


def follows(wanted: StructuredOutput, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(_Bytes())), grammar_of(wanted), log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def written(parser: str, calls: list[tuple[str, Any]], several: bool) -> str:
    style = CALL_STYLES[parser]
    texts = [
        f'{style.opening}{{"name": "{name}", "{style.arguments}": {json.dumps(arguments, ensure_ascii=False)}}}'
        f"{style.closing}"
        for name, arguments in calls
    ]
    return style.first + style.between.join(texts) + style.last if several else texts[0]


@pytest.mark.parametrize("parser", CALL_STYLES)
def test_calls_match_grammar_and_parser(parser: str) -> None:
    several = tool_calls(parser, FUNCTIONS, may_be_several=True, param="tools")
    calls: list[tuple[str, Any]] = [("weather", {"city": "Zürich"}), ("now", {}), ("weather", {"city": "Bern"})]
    text = written(parser, calls, True)
    assert follows(several, text)
    reader = TOOL_PARSERS.load(parser)(("weather", "now"))
    parts = reader.feed(text) + reader.finish()
    assert [part.text for part in parts if part.kind == "call"] == ["weather", "now", "weather"]
    assert [json.loads(part.text) for part in parts if part.kind == "arguments"] == [a for _, a in calls]
    assert not [part for part in parts if part.kind == "content"]
    one = tool_calls(parser, FUNCTIONS, may_be_several=False, param="tools")
    assert follows(one, written(parser, calls, False)) and not follows(one, text)
    for wrong in ([("weather", {"city": "Basel"})], [("weather", {})], [("now", {"a": 1})], [("f", {})]):
        assert not follows(several, written(parser, wrong, True))
    assert not follows(several, "") and not follows(several, f"{text} done")


def test_after_reasoning() -> None:
    for inner, good, bad in (
        (StructuredOutput("json_schema", '{"type": "integer"}', "x"), "12", "a"),
        (StructuredOutput("regex", "a/b+", "x"), "a/bb", "ab"),
        (StructuredOutput("choice", '["yes", "no"]', "x"), "no", "nono"),
        (StructuredOutput("grammar", 'start: "(" start ")" | "x"', "x"), "((x))", "((x)"),
    ):
        begun, open_ = after_reasoning(inner, is_open=False), after_reasoning(inner, is_open=True)
        assert follows(begun, f"hm </thin\n</think>\n\n{good}") and follows(begun, f"</think>{good}")
        assert follows(open_, f"<think>hm</think>\n{good}") and follows(open_, good)
        assert not follows(begun, good) and not follows(begun, f"hm</think>{bad}") and not follows(open_, bad)
        # The first closing mark ends the reasoning.
        assert not follows(begun, f"a</think>b</think>{good}")


def test_calls_or_answer_after_reasoning() -> None:
    calls = tool_calls("hermes", FUNCTIONS, may_be_several=True, param="tools")
    wanted = either(calls, StructuredOutput("choice", '["yes", "no"]', "x"))
    call = written("hermes", [("now", {})], True)
    assert follows(wanted, call) and follows(wanted, "yes") and not follows(wanted, "maybe")
    behind = after_reasoning(wanted, is_open=False)
    assert follows(behind, f"hm</think>{call}") and follows(behind, "hm</think>no") and not follows(behind, call)
