from dataclasses import replace
from typing import Any

import pytest

from tandem.router.text.chat import Chat
from tandem.router.text.chat_format import ChatFormat, fitted, short_id
from tests.fakes import chat_templates
from tests.fakes.chat_templates import tokenizer

KNOWN = ChatFormat("hermes", knows_tools=True, knows_calls=True)
FORMATS = {
    chat_templates.QWEN25: KNOWN,
    chat_templates.QWEN3: replace(KNOWN, reasoning_parser="qwen3"),
    chat_templates.LLAMA31: replace(KNOWN, tool_parser="llama3_json"),
    chat_templates.MISTRAL: replace(KNOWN, tool_parser="mistral", knows_system=False, wants_short_ids=True),
    chat_templates.DEEPSEEK_R1: replace(KNOWN, reasoning_parser="qwen3", knows_tools=False, arguments_are_text=True),
    chat_templates.SMOLLM2: ChatFormat(),
    "{{ tools | tojson }}{{ messages | tojson }}": replace(KNOWN, tool_parser="json"),
    "{{ tools | tojson }}{{ messages | tojson }}<tool_call><function=f>": replace(KNOWN, tool_parser="none"),
    """{{ tools | tojson }}<tool_call><function=x>{% for m in messages %}{{ m.content }}
    {%- for call in m.tool_calls %}{% for k, v in call.function.arguments.items() %}<parameter={{ k }}>{{ v }}
    {%- endfor %}{% endfor %}{% endfor %}""": replace(KNOWN, tool_parser="none"),
    # Python syntax is unintended.
    "{{ tools | tojson }}{{ messages }}": replace(KNOWN, tool_parser="json", arguments_are_text=True),
    "{# developer #}{% for m in messages %}{{ m.content }}{% endfor %}": ChatFormat(knows_developer=True),
}
WITH_JSON = [template for template in FORMATS if not template.startswith("{#") and "items()" not in template]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "call_123", "type": "function", "function": {"name": "f", "arguments": '{"city": "Zürich"}'}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny", "tool_call_id": "call_123"},
]


@pytest.mark.parametrize("template", FORMATS, ids=lambda template: template[:20])
def test_template_features(template: str) -> None:
    assert tokenizer(template).chat_format == FORMATS[template]


@pytest.mark.parametrize(
    "template", [t for t in FORMATS if not t.startswith("{#") and "items()" not in t], ids=lambda t: t[:20]
)
def test_calls_and_results_are_in_every_prompt(template: str) -> None:
    text = tokenizer(template).render_chat(Chat(TALK, [TOOL]))
    assert '{"city": "Zürich"}' in text and "sunny" in text and '"description": "d"' in text
    wrong = [TALK[0], {**TALK[1], "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{wrong"}}]}, TALK[2]]
    assert "{wrong" in tokenizer(template).render_chat(Chat(wrong, [TOOL]))


def test_tools_as_text() -> None:
    text = tokenizer(chat_templates.SMOLLM2).render_chat(
        Chat([{"role": "system", "content": "Be brief."}, *TALK], [TOOL])
    )
    system, user, assistant, result, _ = text.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe brief.\n\nYou can call these functions:") and '{"name": "f"' in system
    # Models copy placeholders that look like values.
    assert '{"name": <function-name>, "arguments": <args-json-object>}' in system
    assert user == "user\nhi<|im_end|>\n"
    assert assistant == (
        'assistant\n<tool_call>\n{"name": "f", "arguments": {"city": "Zürich"}}\n</tool_call><|im_end|>\n'
    )
    assert result == "user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"


def test_results_merge_into_one_user_turn() -> None:
    messages = fitted(Chat([*TALK, TALK[2]]), ChatFormat()).messages
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[2]["content"].count("sunny") == 2
    assert TALK[2]["content"] == "sunny"


def test_tools_in_first_message_without_system_role() -> None:
    known = ChatFormat(knows_system=False)
    (message,) = fitted(Chat(TALK[:1], [TOOL]), known).messages
    assert message["role"] == "user" and message["content"].endswith("\n\nhi") and '"f"' in message["content"]


def test_developer_becomes_system() -> None:
    chat = Chat([{"role": "developer", "content": "x"}])
    assert fitted(chat, ChatFormat()).messages == [{"role": "system", "content": "x"}]
    assert fitted(chat, ChatFormat(knows_developer=True)).messages == chat.messages
    assert tokenizer(chat_templates.SMOLLM2).render_chat(chat).startswith("<|im_start|>system")


def test_short_ids() -> None:
    assert short_id("abcDEF123") == "abcDEF123"
    made = short_id("call_0123")
    assert len(made) == 9 and made.isalnum() and made == short_id("call_0123") != short_id("call_0124")
