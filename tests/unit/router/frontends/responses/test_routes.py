"""OpenAI's Responses API over routers with scripted workers."""

from typing import Any

import pytest

from tandem.messages import Admit
from tests.fakes import chat_templates
from tests.fakes.http_cluster import KEYS, HttpCluster
from tests.fakes.http_doors import HERMES, TOOLS, DoorAnswer, call, cluster_of
from tests.fakes.router_harness import run

PATH = "/v1/responses"
FUNCTIONS = [{"type": "function", **tool} for tool in TOOLS]


async def ask(cluster: HttpCluster, **fields: Any) -> DoorAnswer:
    how = {name: fields.pop(name) for name in ("router", "headers", "num_tokens") if name in fields}
    return await call(cluster, PATH, {"input": "hi", **fields}, **how)


async def response_of(cluster: HttpCluster, **fields: Any) -> dict[str, Any]:
    answer = await ask(cluster, **fields)
    assert answer.status == 200, answer.body
    return answer.json()


def prompt_of(cluster: HttpCluster) -> str:
    """Returns the text of the last prompt."""
    tokenizer = chat_templates.tokenizer(chat_templates.QWEN25)
    return b"".join(map(tokenizer.token_piece, cluster.d.of(Admit)[-1].prompt_ids)).decode()


def names(answer: DoorAnswer) -> list[str]:
    """Returns the names of a stream's events; repeated deltas once."""
    found: list[str] = []
    for number, (name, content) in enumerate(answer.events):
        assert (content["type"], content["sequence_number"]) == (name, number)
        short = name.removeprefix("response.")
        if not found or found[-1] != short or not name.endswith(".delta"):
            found.append(short)
    return found


TEXT = [
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
]
CALL = [
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
]


