"""Prompt log probabilities over HTTP with scripted workers: each value is minus its position."""

import asyncio
import json
from array import array
from collections.abc import Awaitable
from typing import Any

import pytest

from tandem.messages import FirstToken, Prefill, PromptScored
from tandem.prompt_logprobs import PackedLogprobs
from tandem.router.frontends.base import MAX_PROMPT_LOGPROBS, TokenizedPrompt
from tandem.router.frontends.openai import prompt_logprobs
from tandem.router.frontends.openai.prompt_logprobs import PIECE_ENTRIES, PromptTexts
from tandem.router.frontends.openai.request import WantedLogprobs
from tandem.router.requests.prompt_logprobs import PromptLogprobs
from tandem.sampling_params import ALL_LOGPROBS, SamplingParams, TokenLogprobs, TopLogprob
from tests.fakes.http_cluster import HttpCluster, Stream
from tests.fakes.router_harness import settle
from tests.fakes.tokenizer import ByteTokenizer

PROMPT = "héllo"
IDS = list(PROMPT.encode())
OUTPUT = ord("!")
VOCAB_SIZE = ByteTokenizer.vocab_size


def scored(prefill: Prefill, start: int, end: int) -> PromptScored:
    """Returns a worker's message about these positions. The most likely tokens are 97, 98 and so on."""
    num_top = prefill.sampling.num_prompt_logprobs
    assert num_top is not None
    num_top = VOCAB_SIZE if num_top == ALL_LOGPROBS else num_top
    positions = range(start, end)
    part = PackedLogprobs(
        start,
        num_top,
        array("f", [-float(p) for p in positions]).tobytes(),
        array("I", [p + 100 for p in positions]).tobytes(),
        array("I", [(97 + i) % VOCAB_SIZE for _ in positions for i in range(num_top)]).tobytes(),
        array("f", [-float(p) for p in positions for _ in range(num_top)]).tobytes(),
    )
    return PromptScored(prefill.request_id, prefill.attempt, part)


async def serve(cluster: HttpCluster) -> list[Prefill]:
    """Serves all requests so far with one token each."""
    await settle()
    requests: list[Prefill] = cluster.p.of(Prefill)
    for prefill in requests:
        if prefill.sampling.num_prompt_logprobs is not None:
            num_tokens = len(prefill.prompt_ids)
            middle = (num_tokens + 1) // 2
            for start, end in ((1, middle), (middle, num_tokens)):
                if start < end:
                    cluster.p.say(scored(prefill, start, end))
        num_top = prefill.sampling.num_logprobs
        logprobs = () if num_top is None else (TokenLogprobs(-0.5, (TopLogprob(OUTPUT, -0.5),) * min(num_top, 1)),)
        cluster.p.say(FirstToken(prefill.request_id, prefill.attempt, 0, OUTPUT, "length", 0, 1, (), logprobs))
    return requests


def ask(**body: Any) -> tuple[Stream, list[Prefill]]:
    async def run() -> tuple[Stream, list[Prefill]]:
        cluster = HttpCluster([OUTPUT], num_routers=1)
        call = cluster.routers[0].post({"max_tokens": 1, "temperature": 0, **body})
        requests = await serve(cluster)
        return await call.finish(), requests

    return asyncio.run(run())


def answer(**body: Any) -> Any:
    stream, _ = ask(**body)
    assert stream.status == 200, stream.body
    return json.loads(stream.body)


def listed(num_top: int) -> list[Any]:
    """Returns PROMPT's log probabilities in vLLM's form."""

    def entry(position: int, token_id: int, rank: int) -> dict[str, Any]:
        names = {0xC3: "bytes:\\xc3", 0xA9: "bytes:\\xa9"}
        return {"logprob": -position, "rank": rank, "decoded_token": names.get(token_id, chr(token_id))}

    return [None] + [
        {
            str(IDS[p]): entry(p, IDS[p], p + 100),
            **{str(97 + i): entry(p, 97 + i, i + 1) for i in range(num_top) if 97 + i != IDS[p]},
        }
        for p in range(1, len(IDS))
    ]


@pytest.mark.parametrize("num_top", [0, 2, 12])
def test_completions_list_them_in_each_choice(num_top: int) -> None:
    body = answer(prompt=PROMPT, prompt_logprobs=num_top, n=2)
    assert [choice["prompt_logprobs"] for choice in body["choices"]] == [listed(num_top)] * 2
    assert [choice["text"] for choice in body["choices"]] == ["!", "!"]


@pytest.mark.parametrize("piece_entries", [7, 512])
def test_the_whole_vocabulary_is_listed(monkeypatch: pytest.MonkeyPatch, piece_entries: int) -> None:
    """With others' turns between pieces of a single token's entries."""
    monkeypatch.setattr(prompt_logprobs, "PIECE_ENTRIES", piece_entries)
    body = answer(prompt=PROMPT, prompt_logprobs=-1, echo=True, logprobs=1)
    first, *others = body["choices"][0]["prompt_logprobs"]
    assert first is None and len(others) == len(IDS) - 1
    for position, entries in enumerate(others, 1):
        assert sorted(map(int, entries)) == list(range(VOCAB_SIZE))
        assert entries[str(IDS[position])]["rank"] == position + 100
        likely = [entry["rank"] for token_id, entry in entries.items() if int(token_id) != IDS[position]]
        assert likely == sorted(likely)
    # Each token counts with all others.
    stream, _ = ask(prompt=[[1] * 300] * 4, prompt_logprobs=-1)
    assert stream.status == 400 and f"{300 * 4 * 257} log probabilities" in stream.error["message"]


