"""Edits of a conversation before it becomes the prompt."""

from typing import Any

import pytest

from tandem.messages import Admit
from tests.fakes import chat_templates
from tests.fakes.http_cluster import HttpCluster
from tests.fakes.http_doors import TOOLS, DoorAnswer, call, cluster_of
from tests.fakes.router_harness import run

PATH = "/v1/messages"
CLIENT_TOOLS = [{"name": tool["name"], "input_schema": {"type": "object"}} for tool in TOOLS]


def turn(number: int, name: str = "now") -> list[dict[str, Any]]:
    """Returns a call with thinking before it, and its result."""
    thinking = {"type": "thinking", "thinking": f"thought-{number}"}
    use = {"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": {"at": f"input-{number}"}}
    result = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": f"result-{number} " * 20}
    return [{"role": "assistant", "content": [thinking, use]}, {"role": "user", "content": [result]}]


TALK = [{"role": "user", "content": "hi"}, *turn(1, "get_weather"), *turn(2), *turn(3), *turn(4), *turn(5)]
CLEAR = "clear_tool_uses_20250919"


async def ask(cluster: HttpCluster, edits: list[dict[str, Any]] | None, **fields: Any) -> DoorAnswer:
    body = {"messages": TALK, "max_tokens": 5, "tools": CLIENT_TOOLS, "context_management": {"edits": edits}}
    return await call(cluster, PATH, {**body, **fields})


def prompt_of(cluster: HttpCluster, template: str = chat_templates.QWEN25) -> str:
    tokenizer = chat_templates.tokenizer(template)
    return b"".join(map(tokenizer.token_piece, cluster.d.of(Admit)[-1].prompt_ids)).decode()


def left(prompt: str, kind: str) -> list[int]:
    return [number for number in range(1, 6) if f"{kind}-{number}" in prompt]


@pytest.mark.parametrize(
    ("edit", "results", "inputs"),
    [
        ({"trigger": {"type": "tool_uses", "value": 4}}, [3, 4, 5], [1, 2, 3, 4, 5]),
        ({"trigger": {"type": "tool_uses", "value": 5}}, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]),
        ({"trigger": {"type": "input_tokens", "value": 10}}, [3, 4, 5], [1, 2, 3, 4, 5]),
        ({}, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]),
        (
            {
                "trigger": {"type": "input_tokens", "value": 10},
                "keep": {"type": "tool_uses", "value": 1},
                "exclude_tools": ["get_weather"],
                "clear_tool_inputs": True,
            },
            [1, 5],
            [1, 5],
        ),
        (
            {
                "trigger": {"type": "tool_uses", "value": 0},
                "keep": {"type": "tool_uses", "value": 0},
                "clear_tool_inputs": ["get_weather"],
            },
            [],
            [2, 3, 4, 5],
        ),
        (
            {"trigger": {"type": "tool_uses", "value": 0}, "clear_at_least": {"type": "input_tokens", "value": 5000}},
            [1, 2, 3, 4, 5],
            [1, 2, 3, 4, 5],
        ),
    ],
)
def test_old_results_are_cleared(edit: dict[str, Any], results: list[int], inputs: list[int]) -> None:
    @run
    async def scenario() -> None:
        cluster = cluster_of(chat_templates.QWEN25, "Hello.")
        message = (await ask(cluster, [{"type": CLEAR, **edit}])).json()
        prompt = prompt_of(cluster)
        assert (left(prompt, "result"), left(prompt, "input")) == (results, inputs)
        applied = message["context_management"]["applied_edits"]
        assert [done["cleared_tool_uses"] for done in applied] == ([5 - len(results)] if len(results) < 5 else [])
        whole = await call(cluster, f"{PATH}/count_tokens", {"messages": TALK, "tools": CLIENT_TOOLS})
        saved = sum(done["cleared_input_tokens"] for done in applied)
        assert message["usage"]["input_tokens"] + saved == whole.json()["input_tokens"]
        assert saved > 0 or not applied
        counted = await call(
            cluster,
            f"{PATH}/count_tokens",
            {"messages": TALK, "tools": CLIENT_TOOLS, "context_management": {"edits": [{"type": CLEAR, **edit}]}},
        )
        assert counted.json() == {
            "input_tokens": message["usage"]["input_tokens"],
            "context_management": {"original_input_tokens": whole.json()["input_tokens"]},
        }

    scenario()


_SHOWS_THINKING = """{%- for message in messages %}
{{- message.role + (message.reasoning_content or '') + message.content + '|' }}
{%- for call in message.tool_calls or [] %}{{- call | tojson }}{%- endfor %}{%- endfor %}"""


@run
async def test_old_thinking_is_cleared() -> None:
    for keep, thoughts in (
        ({}, [5]),
        ({"keep": {"type": "thinking_turns", "value": 2}}, [4, 5]),
        ({"keep": "all"}, [1, 2, 3, 4, 5]),
        ({"keep": {"type": "all"}}, [1, 2, 3, 4, 5]),
    ):
        cluster = cluster_of(_SHOWS_THINKING, "Hello.")
        message = (await ask(cluster, [{"type": "clear_thinking_20251015", **keep}], tools=[])).json()
        assert left(prompt_of(cluster, _SHOWS_THINKING), "thought") == thoughts
        (done,) = message["context_management"]["applied_edits"] or [{"cleared_thinking_turns": 0}]
        assert done["cleared_thinking_turns"] == 5 - len(thoughts)


@run
async def test_edits_that_are_not_applied_are_not_in_the_answer() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.")
    compact = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 50}}
    answer = await ask(cluster, [compact], stream=True)
    deltas = [content for name, content in answer.events if name == "message_delta"]
    assert deltas[0]["context_management"] == {"applied_edits": []}
    assert left(prompt_of(cluster), "result") == [1, 2, 3, 4, 5]
    assert "context_management" not in (await ask(cluster, None, context_management=None)).json()
    for edits, message in (
        ([{"type": "something_20300101"}], ".0: edits of type 'something_20300101' are not supported by this server"),
        ([compact, compact], ": each type of edit may be there once"),
        ([{"type": CLEAR, "trigger": {"type": "hours", "value": 1}}], ".0.trigger: Input tag 'hours'"),
    ):
        refused = await ask(cluster, edits)
        assert refused.status == 400
        assert refused.json()["error"]["message"].startswith(f"context_management.edits{message}")


@run
async def test_an_edit_may_make_a_prompt_fit() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.")
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "x" * 9000}
    talk = [*TALK[:2], {"role": "user", "content": [result]}, *TALK[3:]]
    assert (await ask(cluster, [], messages=talk)).status == 400
    message = (await ask(cluster, [{"type": CLEAR}], messages=talk)).json()
    assert message["context_management"]["applied_edits"] == [
        {"type": CLEAR, "cleared_tool_uses": 2, "cleared_input_tokens": 0}
    ]
    assert "xxx" not in prompt_of(cluster)
