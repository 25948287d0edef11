"""Responses that nobody waits for: polled, cancelled, kept."""

import asyncio
from typing import Any

import pytest

from tandem.messages import Admit
from tandem.router.errors import UnavailableError
from tandem.router.frontends.response_exchange import ResponseExchange
from tests.fakes import chat_templates
from tests.fakes.http_cluster import KEYS, HttpCluster
from tests.fakes.http_doors import DoorAnswer, call, cluster_of
from tests.fakes.router_harness import run, settle

PATH = "/v1/responses"
OTHER = {"authorization": f"Bearer {KEYS[1]}"}


async def begin(cluster: HttpCluster, **fields: Any) -> dict[str, Any]:
    answer = await call(cluster, PATH, {"input": "hi", "background": True, **fields})
    assert answer.status == 200, answer.body
    await settle()
    return answer.json()


async def poll(cluster: HttpCluster, response_id: str, **how: Any) -> DoorAnswer:
    return await call(cluster, f"{PATH}/{response_id}", method="GET", **how)


async def cancel(cluster: HttpCluster, response_id: str, **how: Any) -> DoorAnswer:
    return await call(cluster, f"{PATH}/{response_id}/cancel", {}, **how)


async def metric(cluster: HttpCluster, name: str) -> float:
    lines = (await call(cluster, "/metrics", method="GET")).body.decode().splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


@run
async def test_it_is_polled_until_its_end() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.")
    created = await begin(cluster, metadata={"a": "b"})
    assert (created["status"], created["background"], created["output"]) == ("queued", True, [])
    assert (await poll(cluster, created["id"])).json()["status"] == "queued"
    await cluster.serve(3)
    begun = (await poll(cluster, created["id"])).json()
    assert (begun["status"], begun["usage"], begun["metadata"]) == ("in_progress", None, {"a": "b"})
    assert await metric(cluster, "tandem_background_responses") == 1
    assert (await poll(cluster, created["id"], headers=OTHER)).status == 404
    listed = await call(cluster, f"{PATH}/{created['id']}/input_items", method="GET")
    assert listed.json()["data"][0]["content"][0]["text"] == "hi"
    early = await call(cluster, PATH, {"input": "more", "previous_response_id": created["id"]})
    assert (early.status, early.json()["error"]["message"]) == (
        400,
        f"{created['id']} is in progress: wait for its end",
    )
    await cluster.serve(len(cluster.output))
    ended = (await poll(cluster, created["id"])).json()
    assert (ended["status"], ended["output"][0]["content"][0]["text"]) == ("completed", "Hello.")
    assert ended["created_at"] == created["created_at"] and ended["usage"]["output_tokens"] == 7
    assert await metric(cluster, "tandem_background_responses") == 0
    streamed = await call(cluster, f"{PATH}/{created['id']}", method="GET", query="stream=true")
    assert streamed.json()["error"]["message"] == "a kept response is not streamed: leave out stream"
    # It goes on like any other.
    assert (await call(cluster, PATH, {"input": "more", "previous_response_id": created["id"]})).status == 200


@run
async def test_it_is_cancelled_and_frees_what_it_holds() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.", max_requests_per_key=1)
    created = await begin(cluster)
    await cluster.serve(3)
    # It counts as a request of its key.
    assert (await call(cluster, PATH, {"input": "hi", "background": True})).status == 429
    assert (await cancel(cluster, created["id"], headers=OTHER)).status == 404
    cancelled = (await cancel(cluster, created["id"])).json()
    assert (cancelled["status"], cancelled["output"][0]["content"][0]["text"]) == ("cancelled", "Hel")
    assert cancelled["output"][0]["status"] == "incomplete"
    assert (await poll(cluster, created["id"])).json() == cancelled
    assert (await cancel(cluster, created["id"])).json() == cancelled
    router = cluster.routers[0].router
    assert router.num_requests == 0
    assert cluster.routers[0].frontend.access.num_requests_by_key() == {}
    # One that was cancelled before its first token is kept too.
    again = await begin(cluster)
    assert (await cancel(cluster, again["id"])).json()["status"] == "cancelled"
    # One that ended stays as it is; one that a client waited for is not cancelled.
    whole = await call(cluster, PATH, {"input": "hi"})
    refused = await cancel(cluster, whole.json()["id"])
    assert (refused.status, refused.json()["error"]["param"]) == (400, "response_id")
    assert (await cancel(cluster, "conv_1")).status == 404


@run
async def test_one_that_is_deleted_ends() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.")
    created = await begin(cluster)
    await cluster.serve(3)
    assert (await call(cluster, f"{PATH}/{created['id']}", method="DELETE")).json()["deleted"]
    assert (await poll(cluster, created["id"])).status == 404
    assert cluster.routers[0].router.num_requests == 0
    assert await metric(cluster, "tandem_kept_responses_bytes") == 0


@run
async def test_a_failure_is_kept() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.", request_timeout_s=5.0)
    created = await begin(cluster)
    await cluster.serve(3)
    cluster.routers[0].clock.advance(6.0)
    cluster.routers[0].router.check_deadlines()
    await settle()
    failed = (await poll(cluster, created["id"])).json()
    assert (failed["status"], failed["error"]["code"]) == ("failed", "timeout")
    assert failed["output"][0]["content"][0]["text"] == "Hel"


@run
async def test_bytes_are_in_hand_until_its_end() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.", max_body_bytes=3000, max_bytes_in_hand=6000)
    created = await begin(cluster, input="x" * 2000)
    refused = await call(cluster, PATH, {"input": "x" * 2000})
    assert (refused.status, refused.json()["error"]["code"]) == (429, "overloaded")
    await cancel(cluster, created["id"])
    assert (await call(cluster, PATH, {"input": "x" * 2000})).status == 200
    assert len(cluster.d.of(Admit)) == 2


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_one_whose_conversation_cannot_be_added_to_is_kept_once(
    monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    async def extend(*_: Any, **__: Any) -> bool:
        if is_cancelled:
            await asyncio.Future()
        raise UnavailableError("the router that keeps it does not answer")

    monkeypatch.setattr(ResponseExchange, "extend", extend)

    @run
    async def scenario() -> None:
        cluster = cluster_of(chat_templates.QWEN25, "Hello.")
        conversation = (await call(cluster, "/v1/conversations", {})).json()["id"]
        created = await begin(cluster, conversation=conversation)
        await cluster.serve(len(cluster.output))
        await settle()
        if is_cancelled:
            await cancel(cluster, created["id"])
        ended = (await poll(cluster, created["id"])).json()
        assert ended["status"] == ("cancelled" if is_cancelled else "failed")
        assert ended["output"][0]["content"][0]["text"] == "Hello."
        assert await metric(cluster, "tandem_kept_responses") == 2
        for path in (f"{PATH}/{created['id']}", f"/v1/conversations/{conversation}"):
            assert (await call(cluster, path, method="DELETE")).json()["deleted"]
        assert await metric(cluster, "tandem_kept_responses") == 0
        assert await metric(cluster, "tandem_kept_responses_bytes") == 0

    scenario()
