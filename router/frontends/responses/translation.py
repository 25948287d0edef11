"""Translates a request for a response to a chat's body."""

from collections.abc import Sequence
from typing import Any

from tandem.router.frontends.openai.one_output import translated
from tandem.router.frontends.openai.tools_schema import ChatRequest
from tandem.router.frontends.responses.namespaces import chosen_name, flat_functions, flat_name
from tandem.router.frontends.responses.schema import (
    CallItem,
    CallOutputItem,
    Item,
    MessageItem,
    NamedFunction,
    ReasoningItem,
    ResponseRequest,
    TextFormat,
)

# Names of a chat's fields in this API.
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


def items_of(body: ResponseRequest) -> list[Item]:
    if isinstance(body.input, str):
        return [MessageItem(type="message", role="user", content=body.input)]
    return body.input


def chat_of(body: ResponseRequest, items: Sequence[Item]) -> ChatRequest:
    """Args: items: the whole conversation. Raises InvalidRequestError."""
    messages = messages_of(items)
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    content: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "max_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls,
        "chat_template_kwargs": body.chat_template_kwargs,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "logprobs": body.num_logprobs is not None,
        "top_logprobs": body.num_logprobs,
    }
    if body.tools:
        content["tools"] = [{"type": "function", "function": function} for function in flat_functions(body.tools)]
    if isinstance(body.tool_choice, NamedFunction):
        content["tool_choice"] = {
            "type": "function",
            "function": {"name": chosen_name(body.tool_choice.name, body.tools)},
        }
    else:
        content["tool_choice"] = body.tool_choice
    if body.text is not None and body.text.format is not None:
        content["response_format"] = _response_format(body.text.format)
    return translated(content, body, NAMES)


def _response_format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    return {"type": wanted.type, "json_schema": {"name": wanted.name, "schema": wanted.schema_}}


def messages_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Returns a chat's messages; an assistant's consecutive items make one message."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    for item in items:
        if isinstance(item, ReasoningItem) and not item.text:
            # Unreadable reasoning of other servers.
            continue
        if isinstance(item, CallOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.text})
            turn = None
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": item.text})
            turn = None
        else:
            if turn is None or not _goes_on(turn, item):
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _add(turn, item)
    return messages


def _goes_on(turn: dict[str, Any], item: Item) -> bool:
    return isinstance(item, CallItem) or (not turn["content"] and "tool_calls" not in turn)


def _add(turn: dict[str, Any], item: Item) -> None:
    if isinstance(item, CallItem):
        call = {
            "id": item.call_id,
            "function": {"name": flat_name(item.namespace, item.name), "arguments": item.arguments},
        }
        turn.setdefault("tool_calls", []).append(call)
    elif isinstance(item, ReasoningItem):
        turn["reasoning_content"] = turn.get("reasoning_content", "") + item.text
    elif isinstance(item, MessageItem):
        turn["content"] = item.text
