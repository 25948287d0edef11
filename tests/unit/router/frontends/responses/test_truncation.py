"""`truncation: auto` drops the oldest items, and only as many as needed."""

import asyncio
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tandem.messages import Admit
from tandem.router.frontends.responses.schema import Item
from tandem.router.frontends.responses.truncation import fitting
from tests.fakes import chat_templates
from tests.fakes.http_doors import call, cluster_of
from tests.fakes.router_harness import run

PATH = "/v1/responses"
ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def message(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


def called(number: int) -> list[dict[str, Any]]:
    use = {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}"}
    return [use, {"type": "function_call_output", "call_id": f"c{number}", "output": f"result-{number}"}]


def kept(items: list[dict[str, Any]], max_items: int) -> tuple[list[dict[str, Any]], int]:
    """Returns the items left if so many fit, and the number of tries."""
    num_tries = 0

    async def fits(tried: Sequence[Item]) -> bool:
        nonlocal num_tries
        num_tries += 1
        return len(tried) <= max_items

    found = asyncio.run(fitting(ITEMS.validate_python(items), fits))
    return [item.model_dump(exclude_none=True) for item in found], num_tries


def test_the_oldest_go_first() -> None:
    talk = [message("developer", "rules"), *(message("user", str(number)) for number in range(6))]
    assert kept(talk, 10) == (talk, 1)
    assert kept(talk, 4)[0] == [talk[0], *talk[4:]]
    # The last user message stays, whatever its length.
    assert kept(talk, 0)[0] == [talk[0], talk[-1]]


def test_a_result_goes_with_its_call() -> None:
    talk = [message("user", "a"), *called(1), *called(2), message("user", "b"), *called(3)]
    assert kept(talk, 7)[0] == talk[1:]
    assert kept(talk, 6)[0] == talk[3:]
    assert kept(talk, 1)[0] == talk[5:]


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_few_tries_find_almost_the_longest_end(num_items: int, max_items: int) -> None:
    talk = [message("user", str(number)) for number in range(num_items)]
    found, num_tries = kept(talk, max_items)
    assert found == talk[len(talk) - len(found) :]
    # A chat has at most 2,048 messages.
    best = min(num_items, max_items, 2047)
    assert best - -(-num_items // 256) <= len(found) <= best
    assert num_tries <= 10


@run
async def test_a_conversation_is_cut_to_the_models_length() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.")
    talk = [message("user" if number % 2 == 0 else "assistant", f"<{number}> " + "x" * 990) for number in range(15)]
    refused = await call(cluster, PATH, {"input": talk})
    assert (refused.status, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    for limit, oldest in ((None, 9), (5000, 13)):
        body = {"input": talk, "truncation": "auto", "max_output_tokens": limit, "instructions": "Be brief."}
        response = (await call(cluster, PATH, body)).json()
        assert (response["truncation"], response["status"]) == ("auto", "completed")
        tokenizer = chat_templates.tokenizer(chat_templates.QWEN25)
        prompt = b"".join(map(tokenizer.token_piece, cluster.d.of(Admit)[-1].prompt_ids)).decode()
        assert "Be brief." in prompt
        assert [number for number in range(15) if f"<{number}> " in prompt] == list(range(oldest, 15))
    # What was cut is still part of what is kept.
    listed = await call(cluster, f"{PATH}/{response['id']}/input_items", method="GET", query="limit=100")
    assert len(listed.json()["data"]) == 15
