"""The longest turn of the router's loop under the largest requests."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tandem.messages import Admit, Finished, FirstToken, TokenEvent, Tokens
from tandem.prompt_logprobs import PackedLogprobs
from tandem.router.frontends.base import MAX_PROMPT_LOGPROBS
from tandem.router.frontends.grpc_responses import write_scored
from tandem.router.frontends.openai.body import MAX_STRINGS
from tandem.router.requests.prompt_logprobs import PromptLogprobs
from tandem.router.text.prompt_encoder import MAX_MESSAGES
from tandem.sampling_params import TokenLogprobs, TopLogprob
from tandem.v1 import inference_pb2 as pb
from tests.fakes import chat_templates
from tests.fakes.http_cluster import KEYS, HttpCluster
from tests.fakes.http_doors import DoorAnswer
from tests.fakes.loop_watch import LoopWatch, best_of_three, check_turn
from tests.unit.router.frontends.test_grpc import Context

# CPU time of the loop's thread. A turn takes about 2 ms; without threads and slices each of these takes over 10.
MAX_TURN_S = 0.007
# For work in proportion to the answer's text.
MAX_ANSWER_TURN_S = 0.025
MAX_MODEL_LEN = 1_000_000
NUM_LOGPROBS = 20
NUM_OUTPUT_TOKENS = 3000
MESSAGES = [{"role": "user", "content": "hi"}]


def cluster(num_tokens: int = 3) -> HttpCluster:
    tokenizer = chat_templates.tokenizer(chat_templates.QWEN25, chat_templates.SPECIAL)
    return HttpCluster(
        [*tokenizer.tokenize("a" * num_tokens, False).ids, chat_templates.EOS],
        num_routers=1,
        tokenizer=tokenizer,
        max_model_len=MAX_MODEL_LEN,
    )


async def ask(served: HttpCluster, path: str, body: dict[str, Any] | None, watch: LoopWatch | None = None) -> Any:
    """Serves one request. Args: watch: starts once the request's bytes are made."""
    content = b"" if body is None else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {KEYS[0]}", "content-type": "application/json"}
    if body is not None:
        headers["content-length"] = str(len(content))
    scope = {
        "type": "http",
        "method": "GET" if body is None else "POST",
        "path": path,
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "state": {},
    }
    answer, messages = DoorAnswer(), [{"type": "http.request", "body": content}]

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Future()

    async def send(message: Any) -> None:
        answer.status = message.get("status", answer.status)
        answer.body += message.get("body", b"")

    async def run() -> None:
        num_served = len(served.d.of(Admit))
        task = asyncio.ensure_future(served.routers[0].app(scope, receive, send))
        while not task.done():
            if len(served.d.of(Admit)) > num_served:
                num_served += 1
                await serve(served)
            await asyncio.sleep(0.0005)
        await task

    served.routers[0].app  # noqa: B018
    if watch is None:
        await run()
    else:
        async with watch:
            await run()
    return answer


async def serve(served: HttpCluster) -> None:
    """Answers the latest request, with log probabilities if it wants them."""
    admit: Admit = served.d.of(Admit)[-1]
    num_top = admit.sampling.num_logprobs
    if num_top is None:
        await served.serve(len(served.output))
        return
    key, output = (admit.request_id, admit.attempt), served.output[: admit.sampling.max_tokens]
    logprobs = TokenLogprobs(-0.5, tuple(TopLogprob(number, -0.5) for number in range(num_top)))
    served.p.say(FirstToken(*key, 0, output[0], "", 0, 1, logprobs=(logprobs,)))
    for index in range(1, len(output), 100):
        part = tuple(output[index : index + 100])
        served.d.say(Tokens((TokenEvent(*key, index, part, (logprobs,) * len(part)),)))
        await asyncio.sleep(0)
    served.d.say(Finished(*key, "length", len(output), 0, 1))


