"""A client over HTTP that goes on with a stream, at any router, with scripted workers that keep records."""

import asyncio
from typing import Any

import pytest

from router.errors import InvalidRequestError
from router.frontends.openai.resumable import HEADER, EventId
from tandem.messages import Admit, Prefill
from tests.fakes.http_cluster import KEYS, PROMPT, HttpCluster, Stream
from tests.fakes.router_harness import run, settle

COMPLETION = {"prompt": PROMPT, "stream": True, "max_tokens": 9}
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "stream": True, "max_tokens": 9}


async def undisturbed(output: bytes, body: dict[str, Any], tokenizer: Any = None, step: int = 1) -> Stream:
    cluster = HttpCluster(output, tokenizer=tokenizer)
    call = cluster.routers[0].post(body)
    await cluster.serve(len(output), step)
    stream = await call.finish()
    assert stream.status == 200 and stream.is_done
    return stream


async def begun(cluster: HttpCluster, body: dict[str, Any], num_tokens: int) -> Stream:
    """Served by the first router up to there, when the connection breaks."""
    call = cluster.routers[0].post(body)
    await cluster.serve(num_tokens)
    return await call.leave()


def together(*parts: list[Any]) -> dict[str, Any]:
    """What a client makes of the events of a stream and of those that it got later."""
    events = [event for part in parts for event in part]
    finishes = [e.choice["finish_reason"] for e in events if e.content["choices"] and e.choice["finish_reason"]]
    usages = [e.content["usage"] for e in events if e.content.get("usage")]
    roles = [e for e in events if e.content["choices"] and e.choice.get("delta", {}).get("role")]
    return {
        "text": "".join(event.text for event in events),
        "finishes": finishes,
        "usages": usages,
        "roles": len(roles),
    }


@run
async def test_the_second_router_carries_on_where_the_text_ends() -> None:
    cluster = HttpCluster(b"Hello, you")
    first = await begun(cluster, COMPLETION, 5)
    assert first.text == "Hello" and len({event.id.partition(".")[0] for event in first.events}) == 1
    call = cluster.routers[1].post(COMPLETION, first.events[-1].id)
    await settle()
    before, after = cluster.d.of(Admit)
    # As in every further attempt: the same seed, the same limit, the same age; what is there is fixed.
    assert (bytes(after.prompt_ids), bytes(after.output_ids)) == (b"hi", b"Hello")
    assert (after.sampling, after.arrival_ns) == (before.sampling, before.arrival_ns)
    assert cluster.p.of(Prefill)[-1].arrival_ns == before.arrival_ns
    await cluster.serve(9)
    second = await call.finish()
    assert second.text == ", yo" and second.is_done
    assert second.events[-1].choice["finish_reason"] == "length"
    assert {(e.content["id"], e.content["created"]) for e in (*first.events, *second.events)} == {
        (first.events[0].content["id"], first.events[0].content["created"])
    }
    assert cluster.routers[1].router.num_requests == 0
