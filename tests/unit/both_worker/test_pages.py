"""Sharing of a pool between local prompts, remote prompts, and decoding."""

from collections.abc import Callable

import pytest

from tandem.decode_worker.config import DecodeConfig
from tandem.engine.kvcache.page_ceiling import PageCeiling
from tandem.messages import Abort, Failed, GaveBack
from tandem.worker.events import FromRouter
from tests.fakes.both_workers import PAGE_SIZE, BothWorkers
from tests.fakes.engine import expected_tokens


def prompt(number: int, num_pages: int) -> list[int]:
    """Return a prompt without shared prefix whose first decode step needs another page."""
    return [number] * (num_pages * PAGE_SIZE)


def submit_each_for_the_other(workers: BothWorkers, num_requests: int, num_pages: int) -> dict[str, list[int]]:
    """Return the prompts by request id; ids starting with "a" are decoded at a."""
    prompts = {}
    for number in range(num_requests):
        for here, there in (("a", "b"), ("b", "a")):
            request_id = f"{there}{number}"
            prompts[request_id] = prompt(2 * number + (here == "a"), num_pages)
            workers.submit(request_id, prompts[request_id], prefill_at=here, decode_at=there)
    return prompts


def test_mutual_prefill_makes_progress_on_both_workers() -> None:
    """Three prompts of three pages would lock nine of ten pages at each worker.

    Each lease takes four, so nothing would ever be granted.
    """
    workers = BothWorkers(num_pages=10)
    prompts = submit_each_for_the_other(workers, num_requests=3, num_pages=3)
    workers.run()
    for request_id, token_ids in prompts.items():
        assert workers.output(request_id[0], request_id) == expected_tokens(token_ids, 3)


