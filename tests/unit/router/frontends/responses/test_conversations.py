"""OpenAI's Conversations API, and responses in a conversation."""

from typing import Any

import pytest

from tandem.messages import Admit
from tests.fakes import chat_templates
from tests.fakes.http_cluster import KEYS, HttpCluster
from tests.fakes.http_doors import call, cluster_of
from tests.fakes.router_harness import run

PATH = "/v1/conversations"
OTHER = {"authorization": f"Bearer {KEYS[1]}"}


async def made(cluster: HttpCluster, **fields: Any) -> dict[str, Any]:
    answer = await call(cluster, PATH, fields)
    assert answer.status == 200, answer.body
    return answer.json()


async def texts(cluster: HttpCluster, conversation_id: str, query: str = "order=asc&limit=100") -> list[str]:
    listed = await call(cluster, f"{PATH}/{conversation_id}/items", method="GET", query=query)
    return [item["content"][0]["text"] for item in listed.json()["data"]]


def prompt_of(cluster: HttpCluster) -> str:
    tokenizer = chat_templates.tokenizer(chat_templates.QWEN25)
    return b"".join(map(tokenizer.token_piece, cluster.d.of(Admit)[-1].prompt_ids)).decode()


@run
async def test_responses_add_to_their_conversation() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.")
    conversation = await made(cluster, items=[{"role": "user", "content": "before"}], metadata={"topic": "x"})
    assert conversation["object"] == "conversation" and conversation["metadata"] == {"topic": "x"}
    name = conversation["id"]
    for number, named in enumerate((name, {"id": name}), 1):
        body = {"input": f"turn {number}", "conversation": named, "store": number == 1, "stream": number == 2}
        answer = await call(cluster, "/v1/responses", body)
        response = answer.events[-1][1]["response"] if number == 2 else answer.json()
        assert response["conversation"] == {"id": name}
    expected = ["before", "turn 1", "Hello.", "turn 2", "Hello."]
    assert await texts(cluster, name) == expected
    prompt = prompt_of(cluster)
    assert [text for text in ("before", "turn 1", "turn 2") if text in prompt] == ["before", "turn 1", "turn 2"]
    assert await texts(cluster, name, "limit=2") == ["Hello.", "turn 2"]
    # A response that was stored continues what was there at its time.
    listed = await call(cluster, f"{PATH}/{name}/items", method="GET")
    item = listed.json()["data"][0]
    assert (await call(cluster, f"{PATH}/{name}/items/{item['id']}", method="GET")).json() == item
    assert (await call(cluster, f"{PATH}/{name}/items/msg_x", method="GET")).status == 404


@run
async def test_a_stored_response_continues_what_was_there_at_its_time() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.")
    name = (await made(cluster))["id"]
    first = (await call(cluster, "/v1/responses", {"input": "one", "conversation": name})).json()
    await call(cluster, "/v1/responses", {"input": "two", "conversation": name})
    await call(cluster, "/v1/responses", {"input": "branch", "previous_response_id": first["id"]})
    prompt = prompt_of(cluster)
    assert prompt.count("one") == 1 and "two" not in prompt and prompt.count("Hello.") == 1
    # It outlives the conversation, and every byte goes with the last of both.
    assert (await call(cluster, f"{PATH}/{name}", method="DELETE")).json() == {
        "id": name,
        "object": "conversation.deleted",
        "deleted": True,
    }
    assert (await call(cluster, f"{PATH}/{name}", method="GET")).status == 404
    assert (await call(cluster, "/v1/responses", {"input": "x", "previous_response_id": first["id"]})).status == 200


@run
async def test_nothing_stays_of_a_conversation_that_is_forgotten() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.")
    name = (await made(cluster, items=[{"role": "user", "content": "x" * 100}]))["id"]
    body = {"input": "one", "conversation": name, "store": False}
    assert (await call(cluster, "/v1/responses", body)).status == 200
    await call(cluster, f"{PATH}/{name}", method="DELETE")
    metrics = (await call(cluster, "/metrics", method="GET")).body
    assert b"tandem_kept_responses 0.0" in metrics and b"tandem_kept_responses_bytes 0.0" in metrics


@run
async def test_it_is_changed_by_its_client() -> None:
    cluster = cluster_of(chat_templates.QWEN25, "Hello.")
    name = (await made(cluster))["id"]
    changed = await call(cluster, f"{PATH}/{name}", {"metadata": {"topic": "y"}})
    assert changed.json()["metadata"] == {"topic": "y"}
    assert (await call(cluster, f"{PATH}/{name}", method="GET")).json() == changed.json()
    added = await call(cluster, f"{PATH}/{name}/items", {"items": [{"role": "user", "content": "added"}]})
    assert added.json()["data"][0]["content"] == [{"type": "input_text", "text": "added"}]
    assert await texts(cluster, name) == ["added"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "", None),
        ("DELETE", "", None),
        ("POST", "", {"metadata": {}}),
        ("GET", "/items", None),
        ("POST", "/items", {"items": [{"role": "user", "content": "x"}]}),
    ],
)
def test_to_another_key_it_is_unknown(method: str, path: str, body: Any) -> None:
    @run
    async def scenario() -> None:
        cluster = cluster_of(chat_templates.QWEN25, "Hello.")
        name = (await made(cluster))["id"]
        theirs = await call(cluster, f"{PATH}/{name}{path}", body, method=method, headers=OTHER)
        assert (theirs.status, theirs.json()["error"]["code"]) == (404, "conversation_not_found")
        answer = await call(cluster, "/v1/responses", {"input": "x", "conversation": name}, headers=OTHER)
        assert (answer.status, answer.json()["error"]["code"]) == (404, "conversation_not_found")
        # Ids of one kind are none of the other.
        assert (await call(cluster, f"/v1/responses/{name}", method="GET")).status == 404
        assert (await call(cluster, f"/v1/responses/{name}", method="DELETE")).status == 404
        response = (await call(cluster, "/v1/responses", {"input": "x"})).json()
        assert (await call(cluster, f"{PATH}/{response['id']}{path}", body, method=method)).status == 404
        refused = await call(cluster, "/v1/responses", {"input": "x", "conversation": response["id"]})
        assert refused.status == 404
        assert await texts(cluster, name) == []

    scenario()
