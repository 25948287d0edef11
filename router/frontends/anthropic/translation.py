"""Translates a request for a message to a chat's body."""

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

from tandem.router.errors import InvalidRequestError
from tandem.router.frontends.anthropic.schema import (
    Block,
    CountTokensRequest,
    InputMessage,
    Marked,
    MessagesTool,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    text_of,
)
from tandem.router.frontends.openai.one_output import translated
from tandem.router.frontends.openai.tools_schema import ChatRequest

# Names of a chat's fields in this API.
NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of(body: CountTokensRequest, max_tokens: int | None) -> ChatRequest:
    messages: list[dict[str, Any]] = []
    if system := text_of(body.system):
        messages.append({"role": "system", "content": system})
    for message in body.messages:
        messages += _messages_of(message)
    content: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "max_tokens": max_tokens,
        "stop": body.stop_sequences,
        "chat_template_kwargs": _variables(body),
        "tool_choice": _choice(body),
        "reasoning_effort": body.output_config.effort if body.output_config else None,
    }
    if body.messages[-1].role == "assistant":
        if "tool_calls" in messages[-1] or not messages[-1]["content"]:
            raise InvalidRequestError("the last message is an assistant's without text to continue", "messages")
        content["continue_final_message"] = True
    if body.tools:
        content["tools"] = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            }
            for tool in body.tools
            if isinstance(tool, MessagesTool)
        ]
    if body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use:
        content["parallel_tool_calls"] = False
    wanted = (body.output_config.format if body.output_config else None) or body.output_format
    if wanted is not None:
        content["response_format"] = {"type": "json_schema", "json_schema": {"schema": wanted.schema_}}
    return translated(content, body, NAMES)


def has_cache_marks(body: CountTokensRequest) -> bool:
    blocks = (
        block
        for content in chain((body.system,), (message.content for message in body.messages))
        if isinstance(content, list)
        for block in _with_inner(content)
    )
    marked = chain((body,), body.tools or (), blocks)
    return any(getattr(part, "cache_control", None) is not None for part in marked)


def _with_inner(blocks: Any) -> Iterator[Marked]:
    for block in blocks:
        yield block
        if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
            yield from block.content  # type: ignore[misc]


def _variables(body: CountTokensRequest) -> dict[str, Any] | None:
    if body.thinking is None or body.thinking.type == "adaptive":
        return body.chat_template_kwargs
    return {"enable_thinking": body.thinking.type == "enabled", **(body.chat_template_kwargs or {})}


def _choice(body: CountTokensRequest) -> Any:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise InvalidRequestError("tool_choice.name: a choice of type tool needs it", "tool_choice")
    return {"type": "function", "function": {"name": choice.name}}


def _messages_of(message: InputMessage) -> list[dict[str, Any]]:
    """Results of calls become messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    return _assistant(message.content) if message.role == "assistant" else _user(message.role, message.content)


def _assistant(blocks: list[Block]) -> list[dict[str, Any]]:
    found: dict[str, Any] = {"role": "assistant", "content": ""}
    for block in blocks:
        if isinstance(block, TextBlock):
            found["content"] += block.text
        elif isinstance(block, ThinkingBlock):
            found["reasoning_content"] = found.get("reasoning_content", "") + block.thinking
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": _json(block.input)}
            found.setdefault("tool_calls", []).append({"id": block.id, "function": function})
        elif isinstance(block, ToolResultBlock):
            raise InvalidRequestError("an assistant's message has no blocks of type tool_result", "messages")
    return [found]


def _json(value: dict[str, Any]) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise InvalidRequestError("the input of a tool_use is nested too deeply", "messages") from error


def _user(role: str, blocks: list[Block]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    has_text = False
    for block in blocks:
        if isinstance(block, ToolResultBlock) and role == "user":
            found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text_of(block.content)})
            has_text = False
        elif not isinstance(block, TextBlock):
            kind = getattr(block, "type", "")
            raise InvalidRequestError(f"a message of role {role} has no blocks of type {kind}", "messages")
        elif has_text:
            found[-1]["content"] += block.text
        else:
            found.append({"role": role, "content": block.text})
            has_text = True
    return found or [{"role": role, "content": ""}]
