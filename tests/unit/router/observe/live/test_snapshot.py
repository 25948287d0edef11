import json
import time
from dataclasses import replace
from operator import itemgetter
from typing import Any

import pytest

from tandem.lifecycle import ENDED
from tandem.messages import NO_HITS, Heartbeat, LinkState, Shipped, TierHits, WorkerStats
from tandem.router.config import RouterAddresses
from tandem.router.observe.live.snapshot import MAX_LINKS, MAX_NEW_REQUESTS, SnapshotBuilder
from tandem.router.requests.tracker import RequestReport
from tandem.router.workers.peer_counts import RouterCounts
from tests.fakes.clock import FakeClock
from tests.fakes.router_harness import RouterHarness, first_token, run, settle
from tests.fakes.scripted_worker import ScriptedWorker

PROMPT = (104, 101, 108, 108, 111)
SECRETS: dict[str, Any] = {"api_keys": ("a-secret-key",), "cluster_token": "a-secret-token"}


def builder(h: RouterHarness) -> SnapshotBuilder:
    return SnapshotBuilder(h.router, h.config, FakeClock(5000.0))


def everything(frames: SnapshotBuilder) -> dict[str, Any]:
    return json.loads(frames.everything().seen_by(""))


async def serve(h: RouterHarness, *, loaded: TierHits = NO_HITS, **fields: Any) -> None:
    client = h.request(max_tokens=1, prompt_ids=PROMPT, **fields)
    await settle()
    first = first_token(client.tracker.request_id, 0, 0, 7, "length")
    h.p[0].say(replace(first, cached_len=loaded.total, loaded=loaded))
    await settle()


@run
async def test_workers_links_and_what_is_away() -> None:
    h = RouterHarness(num_decode=2, workers={"p0": "prefill", "d0": "decode", "d1": "decode", "d2": "decode"})
    stats = WorkerStats(
        3, 2, 100, 40, 30, 20, 10, shipped=(Shipped("tcp", 1, 50, "d0"), Shipped("nvlink", 2, 70, "d0"))
    )
    h.p[0].say(Heartbeat(1, stats))
    h.p[0].say(LinkState("d1", "d1-life", up=False, reason="it broke"))
    seen = everything(builder(h))
    assert [(w["id"], w["alive"]) for w in seen["workers"]] == [("p0", True), ("d0", True), ("d1", True), ("d2", False)]
    first = seen["workers"][0]
    shown = ("queued", "running", "pages", "free", "cached", "locked", "leased")
    assert [first[name] for name in shown] == [3, 2, 100, 40, 30, 20, 10]
    assert [(link["to"], link["up"], link["reason"], link["bytes"]) for link in seen["links"]] == [
        ("d0", True, "", 120),
        ("d1", False, "it broke", 0),
    ]
    # The transport opened later is in use.
    assert seen["links"][0]["transport"] == "nvlink"
    assert seen["ready"] and seen["routers"] == [{"id": "router-0", "alive": True, "requests_in_hand": 0, "queued": 0}]


@run
async def test_what_is_down_is_named() -> None:
    here = RouterAddresses("", "", "")
    planned = {"p0": "prefill", "d0": "decode", "d1": "decode"}
    h = RouterHarness(num_decode=2, workers=planned, routers={"router-0": here, "router-1": here})
    h.router.elsewhere.record("router-1", RouterCounts(0, 0))
    frames = builder(h)
    assert everything(frames)["down"] == []
    h.router.lose_worker(h.d[1].worker, "silent", "no heartbeat")
    h.router.elsewhere.forget("router-1")
    seen = everything(frames)
    # The others serve.
    assert (seen["ready"], seen["down"]) == (True, ["d1", "router-1"])
    h.router.set_workers({"p0": "prefill", "d0": "decode"})
    h.router.elsewhere.record("router-1", RouterCounts(0, 0))
    assert everything(frames)["down"] == []


@run
async def test_each_worker_has_a_host_and_links_a_rate_of_ten_seconds() -> None:
    h = RouterHarness(0, 1)
    worker = ScriptedWorker(h.router, "p0", "prefill", address="10.0.0.5:4000")
    worker.link_to("d0")
    frames = builder(h)
    for second in range(9):
        # One handover of 8 kB, long before the last frame.
        worker.say(Heartbeat(second, WorkerStats(shipped=(Shipped("tcp", 1, 8000 * (second > 1), "d0"),))))
        frames.sample()
        h.clock.advance(1.0)
    seen = everything(frames)
    assert [w["host"] for w in seen["workers"]] == ["10.0.0.5", "nowhere"]
    assert seen["links"][0]["bytes_per_s"] == 1000


