"""Chats with tools and reasoning, over scripted workers that answer with a given text."""

import asyncio
import json
import threading
from typing import Any

import openai
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from tandem.grammar_limits import LIMITS
from tandem.messages import Admit, Finished, FirstToken, TokenEvent, Tokens
from tandem.router import recalls
from tandem.router.frontends.openai.server import HttpServer
from tandem.router.text import grammar_check
from tandem.sampling_params import TokenLogprobs
from tests.fakes import chat_templates
from tests.fakes.http_cluster import KEYS, HttpCluster, Stream
from tests.fakes.router_harness import run, settle

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
USER: Any = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"messages": [USER], "tools": TOOLS, "max_tokens": 300}
HERMES = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
CALLS = [("get_weather", '{"city": "Zürich"}'), ("now", "{}")]


def calling(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recalls, "RECALL_TIMEOUT_S", 0.4)
    monkeypatch.setattr(recalls, "WAIT_TIMEOUT_S", 0.6)
    # The real check runs in another process, which has its own tests.
    monkeypatch.setattr(
        grammar_check.GrammarCheck,
        "run",
        lambda self: grammar_check.translate(self.kind, self.content, self._closes_objects),
    )


def cluster_of(
    template: str, text: str, special: tuple[str, ...] = chat_templates.SPECIAL, **config: Any
) -> HttpCluster:
    """The model answers with this text and ends."""
    tokenizer = chat_templates.tokenizer(template, special)
    output = [*tokenizer.tokenize(text, False).ids, chat_templates.EOS]
    return HttpCluster(output, tokenizer=tokenizer, max_model_len=8000, **config)


async def ask(
    cluster: HttpCluster, body: dict[str, Any], last_event_id: str = "", number: int = 0, step: int = 1
) -> Stream:
    """Args: as for HttpCluster."""
    num_before = len(cluster.d.of(Admit))
    call = cluster.routers[number].post(body, last_event_id)
    # Grammars are checked in another process.
    while not call.task.done() and len(cluster.d.of(Admit)) == num_before:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    if not call.task.done():
        await cluster.serve(len(cluster.output), step)
    return await call.finish()


async def message_of(cluster: HttpCluster, body: dict[str, Any]) -> dict[str, Any]:
    stream = await ask(cluster, body)
    assert stream.status == 200, stream.body
    (choice,) = json.loads(stream.body)["choices"]
    return {**choice["message"], "finish_reason": choice["finish_reason"]}


