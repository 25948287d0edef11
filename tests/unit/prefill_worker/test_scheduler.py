"""Composition and order of a prefill worker's forward passes, over a fake engine."""

import pytest

from tandem.messages import FirstToken, ResetCache
from tandem.prefill_worker.config import PrefillConfig
from tandem.prefill_worker.waiting import MAX_OVERTAKEN
from tandem.worker.events import FromRouter
from tests.fakes.engine import expected_tokens
from tests.fakes.workers import WorkerPair


def first_tokens(pair: WorkerPair) -> list[str]:
    return [m.request_id for m in pair.p.outbox.of(FirstToken)]


def make_pair(policy: str = "fcfs", chunk_size: int = 512, **prefill: object) -> WorkerPair:
    config = PrefillConfig(chunk_size=chunk_size, schedule=policy, min_shared_tokens=4)
    return WorkerPair(prefill={"config": config, "num_pages": 256, **prefill}, num_pages=256)


def test_short_prompts_share_a_forward_within_the_token_budget() -> None:
    pair = make_pair(chunk_size=20)
    for i in range(5):
        pair.submit(f"r{i}", list(range(100 * i, 100 * i + 8)))
    pair.run()
    # A prompt larger than the remaining budget is cut.
    assert [lens for _, lens in pair.p.engine.batches] == [[8, 8, 4], [4, 8, 8]]
    assert first_tokens(pair) == [f"r{i}" for i in range(5)]


def test_a_long_prompt_does_not_keep_the_budget_empty() -> None:
    pair = make_pair(chunk_size=10)
    pair.submit("long", list(range(25)))
    pair.submit("short", list(range(100, 104)))
    pair.run()
    assert [lens for _, lens in pair.p.engine.batches] == [[10], [10], [5, 4]]


def test_request_waits_for_a_prefix_being_computed() -> None:
    pair = make_pair(chunk_size=16)
    prefix = list(range(40))
    for i in range(4):
        pair.submit(f"r{i}", [*prefix, 500 + i])
    pair.submit("other", list(range(200, 208)))
    pair.run()
    # The prefix is computed once; the others compute only their last token.
    assert pair.p.engine.counters.prompt_tokens_computed == 41 + 3 + 8
    assert first_tokens(pair)[:2] == ["r0", "other"], "who shares nothing does not wait"
    for i in range(4):
        assert pair.output(f"r{i}") == expected_tokens([*prefix, 500 + i], 5)
    pair.check_idle()


def test_wait_for_a_prefix_ends_with_its_job() -> None:
    pair = make_pair(chunk_size=8)
    prefix = list(range(40))
    pair.submit("a", [*prefix, 500])
    pair.submit("b", [*prefix, 501])
    pair.turn()
    assert pair.p.scheduler.stats().num_queued == 1
    pair.abort("a")
    pair.run()
    assert pair.output("b") == expected_tokens([*prefix, 501], 5)
    assert pair.p.engine.counters.prompt_tokens_computed == 8 + 33
    pair.check_idle()


def test_namespaces_do_not_wait_for_each_other() -> None:
    pair = make_pair()
    prompt = list(range(40))
    pair.submit("a", prompt, cache_namespace="one")
    pair.submit("b", prompt, cache_namespace="two")
    pair.run()
    assert pair.p.engine.batches[0][1] == [40, 40]
    assert pair.output("a") == pair.output("b") == expected_tokens(prompt, 5)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", ["cold", "x1", "y1", "x2", "z"]),
        ("lpm", ["z", "x1", "x2", "y1", "cold"]),
        ("dfs-weight", ["cold", "x1", "x2", "y1", "z"]),
        ("lof", ["y1", "z", "x2", "x1", "cold"]),
    ],
)
def test_order_of_a_policy(policy: str, order: list[str]) -> None:
    pair = make_pair(policy, chunk_size=64)
    x, y, z = list(range(100, 108)), list(range(200, 204)), list(range(300, 316))
    for name, prompt in (("wx", x), ("wy", y), ("wz", z)):
        pair.submit(name, [*prompt, 1], max_tokens=1)
    pair.run()
    pair.p.outbox.router.clear()
    for name, prompt, max_tokens in (
        ("cold", list(range(400, 404)), 2),
        ("x1", [*x, 9, 9, 9, 1], 3),
        ("y1", [*y, 9, 9, 9, 2], 9),
        ("x2", [*x, 9, 9, 9, 3], 4),
        ("z", [*z, 9, 9, 9, 4], 5),
    ):
        pair.submit(name, prompt, max_tokens=max_tokens)
    pair.run()
    assert first_tokens(pair) == order


def test_priority_goes_before_policy() -> None:
    pair = make_pair("lof", chunk_size=4)
    for i, (priority, max_tokens) in enumerate([(0, 9), (5, 1), (-1, 20), (5, 2)]):
        pair.submit(f"r{i}", [i * 10, 1, 2, 3], priority=priority, max_tokens=max_tokens)
    pair.run()
    assert first_tokens(pair) == ["r3", "r1", "r0", "r2"]


def test_overtaking_is_bounded() -> None:
    pair = make_pair("lof", chunk_size=4)
    pair.submit("modest", [1, 2, 3, 4], max_tokens=1)
    for i in range(MAX_OVERTAKEN + 20):
        pair.submit(f"greedy{i}", [1000 + i, 2, 3, 4], max_tokens=3)
    pair.run()
    assert first_tokens(pair).index("modest") == MAX_OVERTAKEN


def test_a_request_keeps_its_age_over_attempts() -> None:
    pair = make_pair(chunk_size=4)
    pair.submit("young", [10, 1, 2, 3], arrival_ns=20)
    pair.submit("old", [20, 1, 2, 3], arrival_ns=10, attempt=1, output_ids=(7,))
    pair.run()
    assert first_tokens(pair) == ["old", "young"]


def test_request_without_pages_is_not_overtaken() -> None:
    pair = make_pair(chunk_size=64, num_pages=12)
    pair.submit("a", list(range(24)), max_tokens=2)
    pair.submit("large", list(range(100, 140)), max_tokens=2)
    pair.submit("small", list(range(200, 204)), max_tokens=2)
    pair.run()
    assert first_tokens(pair) == ["a", "large", "small"]
    pair.check_idle()


def test_router_can_clear_the_cache() -> None:
    pair = make_pair(chunk_size=8)
    prompt = list(range(24))
    pair.submit("a", prompt)
    pair.run()
    pair.submit("b", prompt)
    pair.turn()
    for side in (pair.p, pair.d):
        side.scheduler.receive(FromRouter(ResetCache()))
    pair.run()
    # The pages that b started with are in use and stay.
    assert pair.output("b") == expected_tokens(prompt, 5)
    for side in (pair.p, pair.d):
        side.scheduler.receive(FromRouter(ResetCache()))
        assert side.scheduler.stats().num_free_pages == side.scheduler.stats().num_total_pages
    pair.submit("c", prompt)
    pair.run()
    assert pair.output("c") == expected_tokens(prompt, 5)
    assert [m.cached_len for m in pair.p.outbox.of(FirstToken)] == [0, 20, 0]
    pair.check_idle()