@run
async def test_frame_of_many_links_has_the_broken_and_the_busiest() -> None:
    """All links of 1,000 workers would be megabytes a second."""
    h = RouterHarness(20, 20)
    h.p[3].say(LinkState("d4", "d4-life", up=False, reason="cut"))
    frames = builder(h)
    for second in range(3):
        for number in (5, 6):
            shipped = (Shipped("tcp", 1, 1000 * second * number, "d9"),)
            h.p[number].say(Heartbeat(second, WorkerStats(shipped=shipped)))
        frames.sample()
        h.clock.advance(1.0)
    seen = everything(frames)
    assert [(link["from"], link["to"], link["up"], link["bytes_per_s"]) for link in seen["links"]] == [
        ("p3", "d4", False, 0),
        ("p5", "d9", True, 5000),
        ("p6", "d9", True, 6000),
    ]
    assert seen["more_links"] == 397 and len(seen["links"]) <= MAX_LINKS
    few = everything(builder(RouterHarness(2, 2)))
    assert len(few["links"]) == 4 and few["more_links"] == 0


@run
async def test_workers_and_requests_have_cached_tokens_by_tier() -> None:
    h = RouterHarness()
    frames = builder(h)
    for second in range(5):
        loaded = WorkerStats(
            prefix_cached_tokens=60 * second, prefix_host_tokens=40 * second, prefix_peer_tokens=second
        )
        h.p[0].say(Heartbeat(second, loaded))
        frames.sample()
        h.clock.advance(1.0)
    await serve(h, loaded=TierHits(disk=2))
    seen = everything(frames)
    decode, prefill = sorted(seen["workers"], key=itemgetter("id"))
    assert prefill["cached_tokens_per_s"] == 60
    assert prefill["loaded_tokens_per_s"] == {"host": 40, "disk": 0, "peer": 1}
    # It has loaded nothing since its start.
    assert decode["loaded_tokens_per_s"] == {}
    assert seen["requests"][0]["loaded_tokens"] == {"host_tokens": 0, "disk_tokens": 2, "peer_tokens": 0}


@run
async def test_a_worker_of_both_roles_has_no_links() -> None:
    h = RouterHarness(num_prefill=0, num_decode=0)
    ScriptedWorker(h.router, "b0", "both")
    seen = everything(builder(h))
    assert seen["links"] == [] and seen["workers"][0]["role"] == "both"


@run
async def test_a_request_is_shown_without_what_it_says() -> None:
    h = RouterHarness(**SECRETS)
    await serve(h, session_id="a-secret-session", cache_namespace="a-secret-namespace", client_request_id="mine")
    text = builder(h).everything().seen_by("")
    (request,) = json.loads(text)["requests"]
    assert (request["client_id"], request["outcome"], request["prompt_tokens"]) == ("mine", "length", 5)
    assert (request["output_tokens"], request["attempts"], request["prefill"]) == (1, 1, "p0")
    assert sum(duration_ms for _, duration_ms in request["path"]) == pytest.approx(request["e2e_ms"], rel=0.01, abs=0.1)
    assert "secret" not in text and "104" not in json.dumps(request["path"])
    # All fields of a request: a new field may reveal something.
    assert set(request) == {
        *(
            "number",
            "ended_s",
            "id",
            "client_id",
            "outcome",
            "error",
            "prompt_tokens",
            "cached_tokens",
            "loaded_tokens",
            "output_tokens",
        ),
        *("attempts", "prefill", "decode", "ttft_ms", "e2e_ms", "path"),
    }


@pytest.mark.parametrize(
    ("config", "seen"),
    [
        ({"api_keys": ("one", "two")}, (["first"], ["second"])),
        # allow_tracing shows all keys' requests anyway.
        ({"api_keys": ("one", "two"), "allow_tracing": True}, (["first", "second"], ["first", "second"])),
    ],
)
def test_of_several_keys_each_sees_its_own_requests(config: dict[str, Any], seen: tuple[list[str], list[str]]) -> None:
    @run
    async def scenario() -> None:
        h = RouterHarness(**config)
        for name, key in (("first", "one"), ("second", "two")):
            tracker = h.request(client_request_id=name, key=key).tracker
            tracker.moments[ENDED] = 10**9
            h.router.live.ended.add(RequestReport(tracker, "stop", 4, 4, []))
        for frame in (builder(h).everything(), builder(h).changes()):
            texts = [frame.seen_by(key) for key in ("one", "two")]
            assert [[r["client_id"] for r in json.loads(text)["requests"]] for text in texts] == list(seen)
            assert not any('"one"' in text or '"two"' in text for text in texts)

    scenario()


