"""Anthropic's Messages API over routers with scripted workers."""

import asyncio
from typing import Any

import pytest

from tandem.messages import Admit
from tandem.router.frontends.openai import streaming
from tests.fakes import chat_templates
from tests.fakes.http_cluster import KEYS, HttpCluster
from tests.fakes.http_doors import HERMES, TOOLS, DoorAnswer, call, cluster_of
from tests.fakes.router_harness import run

PATH = "/v1/messages"
USER = {"role": "user", "content": "hi"}
CLIENT_TOOLS = [
    {"name": tool["name"], "input_schema": tool.get("parameters", {"type": "object", "properties": {}})}
    for tool in TOOLS
]
THINKING = ("<|im_start|>", "<|im_end|>")


async def ask(cluster: HttpCluster, **fields: Any) -> DoorAnswer:
    how = {name: fields.pop(name) for name in ("router", "headers", "num_tokens", "on_start") if name in fields}
    return await call(cluster, PATH, {"messages": [USER], "max_tokens": 300, **fields}, **how)


async def message_of(cluster: HttpCluster, **fields: Any) -> dict[str, Any]:
    answer = await ask(cluster, **fields)
    assert answer.status == 200, answer.body
    return answer.json()


def prompt_of(cluster: HttpCluster) -> str:
    """Returns the text of the last prompt."""
    tokenizer = chat_templates.tokenizer(chat_templates.QWEN25)
    return b"".join(map(tokenizer.token_piece, cluster.d.of(Admit)[-1].prompt_ids)).decode()


def names(answer: DoorAnswer) -> list[str]:
    """Returns the names of a stream's events without repetitions; deltas by kind."""
    found: list[str] = []
    for name, content in answer.events:
        assert content["type"] == name
        kind = content["delta"]["type"] if name == "content_block_delta" else name
        if not found or found[-1] != kind:
            found.append(kind)
    return found