def called(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


def put_together(events: list[Any]) -> dict[str, Any]:
    """Returns the message that a client makes of a stream."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None}
    for event in events:
        if not event.content["choices"]:
            continue
        delta = event.choice["delta"]
        message["finish_reason"] = event.choice["finish_reason"] or message["finish_reason"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for piece in delta.get("tool_calls", ()):
            if piece["index"] == len(message["tool_calls"]):
                assert piece["type"] == "function" and piece["function"]["arguments"] == ""
                message["tool_calls"].append({"id": piece["id"], "function": dict(piece["function"])})
            else:
                assert piece.keys() == {"index", "function"} and piece["function"].keys() == {"arguments"}
                message["tool_calls"][piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return message


@run
async def test_calls_come_whole_and_streamed() -> None:
    cluster = cluster_of(chat_templates.QWEN25, HERMES)
    message = await message_of(cluster, BODY)
    assert (message["content"], message["finish_reason"]) == ("Let me see.", "tool_calls")
    assert called(message) == CALLS
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    stream = await ask(cluster, {**BODY, "stream": True})
    streamed = put_together(stream.events)
    assert called(streamed) == CALLS and streamed["finish_reason"] == "tool_calls"
    assert streamed["content"] == "Let me see."
    # Arguments arrive in pieces.
    assert sum("tool_calls" in event.choice["delta"] for event in stream.events) > 10


OUTPUTS = {
    "hermes": (chat_templates.QWEN25, HERMES),
    "llama3_json": (
        chat_templates.LLAMA31,
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Zürich"}}; {"name": "now", "parameters": {}}',
    ),
    "mistral": (
        chat_templates.MISTRAL,
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Zürich"}}, {"name": "now", "arguments": {}}]',
    ),
    "new mistral": (
        chat_templates.MISTRAL,
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Zürich"}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}',
    ),
    "reasoning": (chat_templates.QWEN3, f"<think>\nA <tool_call>?\n\n</think>\n\n{HERMES}"),
    "reasoning that the prompt begins": (chat_templates.DEEPSEEK_R1, f"I think é.\n</think>\n\nWell. {HERMES}"),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_calls_of_every_family(kind: str) -> None:
    template, text = OUTPUTS[kind]

    @run
    async def test() -> None:
        cluster = cluster_of(template, text, tool_parser="hermes" if template is chat_templates.DEEPSEEK_R1 else "auto")
        message = await message_of(cluster, BODY)
        assert called(message) == CALLS and message["finish_reason"] == "tool_calls"
        streamed = put_together((await ask(cluster, {**BODY, "stream": True})).events)
        assert called(streamed) == CALLS
        assert streamed["content"] == (message["content"] or "")
        assert streamed["reasoning_content"] == message.get("reasoning_content", "")
        assert message.get("reasoning_content") in (None, "A <tool_call>?", "I think é.")

    test()


@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize("step", [7, 60])
def test_a_stream_goes_on_behind_any_of_its_events(kind: str, step: int) -> None:
    template, text = OUTPUTS[kind]
    body = {**BODY, "stream": True, "stream_options": {"include_usage": True}}

    @run
    async def test() -> None:
        cluster = cluster_of(template, text, tool_parser="hermes" if template is chat_templates.DEEPSEEK_R1 else "auto")
        # With this many tokens at once, one piece of text has several parts.
        whole = await ask(cluster, body, step=step)
        expected = put_together(whole.events)
        assert called(expected) == CALLS
        for place, last in enumerate(whole.events, 1):
            rest = await ask(cluster, body, last.id, 1)
            assert rest.status == 200 and rest.is_done, rest.body
            assert put_together(whole.events[:place] + rest.events) == expected

    test()


@run
async def test_a_stream_that_broke_off_goes_on_with_what_its_workers_make() -> None:
    text = 'hm é</think>\nA.<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'
    cluster = cluster_of(chat_templates.DEEPSEEK_R1, text, tool_parser="hermes")
    body = {**BODY, "stream": True}
    for num_tokens in range(1, len(cluster.output)):
        num_before = len(cluster.d.of(Admit))
        call = cluster.routers[0].post(body)
        while len(cluster.d.of(Admit)) == num_before:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await cluster.serve(num_tokens, step=3)
        first = await call.leave()
        rest = await ask(cluster, body, first.events[-1].id, 1)
        assert rest.status == 200 and rest.is_done, rest.body
        message = put_together(first.events + rest.events)
        assert (message["reasoning_content"], message["content"]) == ("hm é", "A.")
        assert called(message) == [("now", '{"a": 1}')] and message["finish_reason"] == "tool_calls"


@run
async def test_what_stands_in_a_streams_chunks() -> None:
    """As with OpenAI, a call begins with its name and no arguments."""
    text = '<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'
    cluster = cluster_of(chat_templates.QWEN25, text)
    stream = await ask(cluster, {**BODY, "stream": True}, step=1000)
    deltas = [event.choice["delta"] for event in stream.events]
    opening, start, *pieces = deltas
    assert opening == {"role": "assistant", "content": ""}
    (call,) = start["tool_calls"]
    assert call.pop("id").startswith("call_")
    assert call == {"index": 0, "type": "function", "function": {"name": "now", "arguments": ""}}
    assert pieces == [{"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1}'}}]}, {}]
    assert [event.choice["finish_reason"] for event in stream.events] == [None] * 3 + ["tool_calls"]


@run
async def test_forced_calls_have_no_content_in_any_chunk() -> None:
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for choice in ("required", {"type": "function", "function": {"name": "now"}}):
        stream = await ask(cluster_of(chat_templates.QWEN25, text), {**BODY, "stream": True, "tool_choice": choice})
        opening, *others = [event.choice["delta"] for event in stream.events]
        assert opening == {"role": "assistant", "content": None}
        assert not any("content" in delta for delta in others)


@run
async def test_tools_are_read_only_where_they_may_be_called() -> None:
    cluster = cluster_of(chat_templates.QWEN25, HERMES)
    for body in ({**BODY, "tool_choice": "none"}, {**BODY, "tools": []}, {"messages": [USER], "max_tokens": 300}):
        message = await message_of(cluster, body)
        assert (message["content"], message["finish_reason"]) == (HERMES, "stop") and "tool_calls" not in message
    prompts = [bytes(i for i in admit.prompt_ids if i < 256) for admit in cluster.d.of(Admit)]
    assert len(set(prompts)) == 1


@run
async def test_one_call_where_no_more_are_wanted() -> None:
    cluster = cluster_of(chat_templates.QWEN25, HERMES)
    message = await message_of(cluster, {**BODY, "parallel_tool_calls": False})
    assert called(message) == CALLS[:1]


@run
async def test_a_call_that_the_length_cuts_off() -> None:
    cluster = cluster_of(chat_templates.QWEN25, HERMES)
    num_tokens = len(cluster.output) - 30
    message = await message_of(cluster, {**BODY, "max_tokens": num_tokens})
    assert message["finish_reason"] == "length" and called(message)[0] == CALLS[0]


@run
async def test_bound_calls_are_written_in_the_models_own_way() -> None:
    """The workers' grammar and the parser agree."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    for template, special, text, key in (
        (
            chat_templates.QWEN25,
            chat_templates.SPECIAL,
            '<tool_call>\n{"name": "get_weather", "arguments": {"city":"B"}}\n</tool_call>',
            "hermes",
        ),
        (
            chat_templates.LLAMA31,
            chat_templates.SPECIAL,
            '{"name": "get_weather", "parameters": {"city":"B"}}',
            "llama",
        ),
        (chat_templates.MISTRAL, chat_templates.SPECIAL, '{"name": "get_weather", "arguments": {"city":"B"}}', "json"),
        (chat_templates.QWEN25, ("<tool_call>",), '{"name": "get_weather", "arguments": {"city":"B"}}', "json"),
    ):
        cluster = cluster_of(template, text, special)
        message = await message_of(cluster, {**BODY, "tool_choice": named})
        assert called(message) == [("get_weather", '{"city":"B"}')], key
        assert (message["content"], message["finish_reason"]) == (None, "stop")
        grammar = cluster.d.of(Admit)[-1].sampling.grammar
        assert follows(grammar, text)
        assert not follows(grammar, "No."), key
        assert not follows(grammar, text.replace('"B"', "5")), key
        assert not follows(grammar, text.replace("get_weather", "now")), key
        message = await message_of(cluster, {**BODY, "tool_choice": "required"})
        assert called(message) == [("get_weather", '{"city":"B"}')]
        assert message["finish_reason"] == "tool_calls"
        grammar = cluster.d.of(Admit)[-1].sampling.grammar
        assert follows(grammar, f"[{text}]" if key == "json" else text), key


