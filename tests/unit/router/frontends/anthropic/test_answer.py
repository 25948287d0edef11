"""A message's events add up to the message, for any parts of an output."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tandem.router.frontends.anthropic.answer import MessageAnswer
from tandem.router.text.output_parts import Part
from tests.fakes.given_output import GivenOutput, outputs


def put_together(events: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Returns the message that a client makes of the events."""
    message: dict[str, Any] = {}
    pieces: list[str] = []
    is_open = False
    for name, content in events:
        assert content["type"] == name
        if name == "message_start":
            message = dict(content["message"])
        elif name == "content_block_start":
            assert not is_open and content["index"] == len(message["content"])
            message["content"] = [*message["content"], dict(content["content_block"])]
            pieces, is_open = [], True
        elif name == "content_block_delta":
            assert is_open and content["index"] == len(message["content"]) - 1
            ((kind, text),) = [(k, v) for k, v in content["delta"].items() if k != "type"]
            pieces.append(text)
            if kind != "partial_json":
                message["content"][-1][kind] += text
        elif name == "content_block_stop":
            block, is_open = message["content"][-1], False
            if block["type"] == "tool_use":
                block["input"] = arguments("".join(pieces))
        elif name == "message_delta":
            message |= {**content["delta"], "usage": content["usage"]}
    assert not is_open and events[-1][0] == "message_stop"
    return message


def arguments(text: str) -> Any:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


@given(outputs(), st.sampled_from(["stop", "length"]), st.sampled_from([None, "x"]), st.booleans())
def test_events_put_together_are_the_message(
    parts: list[Part], finish_reason: str, stop_string: str | None, shows_cached: bool
) -> None:
    has_calls = any(part.kind == "call" for part in parts)
    output: Any = GivenOutput(finish_reason, stop_string if finish_reason == "stop" else None, has_calls)
    answer = MessageAnswer(output, "1", "fake", shows_cached=shows_cached)
    events = answer.begin()
    for part in parts:
        events += answer.add(part)
    events += answer.end()
    message = answer.whole()
    assert put_together(events) == message
    usage = message["usage"]
    counts = [usage[f"{name}input_tokens"] for name in ("", "cache_creation_", "cache_read_")]
    assert counts == ([3, 3, 4] if shows_cached else [10, 0, 0])
    assert usage["output_tokens_details"] == {"thinking_tokens": 1}
    expected = "stop_sequence" if stop_string else "tool_use" if has_calls else "end_turn"
    assert message["stop_reason"] == ("max_tokens" if finish_reason == "length" else expected)
    assert [b["name"] for b in message["content"] if b["type"] == "tool_use"] == [
        part.text for part in parts if part.kind == "call"
    ]