def test_mutual_prefill_without_the_ceiling_deadlocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show that the previous test can fail."""
    monkeypatch.setattr(PageCeiling, "fits", lambda self, shared, num_private: True)
    workers = BothWorkers(num_pages=10)
    submit_each_for_the_other(workers, num_requests=3, num_pages=3)
    workers.run()
    for worker in workers.workers.values():
        stats = worker.scheduler.stats()
        assert (stats.num_locked_pages, stats.num_leased_pages, stats.num_free_pages) == (9, 0, 1)


def test_request_larger_than_the_reserved_pages_is_refused() -> None:
    """Two pools of ten pages, and six pages for each other: no ceiling leaves room for both."""
    workers = BothWorkers(num_pages=10)
    submit_each_for_the_other(workers, num_requests=1, num_pages=6)
    workers.run()
    for name in ("a", "b"):
        (failed,) = workers.of(name, Failed)
        assert failed.reason == "the request needs 27 tokens, but this worker's largest request has 20"


def test_prompts_waiting_for_remote_leases_do_not_block_local_ones() -> None:
    workers = BothWorkers(num_pages=10)
    # Decoding keeps b busy: a's prompts for it get no lease, and a's next one no pages.
    workers.workers["b"].scheduler.step = lambda: False  # type: ignore[method-assign]
    for number in range(3):
        workers.submit(f"there{number}", prompt(number, 2), prefill_at="a", decode_at="b")
    workers.submit("here", prompt(9, 3), prefill_at="a", decode_at="a")
    workers.run()
    assert workers.output("a", "here") == expected_tokens(prompt(9, 3), 3)
    stats = workers.workers["a"].scheduler.stats()
    assert (stats.num_running, stats.num_queued, stats.num_locked_pages) == (2, 1, 4)


def fill(workers: BothWorkers, worker_id: str) -> Callable[[], None]:
    """Run requests that leave one page free; return a function that ends them."""
    cache = workers.workers[worker_id].cache
    handle = cache.acquire_pages([7], (cache.num_pages - 1) * PAGE_SIZE, max_cached_len=0)
    assert handle is not None
    return lambda: cache.release_pages(handle)


def test_prompt_waits_for_older_leases() -> None:
    workers = BothWorkers(num_pages=10)
    end = fill(workers, "a")
    workers.submit("lease", prompt(1, 4), prefill_at="b", decode_at="a")
    for _ in range(4):
        workers.turn()
    # It fits, but would take the page that the lease waits for.
    workers.submit("here", prompt(2, 1)[:3], prefill_at="a", decode_at="a", max_tokens=1)
    workers.submit("there", prompt(3, 1)[:3], prefill_at="a", decode_at="b", max_tokens=1)
    for _ in range(4):
        workers.turn()
    assert workers.workers["a"].scheduler.stats().num_queued == 3
    end()
    workers.run()
    assert workers.output("a", "lease") == expected_tokens(prompt(1, 4), 3)
    assert workers.workers["a"].scheduler.stats().num_queued == 0


def test_an_older_prompt_does_not_wait_for_leases() -> None:
    workers = BothWorkers(num_pages=10)
    cache = workers.workers["a"].cache
    handle = cache.acquire_pages([7], 8 * PAGE_SIZE, max_cached_len=0)
    assert handle is not None
    workers.submit("old", prompt(2, 1), prefill_at="a", decode_at="a", max_tokens=1)
    workers.submit("lease", prompt(1, 4), prefill_at="b", decode_at="a")
    for _ in range(5):
        workers.turn()
    assert workers.workers["a"].scheduler.stats().num_queued == 1, "the lease alone"


@pytest.mark.parametrize("decode_at", ["a", "b"])
def test_leases_overtaking_a_prompt_are_bounded(decode_at: str) -> None:
    """A steady flow of small leases would starve it."""
    workers = BothWorkers(num_pages=10, config=DecodeConfig(max_overtaken=2))
    end = fill(workers, "a")
    workers.submit("prompt", prompt(1, 4), prefill_at="a", decode_at=decode_at)
    for number in range(5):
        # Each ends with its first token at its decode worker, which frees the page for the next.
        workers.submit(f"lease{number}", [number], prefill_at="b", decode_at="a", max_tokens=2)
        for _ in range(8):
            workers.turn()
    assert [bool(workers.output("a", f"lease{number}")) for number in range(5)] == [True, True, False, False, False]
    end()
    workers.run()
    assert workers.output(decode_at, "prompt") == expected_tokens(prompt(1, 4), 3)
    assert all(workers.output("a", f"lease{number}") for number in range(5))


@pytest.mark.parametrize("decode_at", ["a", "b"])
def test_prompt_leaves_growth_pages_to_running_requests(decode_at: str) -> None:
    workers = BothWorkers(num_pages=10)
    cache = workers.workers["a"].cache
    assert cache.acquire_pages([7], 7 * PAGE_SIZE, max_cached_len=0) is not None
    workers.submit("runs", prompt(1, 1), prefill_at="a", decode_at="a", max_tokens=8)
    workers.turn()
    assert (cache.num_available_pages, len(workers.output("a", "runs"))) == (1, 2)
    workers.submit("waits", [2], prefill_at="a", decode_at=decode_at)
    workers.turn()
    stats = workers.workers["a"].scheduler.stats()
    assert (stats.num_running, stats.num_queued) == (1, 1)
    workers.run()
    assert workers.output("a", "runs") == expected_tokens(prompt(1, 1), 8) and not workers.of("a", GaveBack)
    assert workers.output(decode_at, "waits") == expected_tokens([2], 3)


def test_abandoned_prompt_does_not_block_leases() -> None:
    workers = BothWorkers(num_pages=10, config=DecodeConfig(max_overtaken=0))
    fill(workers, "a")
    workers.submit("prompt", prompt(1, 4), prefill_at="a", decode_at="a")
    workers.turn()
    workers.submit("lease", [1], prefill_at="b", decode_at="a", max_tokens=2)
    for _ in range(8):
        workers.turn()
    assert not workers.output("a", "lease")
    workers.workers["a"].scheduler.receive(FromRouter(Abort("prompt", 0)))
    workers.run()
    assert workers.output("a", "lease") == expected_tokens([1], 2)
