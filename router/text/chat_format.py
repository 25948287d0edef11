"""Features of a chat template, and chats adapted to them."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.router.text.chat import Chat, Message

# Length of short call ids.
SHORT_ID_LENGTH = 9
_NAME, _ARGUMENT, _TEXT = "probe_function", "probe_argument", "probe_text"
_USER: Message = {"role": "user", "content": "probe"}
_TOOL = {
    "type": "function",
    "function": {"name": _NAME, "description": "probe", "parameters": {"type": "object", "properties": {}}},
}
# Small models copy placeholders that are words in quotes.
_TOOLS_TEXT = """You can call these functions:
{tools}
To call one, write only its name and its arguments, like this:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Features of a chat template.

    Attributes:
        knows_system, knows_developer, knows_tools: shown on purpose; a template that writes any role name does not
            count.
        knows_calls: shows past calls and their results.
        arguments_are_text: takes past calls' arguments as JSON text, not as objects.
        wants_short_ids: call ids must be 9 letters and digits.
        knows_effort: has a variable for the effort of reasoning.
    """

    tool_parser: str = "hermes"
    reasoning_parser: str = "none"
    knows_system: bool = True
    knows_developer: bool = False
    knows_tools: bool = False
    knows_calls: bool = False
    arguments_are_text: bool = False
    wants_short_ids: bool = False
    knows_effort: bool = False


def find_format(source: str, render: Callable[[Chat], str]) -> ChatFormat:
    """Renders chats to find features. `render` raises ValueError for a chat that the template rejects."""

    def rendered(chat: Chat) -> str:
        try:
            return render(chat)
        except ValueError:
            return ""

    def shows(text: str, chat: Chat) -> bool:
        return text in rendered(chat)

    def shows_call(*, as_text: bool, call_id: str = "0" * SHORT_ID_LENGTH) -> bool:
        arguments: Any = json.dumps({_ARGUMENT: "probe"}) if as_text else {_ARGUMENT: "probe"}
        call = {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
        talk = [
            _USER,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": _TEXT, "tool_call_id": call_id, "name": _NAME},
        ]
        text = rendered(Chat(talk))
        # Python syntax, or text quoted twice, means that this form is not intended.
        is_meant = f"'{_ARGUMENT}'" not in text and f'\\"{_ARGUMENT}' not in text
        return _ARGUMENT in text and _TEXT in text and is_meant

    knows_tools = shows(_NAME, Chat([_USER], tools=[_TOOL]))
    takes_objects, takes_text = shows_call(as_text=False), shows_call(as_text=True)
    are_text = takes_text and not takes_objects
    return ChatFormat(
        tool_parser=_tool_parser(source) if knows_tools else "hermes",
        reasoning_parser="qwen3" if "</think>" in source else "none",
        knows_system=shows(_TEXT, Chat([{"role": "system", "content": _TEXT}, _USER])),
        knows_developer="developer" in source,
        knows_tools=knows_tools,
        knows_calls=takes_objects or takes_text,
        arguments_are_text=are_text,
        wants_short_ids=(takes_objects or takes_text) and not shows_call(as_text=are_text, call_id="call_0123456789"),
        knows_effort="reasoning_effort" in source,
    )


def takes_role(role: str, render: Callable[[Chat], str]) -> bool:
    """Returns whether a template writes messages of this role, which it might also drop.

    Args:
        render: as for `find_format`.
    """
    message = {"role": role, "content": _TEXT}
    for messages in ([message, _USER], [_USER, message]):
        try:
            text = render(Chat(messages))
        except ValueError:
            continue
        if _TEXT in text and role in text:
            return True
    return False


def _tool_parser(source: str) -> str:
    if "[TOOL_CALLS]" in source:
        return "mistral"
    if "<tool_call>" in source:
        # Some formats have non-JSON calls between these tags.
        return "none" if "<function=" in source or "<arg_key>" in source else "hermes"
    if "<|python_tag|>" in source or ("<|start_header_id|>" in source and '"parameters"' in source):
        return "llama3_json"
    return "json"


def fitted(chat: Chat, known: ChatFormat) -> Chat:
    """Adapts a chat to a template. Unknown features become plain text."""
    messages = list(chat.messages)
    if not known.knows_developer:
        messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    if any(m["role"] == "tool" or "tool_calls" in m for m in messages):
        messages = _with_calls(messages, known) if known.knows_calls else _calls_as_text(messages)
    if chat.tools and not known.knows_tools:
        text = _TOOLS_TEXT.format(tools="\n".join(json.dumps(t["function"], ensure_ascii=False) for t in chat.tools))
        return replace(chat, messages=_with_preface(messages, text, known), tools=())
    return replace(chat, messages=messages)


def _with_calls(messages: Sequence[Message], known: ChatFormat) -> list[Message]:
    found = []
    for message in messages:
        message = dict(message)
        if "tool_calls" in message:
            message["tool_calls"] = [_call(call, known) for call in message["tool_calls"]]
        if known.wants_short_ids and "tool_call_id" in message:
            message["tool_call_id"] = short_id(message["tool_call_id"])
        found.append(message)
    return found


def _call(call: dict[str, Any], known: ChatFormat) -> dict[str, Any]:
    name, text = call["function"]["name"], call["function"]["arguments"]
    arguments: Any = (text or "{}") if known.arguments_are_text else _object(text)
    call_id = short_id(call["id"]) if known.wants_short_ids else call["id"]
    return {**call, "id": call_id, "function": {"name": name, "arguments": arguments}}


def _object(arguments: str) -> Any:
    try:
        value = json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def short_id(call_id: str) -> str:
    if len(call_id) == SHORT_ID_LENGTH and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.blake2b(call_id.encode(), digest_size=8).hexdigest()[:SHORT_ID_LENGTH]


def _calls_as_text(messages: Sequence[Message]) -> list[Message]:
    found: list[Message] = []
    is_result = False
    for message in messages:
        was_result, is_result = is_result, message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if was_result:
                # Templates may require alternating roles.
                found[-1]["content"] += f"\n{text}"
            else:
                found.append({"role": "user", "content": text})
        elif "tool_calls" in message:
            calls = [_call_text(call["function"]) for call in message["tool_calls"]]
            content = "\n".join([message["content"], *calls] if message["content"] else calls)
            found.append({"role": message["role"], "content": content})
        else:
            found.append(message)
    return found


def _call_text(function: dict[str, Any]) -> str:
    name, arguments = json.dumps(function["name"]), function["arguments"] or "{}"
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _with_preface(messages: list[Message], text: str, known: ChatFormat) -> list[Message]:
    first = messages[0]
    if first["role"] == "system" or not known.knows_system:
        return [
            {
                **first,
                "content": f"{first['content']}\n\n{text}"
                if first["role"] == "system"
                else f"{text}\n\n{first['content']}",
            },
            *messages[1:],
        ]
    return [{"role": "system", "content": text}, *messages]
