"""Fields that decide the prompt, of each API: every one is served, or refused."""

from typing import Any

import pytest

from tandem.messages import Admit
from tandem.router.frontends.anthropic import schema as anthropic
from tandem.router.frontends.openai import tools_schema as chat
from tandem.router.frontends.openai.lenient import LenientBody
from tandem.router.frontends.openai.schema import CompletionRequest
from tandem.router.frontends.responses import schema as responses
from tests.fakes import chat_templates
from tests.fakes.http_doors import call, cluster_of
from tests.fakes.router_harness import run

# Of other APIs and servers, sent to any path by clients with another server in mind.
_ELSEWHERE = {
    # A conversation that the server is supposed to keep.
    *("thread", "previous_message_id", "compaction", "session_params", "context"),
    # Texts or contents added to the prompt, and content taken from it.
    *("system", "safe_prompt", "prompt_mode", "transforms", "plugins", "data_sources", "search_parameters"),
    *("truncate_prompt_tokens", "num_ctx", "num_keep", "n_keep"),
    # Reasoning turned on or off by the template.
    *("think", "thinking", "enable_thinking"),
    # The prompt in another form.
    *("template", "raw", "chat_template", "options", "images", "input_ids", "input_embeds", "prompt_embeds"),
}
_CONVERSATION = {"previous_response_id", "conversation", "instructions", "input"}
# By API: its documented fields, and its objects'.
PROMPT_FIELDS: dict[type[LenientBody], set[str]] = {
    CompletionRequest: {"prompt", "suffix", "add_special_tokens", "messages", *_ELSEWHERE, *_CONVERSATION},
    chat.ChatRequest: {
        *("messages", "tools", "tool_choice", "functions", "function_call", "documents", "reasoning_effort"),
        *("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
        *("prompt", "suffix", "web_search_options", *_ELSEWHERE, *_CONVERSATION),
    },
    chat.Message: {
        *("role", "content", "name", "refusal", "reasoning", "reasoning_content", "tool_calls", "tool_call_id"),
        *("function_call", "audio", "images", "prefix"),
    },
    chat.FunctionDefinition: {"name", "description", "parameters"},
    responses.ResponseRequest: {
        *("input", "instructions", "previous_response_id", "conversation", "prompt", "truncation", "tools"),
        *("tool_choice", "reasoning", "context_management", "image", "chat_template_kwargs", "messages", "functions"),
        *("reasoning_effort", *_ELSEWHERE),
    },
    responses.ReasoningOptions: {"effort", "context"},
    responses.MessageItem: {"role", "content"},
    responses.CallItem: {"call_id", "name", "arguments", "namespace"},
    responses.CallOutputItem: {"call_id", "output"},
    responses.ReasoningItem: {"content"},
    responses.FunctionTool: {"name", "description", "parameters", "defer_loading", "allowed_callers"},
    anthropic.MessagesRequest: {
        *("messages", "system", "tools", "tool_choice", "thinking", "thread", "compaction", "context_management"),
        *("container", "mcp_servers", "output_config", "output_format", "prompt", "chat_template_kwargs"),
        *(_ELSEWHERE | _CONVERSATION),
    },
    anthropic.OutputConfig: {"format", "effort"},
    anthropic.InputMessage: {"role", "content"},
    anthropic.ToolUseBlock: {"id", "name", "input"},
    anthropic.ToolResultBlock: {"tool_use_id", "content"},
    anthropic.MessagesTool: {
        *("name", "description", "input_schema", "input_examples", "defer_loading", "allowed_callers"),
    },
}


@pytest.mark.parametrize("kind", PROMPT_FIELDS, ids=lambda kind: kind.__name__)
def test_no_field_that_decides_the_prompt_is_ignored(kind: type[LenientBody]) -> None:
    declared = {field.alias or name for name, field in kind.model_fields.items()}
    assert not PROMPT_FIELDS[kind] - declared - kind.unserved.keys()


@pytest.mark.parametrize("kind", PROMPT_FIELDS, ids=lambda kind: kind.__name__)
def test_a_refused_field_takes_only_values_that_change_nothing(kind: type[LenientBody]) -> None:
    changing: tuple[Any, ...] = ("x", 7, {"type": "continue", "previous_message_id": "msg_1"}, ["x"])
    for name in PROMPT_FIELDS[kind] & kind.unserved.keys():
        assert not any(kind.unserved[name].takes(value) for value in changing), name


# Writes every variable and field that templates of the field read.
_TEMPLATE = """{{- 'effort=' + (reasoning_effort or '') + '|' }}
{%- for message in messages %}
{{- message.role + '=' + (message.name or '') + ':' + (message.reasoning_content or '') + ':' + message.content + '|' }}
{%- endfor %}"""
_TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "hi", "name": "Ada"},
    {"role": "assistant", "content": None, "refusal": "No.", "reasoning": "Hm."},
    {"role": "user", "content": "why"},
]


@pytest.mark.parametrize(
    ("path", "body", "prompt"),
    [
        (
            "/v1/chat/completions",
            {"messages": _TALK, "reasoning_effort": "low"},
            "effort=low|user=Ada::hi|assistant=:Hm.:No.|user=::why|",
        ),
        ("/v1/responses", {"input": "hi", "reasoning": {"effort": "low"}}, "effort=low|user=::hi|"),
        (
            "/v1/messages",
            {"messages": _TALK[2:], "max_tokens": 5, "output_config": {"effort": "max"}},
            "effort=max|user=::why|",
        ),
        ("/v1/chat/completions", {"messages": _TALK[2:]}, "effort=|user=::why|"),
    ],
)
def test_templates_get_every_field_that_they_can_show(path: str, body: dict[str, Any], prompt: str) -> None:
    @run
    async def scenario() -> None:
        cluster = cluster_of(_TEMPLATE, "Hello.")
        assert (await call(cluster, path, body)).status == 200
        tokenizer = chat_templates.tokenizer(_TEMPLATE)
        assert b"".join(map(tokenizer.token_piece, cluster.d.of(Admit)[-1].prompt_ids)).decode() == prompt

    scenario()
