"""Anthropic's own package."""

import time
from typing import Literal

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


def tool_runner() -> None:
    asked: list[str] = []

    @anthropic.beta_tool
    def look_up(city: Literal["Bern", "Rome"]) -> str:
        """Returns a city's weather.

        Args:
            city: the city's name.
        """
        asked.append(city)
        return "Sunny."

    # The whole conversation counts: from the last turn alone the prompt would get shorter.
    choice = {"type": "any", "disable_parallel_tool_use": True}
    tokens = [
        message.usage.input_tokens
        for message in client.beta.messages.tool_runner(
            model=report.model,
            max_tokens=200,
            max_iterations=3,
            messages=[{"role": "user", "content": "What is the weather in " + "the city of Bern " * 20 + "?"}],
            tools=[look_up],
            tool_choice=choice,
            extra_body={"temperature": 0},
        )
    ]
    assert len(tokens) >= 2 and asked, (tokens, asked)
    assert tokens == sorted(tokens) and tokens[-1] > tokens[0], tokens


def thread() -> None:
    thread = {"type": "continue", "previous_message_id": "msg_1"}
    for fields in ({"thread": thread}, {"compaction": {"type": "summarize"}}):
        try:
            client.beta.messages.create(model=report.model, max_tokens=8, messages=QUESTION, **fields)
        except anthropic.BadRequestError as error:
            assert error.body["error"]["details"]["error_code"] == "thread_unsupported_request"
        else:
            raise AssertionError(f"{fields} was ignored")


def context_management() -> None:
    talk = [*QUESTION]
    for number in range(6):
        use = {"type": "tool_use", "id": f"toolu_{number}", "name": "get_weather", "input": {"city": "Bern"}}
        result = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": "It is sunny and warm. " * 10}
        talk += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    edits = [
        {"type": "clear_thinking_20251015", "keep": "all"},
        {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 4}},
        {"type": "compact_20260112"},
    ]
    fields = {"model": report.model, "messages": talk, "tools": [TOOL], "context_management": {"edits": edits}}
    betas = ["context-management-2025-06-27"]
    answer = client.beta.messages.create(max_tokens=8, betas=betas, **fields)
    (applied,) = answer.context_management.applied_edits
    assert (applied.type, applied.cleared_tool_uses) == ("clear_tool_uses_20250919", 3)
    counted = client.beta.messages.count_tokens(betas=betas, **fields)
    assert counted.input_tokens == answer.usage.input_tokens
    assert counted.context_management.original_input_tokens == counted.input_tokens + applied.cleared_input_tokens
    with client.beta.messages.stream(max_tokens=8, betas=betas, **fields) as stream:
        assert stream.get_final_message().context_management.applied_edits == [applied]


def cache() -> None:
    # No earlier run has cached it.
    text = f"{time.time_ns()}: " + "The capital of France is Paris, and that of Italy is Rome. " * 20
    system = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]
    counted = client.messages.count_tokens(model=report.model, messages=QUESTION, system=system).input_tokens
    usages = [ask(system=system).usage for _ in range(2)]
    for usage in usages:
        assert counted == (usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens), (
            usage
        )
    first, second = usages
    assert first.cache_creation_input_tokens > 0 and second.cache_read_input_tokens > 200, usages
    assert second.cache_read_input_tokens >= first.cache_creation_input_tokens > second.cache_creation_input_tokens
    assert second.output_tokens_details.thinking_tokens == 0


report.check("two turns", turns)
report.check("streamed", streamed)
report.check("tools", tool)
report.check("tools, streamed", tool_streamed)
report.check("count_tokens", count)
report.check("options", options)
report.check("a tool runner keeps its conversation", tool_runner)
report.check("threads and compaction are refused by their code", thread)
report.check("context_management", context_management)
report.check("cache usage", cache)
report.end()
