"""Cached tokens by tier in the usage of each API."""

from typing import Any

from tandem.messages import NO_HITS, TierHits
from tandem.router.frontends.grpc_responses import usage_of
from tandem.router.frontends.openai.cached_tokens import cached_details
from tandem.router.requests.tracker import RequestTracker
from tests.fakes import chat_templates
from tests.fakes.http_doors import call, cluster_of
from tests.fakes.request_spec import request_spec
from tests.fakes.router_harness import run

HITS = TierHits(host=4, disk=2, peer=1)
TIERS = {"host_tokens": 4, "disk_tokens": 2, "peer_tokens": 1}


def tracker(num_cached: int | None, loaded: TierHits = NO_HITS) -> RequestTracker:
    return RequestTracker("r", request_spec(range(12)), prompt_cached_len=num_cached, prompt_loaded=loaded)


def test_tiers_are_told_only_of_loaded_tokens() -> None:
    assert cached_details([tracker(None), tracker(8)]) == {"cached_tokens": 8}
    found = cached_details([tracker(8), tracker(10, HITS), tracker(3, TierHits(host=2))])
    assert found == {"cached_tokens": 21, "host_tokens": 6, "disk_tokens": 2, "peer_tokens": 1}


def test_grpc_has_the_parts_of_the_cached_tokens() -> None:
    usage = usage_of(tracker(10, HITS), 5)
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (12, 10, 5)
    assert {name: getattr(usage, name) for name in TIERS} == TIERS
    assert usage_of(tracker(None)).ListFields() == usage_of(tracker(0)).ListFields()


@run
async def test_http_usage() -> None:
    asked: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/completions", {"prompt": "hello, hello", "max_tokens": 4}, "prompt_tokens_details"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "prompt_tokens_details"),
        ("/v1/responses", {"input": "hi"}, "input_tokens_details"),
    ]
    cluster = cluster_of(chat_templates.QWEN25, "Hello.")
    cluster.cached_len = 8
    for loaded, tiers in ((NO_HITS, {}), (HITS, TIERS)):
        cluster.loaded = loaded
        for path, fields, details in asked:
            answer = await call(cluster, path, fields)
            assert answer.json()["usage"][details] == {"cached_tokens": 8, **tiers}
