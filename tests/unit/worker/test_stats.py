from dataclasses import replace

from tandem.decode_worker.config import DecodeConfig
from tandem.messages import Shipped, WorkerStats
from tandem.prefill_worker.config import PrefillConfig
from tests.fakes.workers import WorkerPair

# The fake engine's 4 tokens of 2 floats.
PAGE_BYTES = 32


def shipped(stats: WorkerStats) -> list[Shipped]:
    """Return the shipped pages without times, which differ between runs."""
    return [replace(one, copying_ns=0) for one in stats.shipped]


def page_sum(stats: WorkerStats) -> int:
    return stats.num_free_pages + stats.num_cached_pages + stats.num_locked_pages + stats.num_leased_pages


def test_prompt_tokens_are_counted_once_on_each_side() -> None:
    pair = WorkerPair()
    prompt = list(range(18))
    pair.submit("a", prompt, max_tokens=4)
    pair.run()
    p, d = pair.p.scheduler.stats(), pair.d.scheduler.stats()
    assert (p.prompt_tokens_computed, p.prefix_cached_tokens) == (18, 0)
    assert (d.prompt_tokens_computed, d.prefix_cached_tokens) == (0, 0)
    assert shipped(p) == [Shipped("shared_memory", 5, 5 * PAGE_BYTES, "d")]
    assert d.shipped == ()
    # Four of its five pages are full and shared; 10 tokens follow.
    pair.submit("b", prompt[:16] + [100 + i for i in range(10)], max_tokens=4)
    pair.run()
    p, d = pair.p.scheduler.stats(), pair.d.scheduler.stats()
    assert (p.prompt_tokens_computed, p.prefix_cached_tokens) == (18 + 10, 16)
    assert (d.prompt_tokens_computed, d.prefix_cached_tokens) == (0, 16)
    assert shipped(p) == [Shipped("shared_memory", 8, 8 * PAGE_BYTES, "d")]
    assert page_sum(p) == p.num_total_pages and page_sum(d) == d.num_total_pages


def test_earlier_output_does_not_count_as_prompt() -> None:
    pair = WorkerPair()
    prompt = list(range(8))
    pair.submit("a", prompt, max_tokens=9)
    pair.run()
    outputs = tuple(pair.output("a")[:8])
    pair.submit("b", prompt, output_ids=outputs, attempt=1, max_tokens=12)
    pair.run()
    # Of the 16 cached tokens, only 8 belong to the client's prompt.
    assert pair.d.scheduler.stats().prefix_cached_tokens == 8
    assert pair.p.scheduler.stats().prefix_cached_tokens == 8


def test_unstarted_request_counts_no_cached_tokens() -> None:
    pair = WorkerPair(prefill={"config": PrefillConfig(chunk_size=4, min_shared_tokens=4)})
    pair.submit("a", list(range(8)))
    pair.run()
    pair.submit("b", [*range(8), *range(100, 140)])
    pair.submit("c", [*range(8), *range(200, 240)])
    pair.p.scheduler.step()
    stats = pair.p.scheduler.stats()
    assert (stats.num_running, stats.num_queued, stats.prefix_cached_tokens) == (1, 1, 8)


def test_pages_over_a_second_link_add_up() -> None:
    pair = WorkerPair()
    pair.submit("a", list(range(8)))
    pair.run()
    first = pair.p.scheduler.stats()
    pair.cut_link()
    pair.run()
    pair.open_link()
    pair.submit("b", list(range(100, 108)))
    pair.run()
    stats = pair.p.scheduler.stats()
    assert shipped(stats) == [Shipped("shared_memory", 4, 4 * PAGE_BYTES, "d")]
    assert stats.shipped[0].copying_ns > first.shipped[0].copying_ns > 0


def test_given_back_requests_are_counted() -> None:
    pair = WorkerPair(num_pages=8)
    for n in range(2):
        pair.submit(f"r{n}", [100 * n + i for i in range(8)], max_tokens=17, arrival_ns=n)
    pair.run()
    assert pair.d.scheduler.stats().num_given_back == 1
    assert pair.p.scheduler.stats().num_given_back == 0


def test_expired_leases_are_counted() -> None:
    pair = WorkerPair(config=DecodeConfig(lease_duration_s=10.0), prefill={"config": PrefillConfig(chunk_size=4)})
    pair.submit("a", list(range(12)))
    pair.p.scheduler.step()
    pair.deliver()
    pair.d.scheduler.step()
    assert pair.d.scheduler.stats().num_leases_expired == 0
    pair.clock.advance(10.0)
    for _ in range(3):
        pair.d.scheduler.step()
    assert pair.d.scheduler.stats().num_leases_expired == 1
