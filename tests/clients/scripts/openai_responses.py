"""OpenAI's own package: kept responses, conversations and tools of the Responses API."""

import time

import openai
from report import Report

report = Report()
client = openai.OpenAI(base_url=f"{report.url}/v1", api_key="none", max_retries=0)
TIMEOUT_S = 120.0
TOOL = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


def ask(**fields: object):
    return client.responses.create(**{"model": report.model, "input": "Say hello.", "max_output_tokens": 16, **fields})


def background() -> None:
    response = ask(background=True)
    assert response.status in ("queued", "in_progress")
    deadline = time.monotonic() + TIMEOUT_S
    while response.status in ("queued", "in_progress") and time.monotonic() < deadline:
        time.sleep(0.2)
        response = client.responses.retrieve(response.id)
    assert response.status in ("completed", "incomplete") and response.output_text, response.status
    assert ask(previous_response_id=response.id).usage.input_tokens > response.usage.input_tokens


def cancelled() -> None:
    response = ask(background=True, max_output_tokens=4000, extra_body={"ignore_eos": True})
    cancelled = client.responses.cancel(response.id)
    assert cancelled.status == "cancelled"
    assert client.responses.retrieve(response.id).status == "cancelled"
    client.responses.delete(response.id)


def conversation() -> None:
    talk = client.conversations.create(metadata={"topic": "greetings"})
    first = ask(conversation=talk.id)
    second = ask(conversation=talk.id, input="Again.")
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.conversation.id == talk.id
    client.conversations.items.create(talk.id, items=[{"role": "user", "content": "A note."}])
    items = list(client.conversations.items.list(talk.id, order="asc", limit=2))
    assert [item.type for item in items] == ["message"] * 5
    assert items[1].content[0].text == first.output_text
    assert client.conversations.items.retrieve(items[0].id, conversation_id=talk.id).role == "user"
    assert client.conversations.update(talk.id, metadata={"topic": "x"}).metadata == {"topic": "x"}
    assert client.conversations.retrieve(talk.id).metadata == {"topic": "x"}
    assert client.conversations.delete(talk.id).deleted
    try:
        ask(conversation=talk.id)
    except openai.NotFoundError as error:
        assert error.code == "conversation_not_found"
    else:
        raise AssertionError("a deleted conversation went on")


def truncation() -> None:
    talk = [
        {"role": "user", "content": f"{number}: " + "The old lighthouse stood there. " * 300} for number in range(12)
    ]
    try:
        ask(input=talk)
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded"
    else:
        raise AssertionError("the talk fits the model: make it longer")
    response = ask(input=talk, truncation="auto")
    assert response.truncation == "auto" and response.output_text


def logprobs() -> None:
    wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 3, "temperature": 0}
    response = ask(**wanted)
    entries = response.output[0].content[0].logprobs
    assert "".join(entry.token for entry in entries) == response.output_text
    assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in entries)
    streamed = [
        entry.token
        for event in ask(stream=True, **wanted)
        if event.type == "response.output_text.delta"
        for entry in event.logprobs
    ]
    assert streamed == [entry.token for entry in entries]


def namespace() -> None:
    space = {"type": "namespace", "name": "meteo", "description": "The weather service.", "tools": [TOOL]}
    forced = {"tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 200}
    response = ask(tools=[space], input="How is the weather in Bern?", **forced)
    call = response.output[0]
    assert (call.type, call.name, call.namespace) == ("function_call", "get_weather", "meteo")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    assert ask(tools=[space], input=[result], previous_response_id=response.id).status


def format_with_call() -> None:
    wanted = {"format": {"type": "json_schema", "name": "city", "schema": TOOL["parameters"], "strict": True}}
    forced = {"tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 200}
    assert ask(tools=[TOOL], text=wanted, **forced).output[0].type == "function_call"


for what, attempt in {
    "background, polled": background,
    "background, cancelled": cancelled,
    "a conversation": conversation,
    "truncation": truncation,
    "log probabilities": logprobs,
    "tools in a namespace": namespace,
    "a format with a forced call": format_with_call,
}.items():
    report.check(what, attempt)
report.end()
