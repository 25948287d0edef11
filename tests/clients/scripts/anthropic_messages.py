"""Anthropic's own package."""

import anthropic
from report import Report

report = Report()
client = anthropic.Anthropic(base_url=report.url, api_key="none", max_retries=0)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def ask(**fields: object):
    return client.messages.create(**{"model": report.model, "max_tokens": 16, "messages": QUESTION, **fields})


def turns() -> None:
    first = ask(system="Be brief.")
    assert first.content[0].text
    assert first.stop_reason in ("end_turn", "max_tokens")
    messages = [
        *QUESTION,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": "And of Italy?"},
    ]
    assert ask(messages=messages).usage.input_tokens > first.usage.input_tokens


def streamed() -> None:
    with client.messages.stream(model=report.model, max_tokens=16, messages=QUESTION) as stream:
        text = "".join(stream.text_stream)
        assert text == stream.get_final_message().content[0].text


def tool() -> None:
    fields = {"tools": [TOOL], "max_tokens": 200}
    # A small model may repeat parallel calls without end.
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"}):
        answer = ask(tool_choice=choice, **fields)
        call = answer.content[-1]
        assert (answer.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "get_weather")
        assert set(call.input) == {"city"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}
    messages = [*QUESTION, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert ask(messages=messages, **fields).stop_reason


def tool_streamed() -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    asked = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 200}
    with client.messages.stream(model=report.model, messages=QUESTION, **asked) as stream:
        assert set(stream.get_final_message().content[-1].input) == {"city"}


def count() -> None:
    counted = client.messages.count_tokens(model=report.model, messages=QUESTION, system="Be brief.").input_tokens
    assert counted == ask(system="Be brief.").usage.input_tokens


def options() -> None:
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    # This version's signature lacks these; other clients send them.
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 40}
    asked = {"stop_sequences": ["\n\n"], "metadata": {"user_id": "1"}, "extra_body": sampling}
    assert ask(system=system, **asked).content


report.check("two turns", turns)
report.check("streamed", streamed)
report.check("tools", tool)
report.check("tools, streamed", tool_streamed)
report.check("count_tokens", count)
report.check("options", options)
report.end()
