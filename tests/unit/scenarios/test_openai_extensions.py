"""vLLM's extensions of completions and chats, over scripted workers."""

import asyncio
import json
from typing import Any

import pytest

from tandem.messages import Admit
from tests.fakes import chat_templates
from tests.fakes.http_cluster import HttpCluster, Stream
from tests.fakes.router_harness import run, settle

END = chat_templates.EOS
USER = {"role": "user", "content": "hi"}
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
# Two tokens of one character each, a character of two tokens, and the end.
TEXT = "Yoé"


def cluster_of(
    text: str = TEXT, template: str = chat_templates.QWEN25, special: tuple[str, ...] = chat_templates.SPECIAL
) -> HttpCluster:
    tokenizer = chat_templates.tokenizer(template, special)
    return HttpCluster([*tokenizer.tokenize(text, False).ids, END], tokenizer=tokenizer, max_model_len=8000)


async def ask(cluster: HttpCluster, path: str = "", num_outputs: int = 1, **body: Any) -> Stream:
    num_before = len(cluster.d.of(Admit))
    call = cluster.routers[0].post({"max_tokens": 30, **body}, path=path)
    while not call.task.done() and len(cluster.d.of(Admit)) < num_before + num_outputs:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    if not call.task.done():
        await cluster.serve(len(cluster.output))
    await settle()
    return await call.finish()


async def answer(cluster: HttpCluster, **body: Any) -> Any:
    stream = await ask(cluster, **body)
    assert stream.status == 200, stream.body
    return json.loads(stream.body)


def prompt_of(cluster: HttpCluster) -> list[int]:
    return list(cluster.d.of(Admit)[-1].prompt_ids)


def text_of(cluster: HttpCluster) -> str:
    """Returns the latest prompt with its special tokens."""
    return chat_templates.tokenizer(chat_templates.QWEN25, (*chat_templates.SPECIAL, *FIM)).decode(
        prompt_of(cluster), skip_special_tokens=False
    )


@run
async def test_whole_answers_have_the_ids_of_prompt_and_output() -> None:
    cluster = cluster_of()
    (choice,) = (await answer(cluster, prompt="ab", return_token_ids=True))["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt_of(cluster), list(cluster.output))
    assert choice["text"] == TEXT
    body = await answer(cluster, messages=[USER], return_token_ids=True)
    assert body["prompt_token_ids"] == prompt_of(cluster)
    assert body["choices"][0]["token_ids"] == list(cluster.output)
    for plain in (await answer(cluster, prompt="ab"), await answer(cluster, messages=[USER], return_token_ids=False)):
        assert "prompt_token_ids" not in plain and plain["choices"][0].keys().isdisjoint(
            {"token_ids", "prompt_token_ids"}
        )


@run
async def test_ids_go_in_and_out_exactly() -> None:
    """Token ids as the prompt come back as they are, and the output's as the next prompt."""
    cluster = cluster_of()
    (first,) = (await answer(cluster, prompt=[7, 8, 7], return_token_ids=True))["choices"]
    assert first["prompt_token_ids"] == [7, 8, 7] == prompt_of(cluster)
    (second,) = (await answer(cluster, prompt=[7, 8, 7, *first["token_ids"]], return_token_ids=True))["choices"]
    assert second["prompt_token_ids"] == prompt_of(cluster) == [7, 8, 7, *cluster.output]


@run
async def test_streams_have_the_prompt_once_and_each_token_once() -> None:
    cluster = cluster_of()
    stream = await ask(cluster, prompt="ab", stream=True, return_token_ids=True)
    first, *others = [event.choice for event in stream.events]
    assert first["prompt_token_ids"] == prompt_of(cluster)
    assert not any("prompt_token_ids" in choice for choice in others)
    assert [i for choice in (first, *others) for i in choice["token_ids"]] == list(cluster.output)
    # A token that only begins a character has its chunk too.
    assert [choice["token_ids"] for choice in (first, *others)][:4] == [[i] for i in cluster.output[:4]]
    assert not any(event.id for event in stream.events), "it cannot be gone on with"
    stream = await ask(cluster, messages=[USER], stream=True, return_token_ids=True)
    opening, *chunks = [event.content for event in stream.events]
    assert opening["prompt_token_ids"] == prompt_of(cluster)
    assert not any("prompt_token_ids" in chunk for chunk in chunks)
    assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]] == list(cluster.output)
    assert "".join(event.text for event in stream.events) == TEXT