def follows(grammar: str, text: str) -> bool:
    """Returns whether a text matches a grammar completely."""
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(grammar_check._Bytes())), grammar, log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


@run
async def test_a_grammar_is_for_what_follows_the_reasoning() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    cluster = cluster_of(chat_templates.QWEN3, "<think>\nhm\n</think>\n\n{}")
    body = {"messages": [USER], "max_tokens": 300, "response_format": schema}
    message = await message_of(cluster, body)
    assert (message["reasoning_content"], message["content"]) == ("hm", "{}")
    grammar = cluster.d.of(Admit)[-1].sampling.grammar
    assert follows(grammar, "<think>\nhm\n</think>\n\n{}") and follows(grammar, "{}")
    assert not follows(grammar, "hm") and not follows(grammar, "<think>hm</think>hm")
    # Without reasoning the grammar covers the whole output.
    await message_of(cluster, {**body, "chat_template_kwargs": {"enable_thinking": False}})
    grammar = cluster.d.of(Admit)[-1].sampling.grammar
    assert follows(grammar, "{}") and not follows(grammar, "<think>\nhm\n</think>\n\n{}")
    # A model that the prompt made begin to reason must end that.
    cluster = cluster_of(chat_templates.DEEPSEEK_R1, "hm\n</think>\n\n{}")
    assert (await message_of(cluster, body))["reasoning_content"] == "hm"
    grammar = cluster.d.of(Admit)[-1].sampling.grammar
    assert follows(grammar, "hm\n</think>\n\n{}") and not follows(grammar, "{}")