def large_requests() -> Iterator[Any]:
    def case(name: str, path: str, **body: Any) -> Any:
        return pytest.param(path, body, id=name)

    turns = [{"role": ("user", "assistant")[number % 2], "content": "hi", "unknown": 1} for number in range(2048)]
    assert len(turns) == MAX_MESSAGES
    yield case("chat", "/v1/chat/completions", messages=turns, max_tokens=1)
    yield case("tokenize", "/tokenize", messages=turns)
    yield case("responses", "/v1/responses", input=turns, max_output_tokens=1)
    parts = [{"type": "text", "text": "a", "unknown": 1} for _ in range(4)]
    many_parts = [{"role": "user", "content": parts} for _ in range(MAX_STRINGS // 30)]
    yield case("parts", "/v1/chat/completions", messages=many_parts, max_tokens=1)
    blocks = [{"type": "text", "text": "a", "unknown": 1} for _ in range(800)]
    many_blocks = [{"role": "user", "content": blocks} for _ in range(8)]
    yield case("anthropic", "/v1/messages", model="fake", messages=many_blocks, max_tokens=1)
    properties = {f"p{number}": {"type": "string"} for number in range(70)}
    functions = [
        {"name": f"f{number}", "parameters": {"type": "object", "properties": properties}} for number in range(100)
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    yield case("tools", "/v1/chat/completions", messages=MESSAGES, tools=tools, max_tokens=1)


@pytest.mark.parametrize(("path", "body"), list(large_requests()))
def test_no_large_request_holds_the_loop(path: str, body: dict[str, Any]) -> None:
    async def scenario() -> None:
        served, watch = cluster(), LoopWatch()
        await ask(served, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})
        answer = await ask(served, path, body, watch)
        print(watch)
        assert answer.status == 200, answer.body[:300]
        check_turn(watch, MAX_TURN_S)

    best_of_three(scenario)


def test_no_long_conversation_holds_the_loop() -> None:
    async def scenario() -> None:
        served, previous = cluster(), None
        items = [{"role": ("user", "assistant")[number % 2], "content": "hi"} for number in range(681)]
        for _ in range(3):
            watch = LoopWatch()
            body = {"input": items, "max_output_tokens": 1, "previous_response_id": previous}
            answer = await ask(served, "/v1/responses", body, watch)
            assert answer.status == 200, answer.body[:300]
            previous = answer.json()["id"]
            check_turn(watch, MAX_TURN_S)
        print(watch)

    best_of_three(scenario)


def test_a_conversation_without_end_is_refused() -> None:
    async def scenario() -> None:
        served, previous = cluster(), None
        items = [{"type": "reasoning", "id": "r", "summary": []}] * 2000 + [{"role": "user", "content": "hi"}]
        for number in range(6):
            watch = LoopWatch()
            body = {"input": items, "max_output_tokens": 1, "previous_response_id": previous}
            answer = await ask(served, "/v1/responses", body, watch)
            check_turn(watch, MAX_TURN_S)
            if number == 5:
                break
            assert answer.status == 200, answer.body[:300]
            previous = answer.json()["id"]
        print(watch)
        error = answer.json()["error"]
        assert (answer.status, error["param"]) == (400, "previous_response_id")
        assert error["message"].startswith("the kept conversation has 10010 items; at most 8192 are taken")

    best_of_three(scenario)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {"messages": MESSAGES, "logprobs": True, "top_logprobs": NUM_LOGPROBS},
        ),
        ("/v1/completions", {"prompt": "hi", "logprobs": NUM_LOGPROBS}),
        ("/v1/completions", {"prompt": "hi", "logprobs": NUM_LOGPROBS, "stream": True}),
    ],
)
def test_log_probabilities_of_a_long_output_do_not_hold_the_loop(path: str, body: dict[str, Any]) -> None:
    async def scenario() -> None:
        served, watch = cluster(NUM_OUTPUT_TOKENS), LoopWatch()
        answer = await ask(served, path, {**body, "max_tokens": NUM_OUTPUT_TOKENS}, watch)
        print(watch)
        assert answer.status == 200, answer.body[:300]
        assert answer.body.count(b'"token') > 0 and len(answer.body) > 150 * NUM_OUTPUT_TOKENS
        check_turn(watch, MAX_ANSWER_TURN_S)

    best_of_three(scenario)


def test_log_probabilities_of_a_long_prompt_over_grpc_do_not_hold_the_loop() -> None:
    num_tokens = MAX_PROMPT_LOGPROBS // (NUM_LOGPROBS + 1)
    numbers, many = bytes(4 * num_tokens), bytes(4 * num_tokens * NUM_LOGPROBS)
    scored = PromptLogprobs(num_tokens + 1)
    scored.append(PackedLogprobs(1, NUM_LOGPROBS, numbers, numbers, many, many))

    async def scenario() -> None:
        watch, context = LoopWatch(), Context()
        async with watch:
            await write_scored(context, pb.GenerateResponse(index=1), scored)
        print(watch)
        (written,) = context.responses
        assert len(written.prompt_logprobs.top_logprobs) == num_tokens * NUM_LOGPROBS
        check_turn(watch, MAX_TURN_S)

    best_of_three(scenario)