@run
async def test_ids_of_an_output_with_parts() -> None:
    """Tokens that are no part of any text come too: those of marks, and of reasoning's whitespace."""
    text = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>'
    cluster = cluster_of(text, chat_templates.QWEN3)
    tools = [{"type": "function", "function": {"name": "now"}}]
    asked: dict[str, Any] = {"messages": [USER], "tools": tools, "return_token_ids": True, "max_tokens": 300}
    body = await answer(cluster, **asked)
    assert body["choices"][0]["token_ids"] == list(cluster.output)
    stream = await ask(cluster, **asked, stream=True)
    ids = [i for event in stream.events[1:] for i in event.choice["token_ids"]]
    assert ids == list(cluster.output)


@run
async def test_workers_get_the_allowed_and_the_named_tokens() -> None:
    cluster = cluster_of()
    asked = {"allowed_token_ids": [5, 3], "logprobs": 0, "logprob_token_ids": [4, 2]}
    call = cluster.routers[0].post({"prompt": "ab", "max_tokens": 2, **asked})
    await settle()
    sampling = cluster.d.of(Admit)[-1].sampling
    assert (sampling.allowed_token_ids, sampling.logprob_token_ids) == ((5, 3), (4, 2))
    await call.leave()


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"logprob_token_ids": [1]}, "logprob_token_ids", "logprob_token_ids needs logprobs"),
        (
            {"allowed_token_ids": [1, 5000, 2, 9999]},
            "allowed_token_ids",
            "allowed_token_ids: token ids 5000, 9999 are outside the vocabulary",
        ),
        (
            {"logit_bias": {"5000": 1, "1": 1, "6000": 1}},
            "logit_bias",
            "logit_bias: token ids 5000, 6000 are outside the vocabulary",
        ),
        (
            {"allowed_token_ids": [1], "guided_regex": "a"},
            "allowed_token_ids",
            "allowed_token_ids cannot be had with structured output",
        ),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "truncate_prompt_tokens must be -1 or between 1"),
        ({"truncate_prompt_tokens": 8000}, "truncate_prompt_tokens", "truncate_prompt_tokens must be -1 or between 1"),
        ({"suffix": "x"}, "suffix", "this model has no tokens for filling in the middle of a text"),
    ],
)
def test_what_is_refused(body: dict[str, Any], param: str, message: str) -> None:
    @run
    async def scenario() -> None:
        stream = await ask(cluster_of(), prompt="ab", **body)
        assert (stream.status, stream.error["param"]) == (400, param)
        assert stream.error["message"].startswith(message)

    scenario()


@run
async def test_prompts_are_truncated_at_either_side() -> None:
    cluster = cluster_of()
    text = "".join(chr(97 + i % 26) for i in range(9000))
    ids = chat_templates.tokenizer(chat_templates.QWEN25).tokenize(text, False).ids
    assert len(ids) == 9000 > 8000, "it would be refused"
    for prompt in (text, ids):
        for side, kept in ((None, ids[-5:]), ("left", ids[-5:]), ("right", ids[:5])):
            await answer(cluster, prompt=prompt, truncate_prompt_tokens=5, truncation_side=side)
            assert prompt_of(cluster) == kept
        await answer(cluster, prompt=prompt, truncate_prompt_tokens=-1, max_tokens=100)
        assert prompt_of(cluster) == ids[-7900:]
    (choice,) = (await answer(cluster, prompt=text, truncate_prompt_tokens=3, echo=True))["choices"]
    assert choice["text"] == text[-3:] + TEXT
    await answer(cluster, prompt="abc", truncate_prompt_tokens=5)
    assert prompt_of(cluster) == [*chat_templates.tokenizer(chat_templates.QWEN25).tokenize("abc", False).ids]
    # A chat is truncated as its template wrote it.
    await answer(cluster, messages=[{"role": "user", "content": text}], truncate_prompt_tokens=30)
    assert len(prompt_of(cluster)) == 30 and text_of(cluster).endswith("<|im_start|>assistant\n")
    await answer(cluster, messages=[USER], truncate_prompt_tokens=4, truncation_side="right")
    assert text_of(cluster) == "<|im_start|>use"