def test_chats_list_them_once() -> None:
    body = answer(messages=[{"role": "user", "content": PROMPT}], prompt_logprobs=1, n=2)
    assert body["prompt_logprobs"] == listed(1)
    assert [choice["message"]["content"] for choice in body["choices"]] == ["!", "!"]


def test_one_output_of_a_prompt_asks_for_all() -> None:
    _, requests = ask(prompt=[IDS, IDS], prompt_logprobs=1, n=3)
    assert [r.sampling.num_prompt_logprobs for r in requests] == [1, None, None] * 2


def test_echo_puts_the_prompt_in_front_of_the_output() -> None:
    body = answer(prompt=PROMPT, echo=True, logprobs=1)
    (choice,) = body["choices"]
    assert choice["text"] == "héllo!" and "prompt_logprobs" not in choice
    assert choice["logprobs"] == {
        "tokens": ["h", "bytes:\\xc3", "bytes:\\xa9", "l", "l", "o", "!"],
        "token_logprobs": [None, -1, -2, -3, -4, -5, -0.5],
        "top_logprobs": [None, {"bytes:\\xc3": -1, "a": -1}, {"bytes:\\xa9": -2, "a": -2}]
        + [{token: -p, "a": -p} for p, token in ((3, "l"), (4, "l"), (5, "o"))]
        + [{"!": -0.5}],
        # A token that completes a character begins at that character.
        "text_offset": [0, 1, 1, 2, 3, 4, 5],
    }


@pytest.mark.parametrize("prompt", [PROMPT, IDS, [IDS, IDS]])
def test_nothing_but_the_prompt(prompt: Any) -> None:
    body = answer(prompt=prompt, echo=True, logprobs=0, max_tokens=0)
    for choice in body["choices"]:
        assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
        assert choice["logprobs"]["token_logprobs"] == [None, -1, -2, -3, -4, -5]
        assert [len(values) for values in choice["logprobs"].values()] == [6] * 4
    num_tokens = 6 * len(body["choices"])
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (num_tokens, 0)


def test_a_prompt_of_one_token_has_none() -> None:
    body = answer(prompt="h", echo=True, logprobs=1, prompt_logprobs=1, max_tokens=0)
    assert body["choices"][0]["prompt_logprobs"] == [None]
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None]


def test_a_stream_s_first_event_has_the_prompt_s() -> None:
    stream, _ = ask(prompt=PROMPT, echo=True, logprobs=1, stream=True)
    first, *others = [event.choice for event in stream.events]
    assert first["text"] == "héllo!" and len(first["logprobs"]["tokens"]) == 7
    assert all(choice["logprobs"] is None for choice in others) and stream.is_done
    assert not any(event.id for event in stream.events), "such a stream cannot be gone on with"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1, "stream": True, "n": 2}, "n"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
    ],
)
def test_what_is_refused(body: dict[str, Any], param: str) -> None:
    stream, requests = ask(prompt=PROMPT, **body)
    assert (stream.status, stream.error["param"], requests) == (400, param, [])


def test_one_request_may_not_ask_for_too_many() -> None:
    prompts = [[1] * 390] * 128
    assert 128 * 390 * 21 > 17 * 2 * 390 * 21 > MAX_PROMPT_LOGPROBS > 16 * 2 * 390 * 21 > 3 * 390 * 21
    stream, _ = ask(prompt=prompts, prompt_logprobs=20)
    assert stream.status == 400 and stream.error["param"] == "prompt_logprobs"
    assert f"one request may ask for {MAX_PROMPT_LOGPROBS}" in stream.error["message"]
    assert len(answer(prompt=prompts[:3], prompt_logprobs=20)["choices"]) == 3
    # Each output repeats its prompt's, in each requested form.
    shown = {"prompt": prompts[0], "prompt_logprobs": 20, "echo": True, "logprobs": 20}
    assert ask(**shown, n=16)[0].status == 200
    assert ask(**shown, n=17)[0].status == 400


def test_others_have_their_turn_while_they_are_written() -> None:
    num_tokens, num_top = 3000, 20
    logprobs = PromptLogprobs(num_tokens)
    prompt = Prefill("r", 0, (1,) * num_tokens, (), SamplingParams(1, num_prompt_logprobs=num_top), "d")
    logprobs.append(scored(prompt, 1, num_tokens).logprobs)
    texts = PromptTexts(
        ByteTokenizer(),  # type: ignore[arg-type]
        chr,
        TokenizedPrompt(tuple(prompt.prompt_ids), {}),
        WantedLogprobs(num_top, num_top),
    )

    async def turns_during(work: Awaitable[object]) -> int:
        num_turns = 0
        task = asyncio.ensure_future(work)
        while not task.done():
            num_turns += 1
            await asyncio.sleep(0)
        return num_turns

    for write in (texts.listed, texts.echoed):
        assert asyncio.run(turns_during(write(logprobs))) >= num_tokens * (num_top + 1) / PIECE_ENTRIES
        assert asyncio.run(turns_during(write(logprobs))) < 5, "it is written once"