@run
async def test_a_whole_answer() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.")
    response = await response_of(cluster, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, user="me")
    assert (response["object"], response["status"], response["model"]) == ("response", "completed", "fake")
    (item,) = response["output"]
    assert item["content"] == [{"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []}]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert response["usage"]["output_tokens"] == 7
    assert response["usage"]["total_tokens"] == 7 + response["usage"]["input_tokens"]
    assert (response["instructions"], response["metadata"]) == ("Be brief.", {"a": "b"})
    assert (response["temperature"], response["incomplete_details"]) == (0.5, None)
    assert "Be brief." in prompt_of(cluster)


@run
async def test_a_streamed_answer_is_the_whole_answer() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hi!")
    answer = await ask(cluster, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert names(answer) == ["created", "in_progress", *TEXT, "completed"]
    events = [content for _, content in answer.events]
    assert "".join(event["delta"] for event in events if event["type"].endswith(".delta")) == "Hi!"
    created, last = events[0]["response"], events[-1]["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert events[-2]["item"] == last["output"][0]
    assert {event["item_id"] for event in events if "item_id" in event} == {last["output"][0]["id"]}
    kept = await call(cluster, f"{PATH}/{last['id']}", method="GET")
    assert kept.json() == last


@run
async def test_calls_and_their_results() -> None:
    cluster = cluster_of(chat_templates.QWEN25, HERMES)
    answer = await ask(cluster, tools=FUNCTIONS, stream=True)
    assert names(answer) == ["created", "in_progress", *TEXT, *CALL, *CALL, "completed"]
    response = answer.events[-1][1]["response"]
    said, weather, now = response["output"]
    assert said["content"][0]["text"] == "Let me see."
    assert [(c["name"], c["arguments"]) for c in (weather, now)] == [
        ("get_weather", '{"city": "Zürich"}'),
        ("now", "{}"),
    ]
    assert weather["call_id"] != now["call_id"]
    result = {"type": "function_call_output", "call_id": weather["call_id"], "output": "Sunny."}
    await response_of(cluster, input=[{"role": "user", "content": "hi"}, said, weather, now, result], tools=FUNCTIONS)
    by_hand = prompt_of(cluster)
    assert "Sunny." in by_hand and by_hand.count("Let me see.") == 1
    # The kept conversation leads to the same prompt.
    await response_of(cluster, input=[result], previous_response_id=response["id"], tools=FUNCTIONS)
    assert prompt_of(cluster) == by_hand


@run
async def test_a_call_that_is_asked_for() -> None:
    cluster = cluster_of(chat_templates.QWEN25, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    for choice in ("required", {"type": "function", "name": "now"}):
        response = await response_of(cluster, tools=FUNCTIONS, tool_choice=choice, parallel_tool_calls=False)
        assert [item["type"] for item in response["output"]] == ["function_call"]
        assert cluster.d.of(Admit)[-1].sampling.grammar
        assert (response["tool_choice"], response["parallel_tool_calls"]) == (choice, False)


@run
async def test_a_forced_call_wins_over_a_format() -> None:
    cluster = cluster_of(chat_templates.QWEN25, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    text = {"format": {"type": "json_schema", "name": "thing", "schema": {"type": "object"}}}
    response = await response_of(cluster, tools=FUNCTIONS, tool_choice="required", text=text, parallel_tool_calls=False)
    assert [item["type"] for item in response["output"]] == ["function_call"]


@run
async def test_tools_in_a_namespace() -> None:
    output = '<tool_call>\n{"name": "clock__now", "arguments": {}}\n</tool_call>'
    cluster = cluster_of(chat_templates.QWEN25, output)
    space = {"type": "namespace", "name": "clock", "description": "About time.", "tools": [FUNCTIONS[1]]}
    answer = await ask(cluster, tools=[FUNCTIONS[0], space], stream=True)
    response = answer.events[-1][1]["response"]
    (call_,) = response["output"]
    assert (call_["name"], call_["namespace"]) == ("now", "clock")
    shown = {"description": None, "parameters": None, "strict": None, **FUNCTIONS[1]}
    assert response["tools"][1] == {**space, "tools": [shown]}
    prompt = prompt_of(cluster)
    assert "clock__now" in prompt and "About time." in prompt
    result = {"type": "function_call_output", "call_id": call_["call_id"], "output": "Noon."}
    talk = [{"role": "user", "content": "hi"}, call_, result]
    await response_of(cluster, input=talk, tools=[FUNCTIONS[0], space])
    assert prompt_of(cluster).count('"name": "clock__now"') == 2
    # A choice has the function's own name.
    forced = await response_of(cluster, tools=[space], tool_choice={"type": "function", "name": "now"})
    assert forced["output"][0]["namespace"] == "clock"
    for tools, message in (
        ([space, space], "tools: the function 'clock__now' is there twice"),
        ([{**space, "tools": [{"type": "custom", "name": "x"}]}], "tools.0.tools.0.type"),
    ):
        assert (await ask(cluster, tools=tools)).json()["error"]["message"].startswith(message)
    two = [space, {**space, "name": "watch"}]
    refused = await ask(cluster, tools=two, tool_choice={"type": "function", "name": "now"})
    assert refused.json()["error"]["message"] == "several namespaces have a function 'now': rename one"


@run
async def test_reasoning_comes_first() -> None:
    cluster = cluster_of(chat_templates.QWEN3, "<think>\nHm.\n</think>\n\nHello.", ("<|im_start|>", "<|im_end|>"))
    answer = await ask(cluster, stream=True, reasoning={"effort": "low"})
    reasoning = [name.replace("output_text", "reasoning_text") for name in TEXT]
    assert names(answer) == ["created", "in_progress", *reasoning, *TEXT, "completed"]
    response = answer.events[-1][1]["response"]
    thought, said = response["output"]
    assert (thought["type"], thought["summary"]) == ("reasoning", [])
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert said["content"][0]["text"] == "Hello."
    assert 0 < response["usage"]["output_tokens_details"]["reasoning_tokens"] < response["usage"]["output_tokens"]
    assert response["reasoning"]["effort"] == "low"
    await response_of(
        cluster, input=[{"role": "user", "content": "hi"}, thought, said, {"role": "user", "content": "?"}]
    )


@run
async def test_log_probabilities_are_those_of_the_text() -> None:
    cluster = cluster_of(chat_templates.QWEN25, HERMES)
    tokenizer = chat_templates.tokenizer(chat_templates.QWEN25)
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "tools": FUNCTIONS}
    for stream in (False, True):
        answer = await ask(cluster, stream=stream, **asked)
        response = answer.events[-1][1]["response"] if stream else answer.json()
        assert response["top_logprobs"] == 2
        entries = response["output"][0]["content"][0]["logprobs"]
        # The marks of the calls belong to no text.
        assert "".join(entry["token"] for entry in entries) == "Let me see."
        assert [entry["logprob"] for entry in entries] == [-float(index) for index in range(len(entries))]
        for index, entry in enumerate(entries):
            assert entry["bytes"] == list(tokenizer.token_piece(cluster.output[index]))
            assert len(entry["top_logprobs"]) == 2
        if stream:
            deltas = [c["logprobs"] for name, c in answer.events if name == "response.output_text.delta"]
            assert [entry for delta in deltas for entry in delta] == entries
    # Without them in `include` or alternatives there are none.
    response = await response_of(cluster, include=["reasoning.encrypted_content"])
    assert response["output"][0]["content"][0]["logprobs"] == []
    response = await response_of(cluster, include=["message.output_text.logprobs"])
    assert response["output"][0]["content"][0]["logprobs"][0]["top_logprobs"] == []


@run
async def test_a_limit_leaves_it_incomplete() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.")
    answer = await ask(cluster, max_output_tokens=3, stream=True)
    assert names(answer) == ["created", "in_progress", *TEXT, "incomplete"]
    response = answer.events[-1][1]["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (response["output"][0]["status"], response["output"][0]["content"][0]["text"]) == ("incomplete", "Hel")


@run
async def test_an_answer_of_nothing_is_a_message() -> None:
    response = await response_of(cluster_of(chat_templates.QWEN25, ""))
    assert response["output"][0]["content"][0]["text"] == ""


@run
async def test_a_failure_on_the_way_is_the_last_event() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.", request_timeout_s=5.0)

    async def stop_midway() -> None:
        await cluster.serve(3)
        cluster.routers[0].clock.advance(6.0)
        cluster.routers[0].router.check_deadlines()

    answer = await call(cluster, PATH, {"input": "hi", "stream": True}, on_start=stop_midway)
    assert answer.status == 200
    name, content = answer.events[-1]
    assert (name, content["response"]["status"]) == ("response.failed", "failed")
    assert content["response"]["error"]["code"] == "timeout"
    assert content["response"]["output"][0]["content"][0]["text"] == "Hel"
    kept = await call(cluster, f"{PATH}/{content['response']['id']}", method="GET")
    assert kept.status == 404


@run
async def test_a_conversation_goes_on() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.")
    first = await response_of(cluster, instructions="Be brief.")
    second = await response_of(cluster, input="again", previous_response_id=first["id"])
    prompt = prompt_of(cluster)
    assert "hi" in prompt and "Hello." in prompt and "again" in prompt
    # Instructions apply to one request.
    assert "Be brief." not in prompt
    assert second["previous_response_id"] == first["id"]
    branch = await response_of(cluster, input="another", previous_response_id=first["id"])
    assert "again" not in prompt_of(cluster)
    third = await response_of(cluster, input="third", previous_response_id=second["id"])
    assert prompt_of(cluster).index("again") < prompt_of(cluster).index("third")
    assert len({first["id"], second["id"], third["id"], branch["id"]}) == 4


@run
async def test_to_another_key_a_response_is_unknown() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.")
    response_id = (await response_of(cluster))["id"]
    other = {"authorization": f"Bearer {KEYS[1]}"}
    for method, path, body in (
        ("POST", PATH, {"input": "hi", "previous_response_id": response_id}),
        ("GET", f"{PATH}/{response_id}", None),
        ("GET", f"{PATH}/{response_id}/input_items", None),
        ("DELETE", f"{PATH}/{response_id}", None),
    ):
        theirs = await call(cluster, path, body, method=method, headers=other)
        # This router never had it.
        unknown = await call(cluster, path, body, method=method, headers=other, router=1)
        assert (theirs.status, theirs.body) == (404, unknown.body)
    assert theirs.json()["error"]["code"] == "response_not_found"
    assert (await call(cluster, f"{PATH}/{response_id}", method="GET")).status == 200


@run
async def test_what_is_kept_can_be_looked_at_and_forgotten() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.")
    items = [
        {"role": "user", "content": "one"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "three"}]},
    ]
    response_id = (await response_of(cluster, input=items))["id"]
    listed = (await call(cluster, f"{PATH}/{response_id}/input_items", method="GET", query="order=asc")).json()
    assert [item["content"][0] for item in listed["data"]] == [
        {"type": "input_text", "text": "one"},
        {"type": "output_text", "text": "two"},
        {"type": "input_text", "text": "three"},
    ]
    page = f"limit=1&after={listed['data'][2]['id']}"
    listed = (await call(cluster, f"{PATH}/{response_id}/input_items", method="GET", query=page)).json()
    assert (listed["data"][0]["content"][0]["text"], listed["has_more"]) == ("two", True)
    assert b"tandem_kept_responses 1.0" in (await call(cluster, "/metrics", method="GET")).body
    forgotten = await call(cluster, f"{PATH}/{response_id}", method="DELETE")
    assert forgotten.json() == {"id": response_id, "object": "response", "deleted": True}
    assert (await call(cluster, f"{PATH}/{response_id}", method="GET")).status == 404
    assert b"tandem_kept_responses_bytes 0.0" in (await call(cluster, "/metrics", method="GET")).body


@run
async def test_what_is_not_to_be_stored_is_not_kept() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.")
    response = await response_of(cluster, store=False)
    assert response["store"] is False
    assert (await call(cluster, f"{PATH}/{response['id']}", method="GET")).status == 404


@run
async def test_a_conversation_counts_as_bytes_in_hand() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.", max_body_bytes=3000, max_bytes_in_hand=6000)
    response_id = (await response_of(cluster, input="x" * 2000))["id"]
    assert (await ask(cluster, input="hi")).status == 200
    refused = await ask(cluster, previous_response_id=response_id, input="x" * 1500)
    assert (refused.status, refused.json()["error"]["code"]) == (429, "overloaded")


@run
async def test_texts_keep_to_a_format() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "{}")
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    wanted = {"format": {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}}
    response = await response_of(cluster, text=wanted)
    assert cluster.d.of(Admit)[-1].sampling.grammar
    assert response["text"] == wanted
    refused = await ask(cluster, text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "strin"}}})
    assert (refused.status, refused.json()["error"]["param"]) == (400, "text.format")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"max_output_tokens": 9000}, "max_output_tokens", "max_output_tokens must be between 1 and"),
        ({"max_tokens": 5}, "max_tokens", "max_tokens: this field is called max_output_tokens here"),
        ({"input": []}, "input", "input: List should have at least 1 item"),
        ({"input": 5}, "input", "input: Input should be a string or a list of items"),
        ({"input": [5]}, "input", "input.0: Input should be an item"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "input.0: item_reference is not supported"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input", "input.0: items of type 'web_search_call' are"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
            "input",
            "input.0.content.0.type: images are not supported by this server",
        ),
        ({"input": [{"role": "user", "content": "x"}] * 3000}, "input", "input: List should have at most 2048 items"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools.0: web_search is not supported by this server"),
        ({"tools": FUNCTIONS + FUNCTIONS}, "tools", "tools: the function 'get_weather' is there twice"),
        ({"tools": [{"type": "function"}]}, "tools", "tools.0.name: Field required"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice asks for a call, and there are no tools"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "tool_choice: file_search is not supported"),
        ({"background": True, "store": False}, "background", "background: a response in the background is stored"),
        ({"background": True, "stream": True}, "background", "background: a response in the background is polled"),
        ({"conversation": "c"}, "conversation", "no conversation 'c' is kept"),
        ({"conversation": {"id": "conv_1"}}, "conversation", "no conversation 'conv_1' is kept"),
        ({"conversation": 5}, "conversation", "conversation: Input should be a conversation's id"),
        ({"conversation": "c", "previous_response_id": "r"}, "conversation", "conversation: a response continues a"),
        ({"truncation": "middle"}, "truncation", "truncation: Input should be 'auto' or 'disabled'"),
        ({"truncation": "auto", "input": "x" * 9000}, "input", "the prompt is too long: "),
        ({"top_logprobs": 21}, "top_logprobs", "top_logprobs: Input should be less than or equal to 20"),
        ({"logprobs": True}, "logprobs", "logprobs: this field is called top_logprobs here"),
        ({"model": "another"}, "model", "model 'another' is not served here"),
        ({"previous_response_id": "resp_x"}, "previous_response_id", "no response 'resp_x' is kept"),
        ({"temperature": 3}, "temperature", "temperature: Input should be less than or equal to 2"),
        ({"metadata": {"a": "x" * 600}}, "metadata", "metadata.a: String should have at most 512"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "chat_template_kwargs: messages cannot"),
        ({"input": "x" * 9000}, "input", "the prompt is too long: "),
    ],
)
def test_what_is_wrong_is_named_as_the_client_names_it(fields: dict[str, Any], param: str, message: str) -> None:
    @run
    async def scenario() -> None:
        cluster = cluster_of(chat_templates.QWEN25, "Hello.")
        answer = await ask(cluster, **fields)
        error = answer.json()["error"]
        assert error["message"].startswith(message)
        is_too_long = "maximum context length is 8000 tokens" in error["message"]
        assert is_too_long == (error["code"] == "context_length_exceeded")
        assert is_too_long == (9000 in fields.values() or "too long" in message)
        assert (answer.status, error["param"]) == (
            404 if "not served" in message or "is kept" in message else 400,
            param,
        )
        assert not cluster.d.of(Admit)

    scenario()


@run
async def test_hints_and_unknown_fields_are_taken() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.")
    hints = {
        "include": ["reasoning.encrypted_content"],
        "truncation": "disabled",
        "background": False,
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "stream_options": {"include_obfuscation": False},
        "text": {"verbosity": "low"},
        "reasoning": {"effort": None, "summary": "auto"},
        "instructions": None,
        "tools": [],
        "nobody_knows": 1,
    }
    await response_of(cluster, **hints)
    assert b"tandem_unknown_fields_total 1.0" in (await call(cluster, "/metrics", method="GET")).body


@run
async def test_streams_here_cannot_be_resumed() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.")
    answer = await ask(cluster, stream=True, headers={"last-event-id": "3q2-7wEBAgMEBQYHCAkKCw.1.6"})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "Last-Event-ID")