@run
async def test_an_answer_in_a_format_or_calls() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}}}
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for template, before in ((chat_templates.QWEN25, ""), (chat_templates.QWEN3, "<think>hm</think>")):
        cluster = cluster_of(template, before + text)
        message = await message_of(cluster, {**BODY, "response_format": wanted})
        assert called(message) == [("now", "{}")] and message["finish_reason"] == "tool_calls"
        grammar = cluster.d.of(Admit)[-1].sampling.grammar
        assert follows(grammar, before + text) and follows(grammar, before + '{"a":1}')
        assert not follows(grammar, before + "hm") and not follows(grammar, before + '{"b":1}')
        cluster = cluster_of(template, before + '{"a":1}')
        message = await message_of(cluster, {**BODY, "response_format": wanted})
        assert (message["content"], message["finish_reason"]) == ('{"a":1}', "stop")


@run
async def test_a_forced_call_wins_over_a_format() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for choice in ("required", {"type": "function", "function": {"name": "now"}}):
        cluster = cluster_of(chat_templates.QWEN25, text)
        message = await message_of(cluster, {**BODY, "response_format": wanted, "tool_choice": choice})
        assert called(message) == [("now", "{}")] and message["content"] is None
        grammar = cluster.d.of(Admit)[-1].sampling.grammar
        assert follows(grammar, text) and not follows(grammar, "{}")
    # The answer after the call has the format alone.
    cluster = cluster_of(chat_templates.QWEN25, "{}")
    messages = [USER, calling("{}"), {"role": "tool", "content": "5", "tool_call_id": "1"}]
    body = {**BODY, "messages": messages, "response_format": wanted, "tool_choice": "none"}
    assert (await message_of(cluster, body))["content"] == "{}"
    grammar = cluster.d.of(Admit)[-1].sampling.grammar
    assert follows(grammar, "{}") and not follows(grammar, text)


@run
async def test_objects_of_a_schema_are_closed_unless_the_server_opens_them() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for is_open in (False, True):
        cluster = cluster_of(chat_templates.QWEN25, '{"a": 1}', open_objects=is_open)
        await message_of(cluster, {**BODY, "response_format": wanted})
        grammar = cluster.d.of(Admit)[-1].sampling.grammar
        assert follows(grammar, '{"a": 1}') and follows(grammar, '{"a": 1, "b": 2}') == is_open


@run
async def test_what_is_cut_off_of_calls_that_were_asked_for_is_no_content() -> None:
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for length in (0, 5, len("<tool_call>"), text.index("now"), text.index(', "arg'), len(text) - 5, len(text)):
        for choice in ("required", {"type": "function", "function": {"name": "now"}}):
            message = await message_of(
                cluster_of(chat_templates.QWEN25, text[:length]), {**BODY, "tool_choice": choice}
            )
            assert message["content"] is None
            names = [name for name, _ in called(message)] if "tool_calls" in message else []
            assert names == (["now"] if '"now"' in text[:length] else [])


