"""HTTP routes for operators and benchmarks."""

import asyncio
import json
from dataclasses import asdict

from tandem import __version__
from tandem.messages import PROTOCOL_VERSION, CacheWasReset, ResetCache, StoreJoin
from tandem.router.frontends.openai.operation import SHOWN
from tandem.router.workers.sizes import ClusterSize, KindSize
from tandem.router.workers.store_registry import RESET_LIMIT_S
from tests.fakes.http_cluster import KEYS, HttpCluster
from tests.fakes.http_requests import HttpAnswer, http_request
from tests.fakes.router_harness import run, settle

SECRETS = (*KEYS, "secret", "nowhere")


async def ask(cluster: HttpCluster, method: str, path: str, key: str = KEYS[0]) -> HttpAnswer:
    return await http_request(cluster.routers[0].app, method, path, key=key)


@run
async def test_a_ping_is_answered_to_everybody() -> None:
    cluster = HttpCluster([1])
    for method in ("GET", "POST"):
        assert (await ask(cluster, method, "/ping", key="")).json == {"status": "ok"}
    for path in ("/version", "/load", "/server_info"):
        assert (await ask(cluster, "GET", path, key="")).status == 401


@run
async def test_the_version_and_the_load() -> None:
    cluster = HttpCluster([1])
    assert (await ask(cluster, "GET", "/version")).json == {"version": __version__}
    assert (await ask(cluster, "GET", "/load")).json == {"server_load": 0}
    call = cluster.routers[0].post({"prompt": "hi"})
    await settle()
    assert (await ask(cluster, "GET", "/load")).json == {"server_load": 1}
    await call.leave()


@run
async def test_the_server_tells_no_secrets() -> None:
    cluster = HttpCluster([1])
    answer = (await ask(cluster, "GET", "/server_info")).json
    assert answer["ready"] and answer["model"] == "fake"
    assert [(w["worker_id"], w["role"]) for w in answer["workers"]] == [("p", "prefill"), ("d", "decode")]
    assert set(answer["config"]) == set(SHOWN)
    assert not any(secret in json.dumps(answer) for secret in SECRETS)


@run
async def test_numbers_that_follow_the_load_and_the_routers_that_run() -> None:
    cluster = HttpCluster([1])
    assert (await ask(cluster, "GET", "/server_info")).json["sizes"] == []
    size = KindSize(1, 8, target=3, ready=1, starting=2, leaving=0, start_s=40.0, reason="queue")
    cluster.routers[0].router.exchange_leans({}, ClusterSize({"any": size}, routers=("r1",)))
    answer = (await ask(cluster, "GET", "/server_info")).json
    assert answer["sizes"] == [{"kind": "any", **asdict(size)}]


@run
async def test_caches_are_reset_where_that_is_allowed() -> None:
    cluster = HttpCluster([1], allow_cache_reset=True)
    assert (await ask(cluster, "POST", "/reset_prefix_cache", key="wrong")).status == 401
    assert not cluster.p.of(ResetCache)
    assert (await ask(cluster, "POST", "/reset_prefix_cache")).json == {"num_workers": 2}
    assert cluster.p.of(ResetCache) == cluster.d.of(ResetCache) == [ResetCache()]
    assert (await ask(HttpCluster([1]), "POST", "/reset_prefix_cache")).status == 404


@run
async def test_later_resets_do_not_delay_the_answer_to_the_first() -> None:
    cluster = HttpCluster([1], allow_cache_reset=True)
    stores = cluster.routers[0].router.stores
    store = stores.connect(StoreJoin(PROTOCOL_VERSION, "store-0", "a", "host"), lambda messages: None, lambda _: None)
    calls = []
    for _ in range(2):
        calls.append(asyncio.create_task(ask(cluster, "POST", "/reset_prefix_cache")))
        await settle()
        cluster.routers[0].clock.advance(RESET_LIMIT_S / 2)
    assert (await calls[0]).status == 503
    stores.receive(store, CacheWasReset(2))
    assert (await calls[1]).status == 200


@run
async def test_a_reset_that_does_not_last_is_an_error() -> None:
    cluster = HttpCluster([1], allow_cache_reset=True)
    stores = cluster.routers[0].router.stores
    store = stores.connect(StoreJoin(PROTOCOL_VERSION, "store-0", "a", "host"), lambda messages: None, lambda _: None)
    call = asyncio.create_task(ask(cluster, "POST", "/reset_prefix_cache"))
    await settle()
    stores.receive(store, CacheWasReset(1, "Read-only file system"))
    cluster.routers[0].clock.advance(RESET_LIMIT_S)
    answer = await call
    assert answer.status == 503
    assert answer.json["error"]["message"] == (
        "page stores that may still find pages of before the reset: store-0 (Read-only file system)"
    )


@run
async def test_a_model_of_several_names() -> None:
    cluster = HttpCluster([33], other_model_names=("org/alias",))
    listed = (await ask(cluster, "GET", "/v1/models")).json["data"]
    assert [model["id"] for model in listed] == ["fake", "org/alias"]
    assert all((m["root"], m["parent"], m["max_model_len"]) == ("fake", None, 400) for m in listed)
    assert (await ask(cluster, "GET", "/v1/models/org/alias")).json["id"] == "org/alias"
    for name in ("fake", "org/alias"):
        call = cluster.routers[0].post({"model": name, "prompt": "hi", "max_tokens": 1})
        await cluster.serve(1)
        # Answers show the first name.
        assert json.loads((await call.finish()).body)["model"] == "fake"
    answer = await ask(cluster, "GET", "/v1/models/other")
    assert answer.status == 404 and answer.json["error"]["code"] == "model_not_found"
