import pytest

from tandem.router.text.tool_parsers.mistral import MistralParser
from tests.fakes.parts import joined

F, G = [("call", "f"), ("arguments", '{"a": 1}')], [("call", "g"), ("arguments", "{}")]
TEXTS = {
    '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "123456789"}, {"name": "g", "arguments": {}}]': [*F, *G],
    'I look. [TOOL_CALLS]{"name": "f", "arguments": {"a": 1}}': [("content", "I look."), *F],
    '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}': [*F, *G],
    '[TOOL_CALLS]f{"a": 1}': F,
    '[TOOL_CALLS]f[ARGS]{"a": 1} Done.': [*F, ("content", " Done.")],
    '[TOOL_CALLS]f[ARGS]{"a": ]': [("call", "f"), ("arguments", '{"a": '), ("content", "]")],
    "[TOOL_CALLS]f(1)": [("content", "[TOOL_CALLS]f(1)")],
    "[TOOL_CALLS][ARGS]{}": [("content", "[TOOL_CALLS][ARGS]{}")],
    "[TOOL_CALLS]f[ARGS]1": [("content", "[TOOL_CALLS]f[ARGS]1")],
    "[TOOL_CALLS]f[CALL_ID]1!": [("content", "[TOOL_CALLS]f[CALL_ID]1!")],
    "[TOOL_CALLS][1]": [("content", "[TOOL_CALLS][1]")],
    f"[TOOL_CALLS]{'x' * 65}[ARGS]{{}}": [("content", f"[TOOL_CALLS]{'x' * 65}[ARGS]{{}}")],
}


@pytest.mark.parametrize("text", TEXTS)
def test_calls(text: str) -> None:
    parser = MistralParser(("f", "g"))
    assert joined(parser.feed(text) + parser.finish()) == TEXTS[text]