@run
async def test_reasoning_is_counted_where_its_marks_are_several_tokens() -> None:
    text = "hm</think>Yes."
    tokenizer = chat_templates.tokenizer(chat_templates.DEEPSEEK_R1)
    cluster = HttpCluster([*text.encode(), chat_templates.EOS], tokenizer=tokenizer, max_model_len=8000)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    stream = await ask(cluster, {"messages": [USER], "max_tokens": 300, **options})
    details = stream.events[-1].content["usage"]["completion_tokens_details"]
    # Counted at the mark, with all tokens that had come by then.
    assert len("hm</think>") <= details["reasoning_tokens"] <= len(cluster.output)


@run
async def test_reasoning_is_counted() -> None:
    text = "<think>hm</think>Yes."
    cluster = cluster_of(chat_templates.QWEN3, text)
    answer = json.loads((await ask(cluster, {"messages": [USER], "max_tokens": 300})).body)
    num_tokens = cluster.output.index(chat_templates.tokenizer(chat_templates.QWEN3).token_id("</think>")) + 1
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_tokens}
    # While the reasoning comes, all tokens count as reasoning.
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    stream = await ask(cluster, {"messages": [USER], "max_tokens": 300, **options})
    usages = [event.content["usage"] for event in stream.events[1:]]
    counted = [(u["completion_tokens"], u["completion_tokens_details"]["reasoning_tokens"]) for u in usages]
    assert all(num_reasoning == min(num_all, num_tokens) for num_all, num_reasoning in counted) and len(counted) > 5
    # A client that lacks only the usage gets the same.
    body = {"messages": [USER], "max_tokens": 300, "stream": True, "stream_options": {"include_usage": True}}
    stream = await ask(cluster, body)
    again = await ask(cluster, body, stream.events[-2].id)
    assert [event.content["usage"] for event in again.events] == [stream.events[-1].content["usage"]]
    cluster = cluster_of(chat_templates.QWEN3, "Yes.")
    answer = json.loads((await ask(cluster, {"messages": [USER], "max_tokens": 300})).body)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Yes."}