@run
async def test_changes_are_what_is_new_since_the_last_telling() -> None:
    h = RouterHarness()
    frames = builder(h)
    frames.sample()
    await serve(h)
    frames.mark_told()
    frames.sample()
    await serve(h)
    h.router.lose_worker(h.d[0].worker, "silent", "gone")
    changes, whole = json.loads(frames.changes().seen_by("")), everything(frames)
    assert (changes["whole"], whole["whole"]) == (False, True)
    assert ([r["number"] for r in changes["requests"]], [r["number"] for r in whole["requests"]]) == ([2], [1, 2])
    assert ([p[0] for p in changes["points"]], [p[0] for p in whole["points"]]) == ([2], [1, 2])
    assert [entry["subject"] for entry in changes["journal"]] == ["d0"]
    assert len(whole["journal"]) > 1
    assert changes["workers"] == whole["workers"] and not changes["ready"]
    frames.mark_told()
    assert json.loads(frames.changes().seen_by(""))["requests"] == []


@run
async def test_of_many_that_end_within_a_second_the_last_are_told() -> None:
    h = RouterHarness()
    frames = builder(h)
    for _ in range(MAX_NEW_REQUESTS + 3):
        await serve(h)
    numbers = [request["number"] for request in json.loads(frames.changes().seen_by(""))["requests"]]
    assert numbers == list(range(4, MAX_NEW_REQUESTS + 4))


@run
async def test_times_to_first_token_are_there_before_the_request_has_ended() -> None:
    h = RouterHarness()
    frames = builder(h)
    client = h.request(prompt_ids=PROMPT)
    client.tracker.moments["received"] = time.time_ns() - 80_000_000
    await settle()
    h.p[0].say(first_token(client.tracker.request_id, 0, 0, 7))
    await settle()
    frames.sample()
    ((_, _, ttft_p50, *_),) = everything(frames)["points"]
    assert 75 <= ttft_p50 <= 10_000 and h.router.num_requests == 1
    await client.leave()


@run
async def test_numbers_are_those_of_all_routers_where_they_have_told() -> None:
    here = RouterAddresses("", "", "")
    h = RouterHarness(routers={"router-0": here, "router-1": here, "router-2": here})
    frames = builder(h)
    frames.sample()
    h.router.elsewhere.record("router-1", RouterCounts(7, 3))
    frames.sample()
    seen = everything(frames)
    assert (seen["requests_in_hand"], seen["queued"], seen["router"]["id"]) == (7, 3, "router-0")
    assert [(r["id"], r["alive"], r["requests_in_hand"]) for r in seen["routers"]] == [
        ("router-0", True, 0),
        ("router-1", True, 7),
        ("router-2", False, 0),
    ]
    assert seen["points"][-1][-2:] == [7, 3]
    h.router.elsewhere.forget("router-1")
    frames.sample()
    told = [(entry["subject"], entry["text"]) for entry in everything(frames)["journal"][-2:]]
    assert told == [("router-1", "answers"), ("router-1", "does not answer")]


@run
async def test_a_frame_costs_as_little_with_a_thousand_requests() -> None:
    """The bound is for a busy machine; about a tenth of it is usual."""
    h = RouterHarness(num_prefill=8, num_decode=8)
    for number, worker in enumerate([*h.p, *h.d]):
        shipped = tuple(Shipped("tcp", 1, 1, f"d{i}") for i in range(8)) if number < 8 else ()
        worker.say(Heartbeat(1, WorkerStats(shipped=shipped)))
    clients = [h.request(prompt_ids=PROMPT) for _ in range(1000)]
    await settle()
    frames = builder(h)
    spent = []
    for second in range(20):
        begun = time.perf_counter()
        frames.sample()
        frames.changes().seen_by("")
        frames.mark_told()
        spent.append(time.perf_counter() - begun)
        h.clock.advance(1.0)
        for worker in (*h.p, *h.d):
            worker.say(Heartbeat(second + 2, worker.worker.stats))
    assert len(json.loads(frames.changes().seen_by(""))["links"]) == 64
    assert min(spent) < 0.01
    for client in clients:
        await client.leave()