@run
async def test_a_whole_answer() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.")
    answer = await ask(cluster, system="Be brief.", headers={"x-request-id": "mine", "anthropic-version": "2023-06-01"})
    message = answer.json()
    assert message["content"] == [{"type": "text", "text": "Hello."}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert (message["type"], message["role"], message["id"]) == ("message", "assistant", "msg_mine")
    assert answer.headers["request-id"] == "mine"
    assert message["usage"]["output_tokens"] == 7
    assert "Be brief." in prompt_of(cluster)
    counted = await call(cluster, f"{PATH}/count_tokens", {"messages": [USER], "system": "Be brief."})
    assert counted.json() == {"input_tokens": message["usage"]["input_tokens"]}


@run
async def test_a_streamed_answer_is_the_whole_answer() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hi!")
    answer = await ask(cluster, stream=True)
    assert names(answer) == [
        "message_start",
        "content_block_start",
        "text_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    events = [content for _, content in answer.events]
    started = events[0]["message"]
    assert (started["content"], started["stop_reason"], started["role"]) == ([], None, "assistant")
    assert started["usage"]["input_tokens"] > 0
    assert [e["index"] for e in events if "index" in e] == [0] * 5
    assert "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta") == "Hi!"
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 4


@run
async def test_calls_and_their_results() -> None:
    cluster = cluster_of(chat_templates.QWEN25, HERMES)
    message = await message_of(cluster, tools=CLIENT_TOOLS)
    assert message["stop_reason"] == "tool_use"
    said, weather, now = message["content"]
    assert said == {"type": "text", "text": "Let me see."}
    assert (weather["type"], weather["name"], weather["input"]) == ("tool_use", "get_weather", {"city": "Zürich"})
    assert (now["name"], now["input"]) == ("now", {})
    answer = await ask(cluster, tools=CLIENT_TOOLS, stream=True)
    block = ["content_block_start", "input_json_delta", "content_block_stop"]
    text = ["content_block_start", "text_delta", "content_block_stop"]
    assert names(answer) == ["message_start", *text, *block, *block, "message_delta", "message_stop"]
    pieces = [c["delta"]["partial_json"] for _, c in answer.events if "partial_json" in c.get("delta", {})]
    assert "".join(pieces) == '{"city": "Zürich"}{}'
    results = [
        {"type": "tool_result", "tool_use_id": weather["id"], "content": [{"type": "text", "text": "Sunny."}]},
        {"type": "tool_result", "tool_use_id": now["id"], "content": "Noon.", "is_error": False},
        {"type": "text", "text": "Well?"},
    ]
    talk = [USER, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": results}]
    await message_of(cluster, messages=talk, tools=CLIENT_TOOLS)
    prompt = prompt_of(cluster)
    assert prompt.index("Let me see.") < prompt.index("Sunny.") < prompt.index("Noon.") < prompt.index("Well?")


@run
async def test_a_call_that_is_asked_for() -> None:
    cluster = cluster_of(chat_templates.QWEN25, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "now"}):
        message = await message_of(cluster, tools=CLIENT_TOOLS, tool_choice=choice)
        assert [block["type"] for block in message["content"]] == ["tool_use"]
        assert message["stop_reason"] == "tool_use"
        assert cluster.d.of(Admit)[-1].sampling.grammar
    # With tool_choice none, a call's markup is text.
    message = await message_of(cluster, tools=CLIENT_TOOLS, tool_choice={"type": "none"})
    assert (message["content"][0]["type"], message["stop_reason"]) == ("text", "end_turn")


@run
async def test_thinking_comes_first() -> None:
    cluster = cluster_of(chat_templates.QWEN3, "<think>\nHm.\n</think>\n\nHello.", THINKING)
    message = await message_of(cluster, thinking={"type": "enabled", "budget_tokens": 2000})
    thought, said = message["content"]
    assert thought == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert said == {"type": "text", "text": "Hello."}
    answer = await ask(cluster, stream=True)
    assert names(answer)[1:4] == ["content_block_start", "thinking_delta", "content_block_stop"]
    redacted = {"type": "redacted_thinking", "data": "x"}
    talk = [USER, {"role": "assistant", "content": [thought, redacted, said]}, USER]
    assert (await ask(cluster, messages=talk)).status == 200


@run
async def test_thinking_can_be_turned_off() -> None:
    cluster = cluster_of(chat_templates.QWEN3, "Hello.", THINKING)
    tokens = {}
    for kind in ("enabled", "adaptive", "disabled"):
        tokens[kind] = (await message_of(cluster, thinking={"type": kind}))["usage"]["input_tokens"]
    # The template writes an empty thought.
    assert tokens["disabled"] > tokens["enabled"] == tokens["adaptive"]


@run
async def test_why_it_has_ended() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "one two three")
    stopped = await message_of(cluster, stop_sequences=["x", " three"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " three")
    assert stopped["content"][0]["text"] == "one two"
    cut = await message_of(cluster, max_tokens=3)
    assert (cut["stop_reason"], cut["content"][0]["text"]) == ("max_tokens", "one")


@run
async def test_a_call_that_is_cut_off_has_no_input() -> None:
    cluster = cluster_of(chat_templates.QWEN25, HERMES)
    begun = len("Let me see.\n") + 1 + len('\n{"name": "get_weather", "arguments": {"city')
    message = await message_of(cluster, tools=CLIENT_TOOLS, max_tokens=begun)
    assert (message["stop_reason"], message["content"][-1]["input"]) == ("max_tokens", {})


@run
async def test_an_answer_can_be_begun_by_the_client() -> None:
    cluster = cluster_of(chat_templates.QWEN25, " Paris.")
    begun = {"role": "assistant", "content": "It is"}
    message = await message_of(cluster, messages=[USER, begun])
    assert message["content"][0]["text"] == " Paris."
    assert prompt_of(cluster).endswith("It is")


@run
async def test_cached_tokens_are_told_to_who_asks_for_a_cache() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.")
    cluster.cached_len = 8
    plain = (await message_of(cluster))["usage"]
    assert plain["cache_read_input_tokens"] == 0
    mark = {"cache_control": {"type": "ephemeral"}}
    text = {"type": "text", "text": "hi", **mark}
    result = {"type": "tool_result", "tool_use_id": "x", "content": [text]}
    call_ = {"type": "tool_use", "id": "x", "name": "now", "input": {}}
    for fields in (
        mark,
        {"messages": [{"role": "user", "content": [text]}]},
        {"messages": [USER, {"role": "assistant", "content": [call_]}, {"role": "user", "content": [result]}]},
        {"system": [text]},
        {"tools": [{**CLIENT_TOOLS[0], **mark}]},
    ):
        usage = (await message_of(cluster, **fields))["usage"]
        counted = await call(cluster, f"{PATH}/count_tokens", {"messages": [USER], **fields})
        num_tokens = counted.json()["input_tokens"]
        assert usage["cache_read_input_tokens"] == 8
        # The prefill worker's pages hold 4 tokens and enter its cache whole.
        assert usage["input_tokens"] == num_tokens % 4
        assert usage["cache_creation_input_tokens"] == num_tokens - num_tokens % 4 - 8


def test_a_silent_stream_has_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEEPALIVE_S", 0.05)

    @run
    async def scenario() -> None:
        cluster = cluster_of(chat_templates.QWEN25, "Hello.")

        async def pause() -> None:
            await cluster.serve(2)
            await asyncio.sleep(0.3)
            await cluster.serve(len(cluster.output))

        answer = await ask(cluster, stream=True, on_start=pause)
        assert ("ping", {"type": "ping"}) in answer.events
        assert answer.events[-1][0] == "message_stop"

    scenario()


@run
async def test_a_failure_on_the_way_is_the_last_event() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.", request_timeout_s=5.0)

    async def stop_midway() -> None:
        await cluster.serve(3)
        cluster.routers[0].clock.advance(6.0)
        cluster.routers[0].router.check_deadlines()

    answer = await ask(cluster, stream=True, on_start=stop_midway)
    name, content = answer.events[-1]
    assert (name, content["type"], content["error"]["type"]) == ("error", "error", "timeout_error")


@pytest.mark.parametrize(
    ("fields", "status", "kind", "message"),
    [
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens: Input should be greater than or equal to 1"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens: Input should be a valid integer"),
        ({"max_tokens": 9000}, 400, "invalid_request_error", "max_tokens must be between 1 and"),
        ({"model": "another"}, 404, "not_found_error", "model 'another' is not served here"),
        ({"messages": []}, 400, "invalid_request_error", "messages: List should have at least 1 item"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "invalid_request_error", "messages.0.content: Input"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "invalid_request_error",
            "messages.0.content.0: images are not supported by this server",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "x", "name": "n", "input": {}}]}]},
            400,
            "invalid_request_error",
            "messages: a message of role user has no blocks of type tool_use",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": ""}]},
            400,
            "invalid_request_error",
            "messages: the last message is an assistant's without text to continue",
        ),
        (
            {"messages": [{"role": "user", "content": "x " * 9000}]},
            400,
            "invalid_request_error",
            "messages: the prompt is too long: ",
        ),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences strings must have 1 to 1024"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "w"}]},
            400,
            "invalid_request_error",
            "tools.0: web_search",
        ),
        ({"tools": CLIENT_TOOLS * 2}, 400, "invalid_request_error", "tools: the function 'get_weather' is there twice"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice asks for a call"),
        ({"tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "tool_choice.name: a choice of type tool"),
        ({"container": "c"}, 400, "invalid_request_error", "container: containers are not supported"),
        ({"output_format": {"type": "json_schema", "schema": {"type": "strin"}}}, 400, "invalid_request_error", ""),
        ({"headers": {"authorization": "Bearer wrong"}}, 401, "authentication_error", "the API key is wrong"),
        ({"headers": {"authorization": "", "x-api-key": "x"}}, 401, "authentication_error", "the API key is wrong"),
        ({"headers": {"authorization": ""}}, 401, "authentication_error", "an API key is needed"),
        ({"headers": {"content-length": "99999999"}}, 413, "request_too_large", "the body has more than"),
        ({"headers": {"last-event-id": "x"}}, 400, "invalid_request_error", "Last-Event-ID: only a stream"),
    ],
)
def test_errors_have_their_form(fields: dict[str, Any], status: int, kind: str, message: str) -> None:
    @run
    async def scenario() -> None:
        cluster = cluster_of(chat_templates.QWEN25, "Hello.")
        answer = await ask(cluster, **fields)
        content = answer.json()
        assert content.keys() == {"type", "error", "request_id"}
        assert (answer.status, content["type"], content["error"]["type"]) == (status, "error", kind)
        assert content["error"]["message"].startswith(message)
        assert answer.headers["request-id"] == content["request_id"] == answer.headers["x-request-id"]
        assert answer.headers["content-length"] == str(len(answer.body))
        assert not cluster.d.of(Admit)

    scenario()


@run
async def test_a_thread_is_refused_so_that_the_client_sends_everything() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.")
    for name, value in (
        ("thread", {"type": "continue", "previous_message_id": "msg_1"}),
        ("thread", {"type": "create"}),
        ("compaction", {"type": "summarize"}),
    ):
        answer = await ask(cluster, **{name: value})
        assert answer.status == 400
        assert answer.json()["error"]["details"] == {
            "error_code": "thread_unsupported_request",
            "unsupported": [name],
        }
    assert not cluster.d.of(Admit)
    assert (await ask(cluster, thread=None)).status == 200


@run
async def test_examples_of_a_tool_are_in_the_prompt() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.")
    await message_of(cluster, tools=[{**CLIENT_TOOLS[0], "input_examples": [{"city": "Nirgendwo"}]}])
    assert "Nirgendwo" in prompt_of(cluster)


@run
async def test_only_their_paths_have_their_form() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.")
    for path, is_theirs in ((f"{PATH}/batches", True), ("/v1/messages2", False), ("/v1/nothing", False)):
        answer = await call(cluster, path, {})
        assert answer.status == 404
        assert ("type" in answer.json()) == is_theirs
    wrong_method = await call(cluster, PATH, method="GET")
    assert (wrong_method.status, wrong_method.json()["error"]["type"]) == (405, "invalid_request_error")


@run
async def test_too_many_requests_are_told_so_in_their_form() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.", max_requests_per_key=1)

    async def ask_meanwhile() -> None:
        refused = await ask(cluster)
        assert (refused.status, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert refused.headers["retry-after"] == "1"
        await cluster.serve(len(cluster.output))

    assert (await ask(cluster, on_start=ask_meanwhile)).status == 200


@run
async def test_the_key_may_stand_in_their_header() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.")
    headers = {"authorization": "", "x-api-key": KEYS[1]}
    assert (await ask(cluster, headers=headers)).status == 200
    # Other paths do not take this header.
    assert (await call(cluster, "/v1/models", method="GET", headers=headers)).status == 401


@run
async def test_hints_and_unknown_fields_are_taken() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.")
    hints = {
        "metadata": {"user_id": "1"},
        "service_tier": "auto",
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "stop_sequences": [],
        "tools": [],
        "output_config": {"effort": "low"},
        "nobody_knows": 1,
    }
    await message_of(cluster, **hints)
    assert cluster.d.of(Admit)[-1].sampling.top_k == 40
    assert b"tandem_unknown_fields_total 1.0" in (await call(cluster, "/metrics", method="GET")).body