@run
async def test_a_message_that_is_gone_on_with() -> None:
    cluster = cluster_of(chat_templates.QWEN25, " world")
    messages = [USER, {"role": "assistant", "content": "Hello, "}]
    await message_of(cluster, {"messages": messages, "max_tokens": 9, "continue_final_message": True})
    prompt = chat_templates.tokenizer(chat_templates.QWEN25).decode(cluster.d.of(Admit)[-1].prompt_ids)
    assert prompt.endswith("Hello, ")
    await message_of(cluster, {"messages": messages, "max_tokens": 9, "add_generation_prompt": False})
    prompt = chat_templates.tokenizer(chat_templates.QWEN25).decode(cluster.d.of(Admit)[-1].prompt_ids)
    assert prompt.endswith("Hello, \n")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown function": ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "there is no tool 'f'"),
    "too long": (
        {"messages": [{**USER, "content": "x " * 9000}]},
        "maximum context length is 8000 tokens",
    ),
    "too much": ({"max_tokens": 9000}, "maximum context length is 8000 tokens"),
    "no tools": ({"tools": [], "tool_choice": "required"}, "there are no tools"),
    "allowed tools": (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        "allowed_tools is not supported",
    ),
    "tool_choice": ({"tool_choice": "any"}, "tool_choice: Input should be 'none', 'auto' or 'required'"),
    "format": (
        {"tool_choice": "required", "response_format": {"type": "json_schema"}},
        "response_format of type json_schema needs",
    ),
    "functions": ({"functions": [{"name": "f"}]}, "use tools, tool_choice"),
    "function_call": ({"function_call": {"name": "f"}}, "use tools, tool_choice"),
    "many": ({"tools": [TOOLS[1]] * 129}, "at most 128 items"),
    "twice": ({"tools": [TOOLS[1]] * 2}, "the function 'now' is there twice"),
    "name": ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    "custom": ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0"),
    "large": (
        {"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 2**18}}]},
        "at most 262144 characters",
    ),
    "large numbers": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": [10**250] * 5000}}}]},
        "at most 262144 characters",
    ),
    "kwargs": ({"chat_template_kwargs": {"messages": []}}, "messages cannot be set here"),
    "special": ({"chat_template_kwargs": {"bos_token": "x"}}, "bos_token cannot be set here"),
    "large kwargs": ({"chat_template_kwargs": {"x": "x" * 2**14}}, "at most 16384 characters"),
    "both ends": ({"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
    "tool without id": ({"messages": [USER, {"role": "tool", "content": "x"}]}, "needs the id of the call"),
    "no content": ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "content"),
    "calls of a user": (
        {"messages": [{**USER, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}]},
        "messages.0.tool_calls: a message of role user has none",
    ),
    "documents": ({"documents": [{"text": "x"}]}, "does not know documents"),
    "arguments": (
        {"messages": [calling("1," * 50_000)]},
        "the arguments of past calls: the body has more than",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refusals(kind: str) -> None:
    changes, words = REFUSED[kind]

    @run
    async def test() -> None:
        stream = await ask(cluster_of(chat_templates.QWEN25, "x"), {**BODY, **changes})
        assert stream.status == 400 and words in stream.error["message"], stream.body
        is_too_long = "maximum context length" in words
        assert is_too_long == (stream.error["code"] == "context_length_exceeded")

    test()


def test_schemas_are_not_nested_without_end() -> None:
    @run
    async def test() -> None:
        schema: dict[str, Any] = {}
        for _ in range(33):
            schema = {"items": schema}
        tool: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": schema}}
        cluster = cluster_of(chat_templates.QWEN25, "x")
        stream = await ask(cluster, {**BODY, "tools": [tool]})
        assert stream.status == 400 and "nested more than 32 deep" in stream.error["message"]
        tool["function"]["parameters"] = schema["items"]
        assert (await ask(cluster, {**BODY, "tools": [tool]})).status == 200

    test()


@run
async def test_several_outputs_have_calls_of_their_own() -> None:
    cluster = cluster_of(chat_templates.QWEN25, HERMES)
    call = cluster.routers[0].post({**BODY, "n": 2, "max_tokens": 200})
    await settle()
    for admit in cluster.d.of(Admit):
        key = (admit.request_id, admit.attempt)
        cluster.p.say(FirstToken(*key, 0, cluster.output[0], "", 0, 1))
        cluster.d.say(Tokens((TokenEvent(*key, 0, tuple(cluster.output)),)))
        cluster.d.say(Finished(*key, "stop", len(cluster.output), 0, 1))
    choices = json.loads((await call.finish()).body)["choices"]
    assert [called(choice["message"]) for choice in choices] == [CALLS, CALLS]
    assert len({call["id"] for choice in choices for call in choice["message"]["tool_calls"]}) == 4


@run
async def test_log_probabilities_are_of_all_tokens_of_the_output() -> None:
    text = '<tool_call>{"name": "now"}</tool_call>'
    cluster = cluster_of(chat_templates.QWEN25, text)
    tokenizer = chat_templates.tokenizer(chat_templates.QWEN25)
    for stream in (False, True):
        call = cluster.routers[0].post({**BODY, "logprobs": True, "stream": stream})
        await settle()
        admit = cluster.d.of(Admit)[-1]
        key, entries = (admit.request_id, admit.attempt), tuple(TokenLogprobs(-1.0) for _ in cluster.output)
        cluster.p.say(FirstToken(*key, 0, cluster.output[0], "", 0, 1, logprobs=entries[:1]))
        cluster.d.say(Tokens((TokenEvent(*key, 0, tuple(cluster.output), entries),)))
        cluster.d.say(Finished(*key, "stop", len(cluster.output), 0, 1))
        answer = await call.finish()
        choices = [e.choice for e in answer.events] if stream else json.loads(answer.body)["choices"]
        listed = [entry["token"] for choice in choices for entry in (choice["logprobs"] or {}).get("content", ())]
        assert listed == [tokenizer.token_piece(index).decode(errors="replace") for index in cluster.output]


@run
async def test_a_model_whose_calls_nobody_reads() -> None:
    cluster = cluster_of(chat_templates.QWEN25, '[{"name": "now", "arguments": {}}]', tool_parser="none")
    stream = await ask(cluster, BODY)
    assert stream.status == 400 and "--tool-parser" in stream.error["message"]
    assert called(await message_of(cluster, {**BODY, "tool_choice": "required"})) == [("now", "{}")]


@run
async def test_reasoning_that_a_special_token_ends_goes_with_no_grammar() -> None:
    cluster = cluster_of(chat_templates.QWEN3, "<think>hm</think>{}", ("</think>",))
    body = {"messages": [USER], "max_tokens": 99}
    message = await message_of(cluster, body)
    assert (message["reasoning_content"], message["content"]) == ("hm", "{}")
    stream = await ask(cluster, {**body, "response_format": {"type": "json_object"}})
    assert stream.status == 400 and "turn its reasoning off" in stream.error["message"]


@run
async def test_the_python_client_reads_calls() -> None:
    text = f"<think>hm</think>{HERMES}"
    cluster = cluster_of(chat_templates.QWEN3, text)
    server = HttpServer(cluster.routers[0].app, "127.0.0.1", 0, None, 10)
    await server.start()
    try:
        async with openai.AsyncOpenAI(base_url=f"http://{server.address}/v1", api_key=KEYS[0], max_retries=0) as client:
            await talk_with(client, cluster)
    finally:
        await server.stop()


async def talk_with(client: openai.AsyncOpenAI, cluster: HttpCluster) -> None:
    asked = asyncio.create_task(client.chat.completions.create(model="fake", messages=[USER], tools=TOOLS))
    await serve_next(cluster, 0)
    message = (await asked).choices[0].message
    calls: list[Any] = message.tool_calls or []
    assert [(call.function.name, call.function.arguments) for call in calls] == CALLS
    # The message goes back unchanged.
    results = [{"role": "tool", "tool_call_id": call.id, "content": "1"} for call in calls]
    history: list[Any] = [USER, message, *results]

    async def collect() -> Any:
        async with client.chat.completions.stream(model="fake", messages=history, tools=TOOLS) as stream:
            return await stream.get_final_completion()

    collecting = asyncio.create_task(collect())
    await serve_next(cluster, 1)
    message = (await collecting).choices[0].message
    calls = message.tool_calls or []
    assert [(call.function.name, call.function.arguments) for call in calls] == CALLS
    assert message.content == "Let me see."


async def serve_next(cluster: HttpCluster, num_before: int) -> None:
    while len(cluster.d.of(Admit)) == num_before:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await cluster.serve(len(cluster.output))


@pytest.mark.parametrize("prompt", [{"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "hi"}])
def test_a_client_that_leaves_ends_the_check_of_its_grammar(
    monkeypatch: pytest.MonkeyPatch, prompt: dict[str, Any]
) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    def check(_: grammar_check.GrammarCheck) -> str:
        begun.set()
        assert cancelled.wait(10.0)
        raise ValueError("cancelled")

    monkeypatch.setattr(grammar_check.GrammarCheck, "run", check)
    monkeypatch.setattr(grammar_check.GrammarCheck, "cancel", lambda _: cancelled.set())

    @run
    async def scenario() -> None:
        cluster = HttpCluster(b"Hello.", num_routers=1)
        call = cluster.routers[0].post({**prompt, "guided_regex": "[a-z]+"})
        while not begun.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert (await call.leave()).status == 499
        assert cancelled.is_set()

    scenario()
