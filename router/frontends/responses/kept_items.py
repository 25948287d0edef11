"""The items of kept turns as JSON. They are validated before they are kept, so reading them validates nothing."""

import json
from collections.abc import Sequence
from typing import Any

from tandem.router.errors import InvalidRequestError
from tandem.router.frontends.openai.streaming import to_json
from tandem.router.frontends.responses.answer import item_id
from tandem.router.frontends.responses.schema import (
    CallItem,
    CallOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
    ReasoningText,
)

# About the number of items that one body can hold.
MAX_ITEMS = 2**13
_ID_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
# Every item begins with it. Text cannot hold it, because JSON escapes quotes.
_ITEM_MARK = b'{"id":"'


def write_items(items: Sequence[Item]) -> bytes:
    """Returns a request's own items as JSON, each with an id."""
    found = []
    for item in items:
        content = item.model_dump(exclude_none=True)
        kind = content.setdefault("type", "message")
        if isinstance(item, MessageItem):
            part_type = "output_text" if item.role == "assistant" else "input_text"
            content["content"] = [{"type": part_type, "text": item.text}]
        found.append({"id": item_id(_ID_PREFIXES.get(kind, "msg")), **content})
    return to_json(found).encode()


def read_items(parts: Sequence[bytes], param: str) -> list[Item]:
    """Returns the items of kept parts, in order. Raises InvalidRequestError above MAX_ITEMS."""
    num_items = sum(part.count(_ITEM_MARK) for part in parts)
    if num_items > MAX_ITEMS:
        raise InvalidRequestError(
            f"the kept conversation has {num_items} items; at most {MAX_ITEMS} are taken: begin a new one", param
        )
    return [_item(content) for part in parts for content in json.loads(part)]


def _item(content: dict[str, Any]) -> Item:
    match content["type"]:
        case "function_call":
            called: dict[str, Any] = {name: content[name] for name in ("call_id", "name", "arguments")}
            called["namespace"] = content.get("namespace")
            return CallItem.model_construct(type="function_call", **called)
        case "function_call_output":
            output = _text(content["output"])
            return CallOutputItem.model_construct(
                type="function_call_output", call_id=content["call_id"], output=output
            )
        case "reasoning":
            text = ReasoningText.model_construct(type="reasoning_text", text=_text(content.get("content")))
            return ReasoningItem.model_construct(type="reasoning", content=[text])
        case _:
            return MessageItem.model_construct(type="message", role=content["role"], content=_text(content["content"]))


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part["text"] for part in content)