@run
async def test_a_chat_is_echoed_where_the_output_goes_on_with_it() -> None:
    cluster = cluster_of()
    started = [USER, {"role": "assistant", "content": "So: "}]
    asked: dict[str, Any] = {"messages": started, "continue_final_message": True}
    for echo, text in ((True, f"So: {TEXT}"), (False, TEXT)):
        message = (await answer(cluster, **asked, echo=echo))["choices"][0]["message"]
        assert (message["role"], message["content"]) == ("assistant", text)
        assert (await ask(cluster, **asked, echo=echo, stream=True)).text == text
    # The last message has another role than the answer.
    message = (await answer(cluster, messages=[USER], echo=True))["choices"][0]["message"]
    assert message["content"] == TEXT
    # Without a generation prompt the output is the last message's.
    message = (await answer(cluster, messages=[USER], echo=True, continue_final_message=True))["choices"][0]["message"]
    assert message == {"role": "user", "content": f"hi{TEXT}"}
    stream = await ask(cluster, messages=[USER], continue_final_message=True, stream=True)
    assert stream.events[0].choice["delta"]["role"] == "user"


@run
async def test_roles_are_those_that_the_template_writes() -> None:
    critic = {"role": "critic", "content": "Too long."}
    cluster = cluster_of(template=chat_templates.LLAMA31)
    await answer(cluster, messages=[USER, critic])
    assert "critic" in chat_templates.tokenizer(chat_templates.LLAMA31).decode(prompt_of(cluster))
    # A template that drops such messages would lose them silently.
    for template in (chat_templates.QWEN25, chat_templates.MISTRAL):
        stream = await ask(cluster_of(template=template), messages=[USER, critic])
        assert (stream.status, stream.error["param"]) == (400, "messages")
        assert "does not take messages of role 'critic'" in stream.error["message"]
    many = [{"role": f"r{i}", "content": "x"} for i in range(9)]
    assert "9 roles" in (await ask(cluster, messages=many)).error["message"]


@run
async def test_the_middle_of_a_text_is_filled_in() -> None:
    cluster = cluster_of(special=(*chat_templates.SPECIAL, *FIM))
    (choice,) = (await answer(cluster, prompt="def f(", suffix="): pass", echo=True))["choices"]
    assert text_of(cluster) == "<|fim_prefix|>def f(<|fim_suffix|>): pass<|fim_middle|>"
    assert choice["text"] == f"def f({TEXT}"
    await answer(cluster, prompt="a", suffix="")
    assert text_of(cluster) == "a"
    for body, param in (
        ({"prompt": [1, 2]}, "suffix"),
        ({"prompt": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    ):
        stream = await ask(cluster, **body, suffix="b")
        assert (stream.status, stream.error["param"]) == (400, param)


@run
async def test_invocations_are_chats_or_completions() -> None:
    cluster = cluster_of()
    for body, kind in (({"messages": [USER]}, "chat.completion"), ({"prompt": "ab"}, "text_completion")):
        stream = await ask(cluster, path="/invocations", **body)
        assert (stream.status, json.loads(stream.body)["object"]) == (200, kind)
    stream = await ask(cluster, path="/invocations", messages=[USER], stream=True)
    assert stream.is_done and stream.text == TEXT
    stream = await ask(cluster, path="/invocations", messages=[{"role": "user"}])
    assert stream.error["message"] == "messages.0.content: a message of role user needs one"
    assert (await ask(cluster, path="/invocations")).error["message"] == "prompt: Field required"
