"""POST /generate, as SGLang's benchmark uses it."""

import asyncio
import json
from typing import Any

import pytest

from tandem.messages import Admit
from tests.fakes.http_cluster import KEYS, HttpCluster
from tests.fakes.http_requests import HttpAnswer, http_request

OUTPUT = list(b"hello")


def generate(num_tokens: int = 5, output: list[int] = OUTPUT, **body: Any) -> tuple[HttpAnswer, list[Admit]]:
    async def run() -> tuple[HttpAnswer, list[Admit]]:
        cluster = HttpCluster(output, num_routers=1)
        call = asyncio.create_task(http_request(cluster.routers[0].app, "POST", "/generate", body, KEYS[0]))
        await asyncio.sleep(0.01)
        if cluster.d.of(Admit):
            await cluster.serve(num_tokens)
        return await call, cluster.d.of(Admit)

    return asyncio.run(run())


def meta(answer: Any, **expected: Any) -> bool:
    info = answer["meta_info"]
    return {name: info[name] for name in expected} == expected


def test_what_the_benchmark_sends() -> None:
    answer, [admit] = generate(
        text="hi",
        sampling_params={"temperature": 0.0, "max_new_tokens": 5, "ignore_eos": True},
        stream=True,
        lora_path="",
        return_logprob=False,
        logprob_start_len=-1,
    )
    assert admit.sampling.max_tokens == 5 and admit.sampling.is_greedy and not admit.sampling.stop_token_ids
    *events, done = answer.events
    assert done == "[DONE]"
    told = [json.loads(event) for event in events]
    # Each event has the whole text so far.
    assert [event["text"] for event in told if event["text"]][-1] == "hello"
    assert all("hello".startswith(event["text"]) for event in told)
    numbers = [event["meta_info"]["completion_tokens"] for event in told]
    assert numbers == sorted(numbers) and numbers[-1] == 5
    assert all(event["meta_info"]["finish_reason"] is None for event in told[:-1])
    assert 0 < told[-1]["meta_info"]["e2e_latency"] < 60 and "e2e_latency" not in told[0]["meta_info"]
    assert meta(told[-1], finish_reason={"type": "length", "length": 5}, prompt_tokens=2)


def test_token_ids_and_an_answer_in_one_piece() -> None:
    sampling = {"max_new_tokens": 9, "min_new_tokens": 2, "top_k": 5, "stop_token_ids": [ord("o")], "sampling_seed": 7}
    answer, [admit] = generate(input_ids=[1, 2, 3], sampling_params=sampling, rid="mine")
    assert admit.prompt_ids == (1, 2, 3)
    assert (admit.sampling.top_k, admit.sampling.min_tokens, admit.sampling.seed) == (5, 2, 7)
    assert answer.json["text"] == "hell"
    assert meta(answer.json, id="mine", finish_reason={"type": "stop"}, prompt_tokens=3, completion_tokens=5)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": "a", "return_logprob": True}, "return_logprob"),
        ({"text": "a", "sampling_params": {"n": 2}}, "sampling_params"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params"),
        ({"input_ids": [256]}, "prompt"),
        ({"text": ""}, "prompt"),
    ],
)
def test_what_is_refused(body: dict[str, Any], param: str) -> None:
    answer, admitted = generate(**body)
    assert (answer.status, answer.json["error"]["param"], admitted) == (400, param, [])


def test_an_error_on_the_way_is_told() -> None:
    async def run() -> HttpAnswer:
        cluster = HttpCluster(OUTPUT, num_routers=1)
        app = cluster.routers[0].app
        call = asyncio.create_task(http_request(app, "POST", "/generate", {"text": "hi", "stream": True}, KEYS[0]))
        await asyncio.sleep(0.01)
        await cluster.serve(2)
        cluster.routers[0].router.shut_down()
        return await call

    answer = asyncio.run(run())
    assert "shutting down" in json.loads(answer.events[-1])["error"]["message"]
