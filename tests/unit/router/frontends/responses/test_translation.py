"""Items of a conversation as a chat's messages."""

from typing import Any

import pytest

from tandem.router.frontends.responses.schema import ResponseRequest
from tandem.router.frontends.responses.translation import items_of, messages_of

USER = {"role": "user", "content": "u"}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "s", "annotations": []}]}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}
HIDDEN = {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "y"}
CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "r"}
CALLS: dict[str, Any] = {"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}
TWO_CALLS: dict[str, Any] = {"tool_calls": CALLS["tool_calls"] * 2}
TOOL = {"role": "tool", "tool_call_id": "c", "content": "r"}


def assistant(content: str = "", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([USER, SAID, USER], [USER, assistant("s"), USER]),
        ([SAID, SAID], [assistant("s"), assistant("s")]),
        ([THOUGHT, SAID], [assistant("s", reasoning_content="t")]),
        ([THOUGHT, THOUGHT, CALLED], [assistant(reasoning_content="tt", **CALLS)]),
        ([SAID, CALLED, CALLED, RESULT, RESULT], [assistant("s", **TWO_CALLS), TOOL, TOOL]),
        ([CALLED, RESULT, CALLED], [assistant(**CALLS), TOOL, assistant(**CALLS)]),
        ([CALLED, SAID], [assistant(**CALLS), assistant("s")]),
        ([SAID, THOUGHT, SAID], [assistant("s"), assistant("s", reasoning_content="t")]),
        ([HIDDEN, THOUGHT, SAID, HIDDEN, USER], [assistant("s", reasoning_content="t"), USER]),
        ([{"role": "developer", "content": "d"}, USER], [{"role": "developer", "content": "d"}, USER]),
    ],
)
def test_what_an_assistant_does_in_a_row_is_one_message(
    items: list[dict[str, Any]], messages: list[dict[str, Any]]
) -> None:
    body = ResponseRequest.model_validate({"input": items})
    assert messages_of(items_of(body)) == messages
    assert not body.unknown_fields.num_fields
