import random
import time
from collections import Counter

import pytest

from tandem.router.policies.under_way import LAST_WORD_S, PrefixesUnderWay
from tandem.router.workers.worker import Worker
from tests.fakes.clock import FakeClock
from tests.fakes.scripted_worker import hello


def new_worker(name: str = "p") -> Worker:
    return Worker(hello(name, "prefill"), lambda _: None, lambda _: None, 0.0, 0.0)


def test_page_is_expected_while_any_request_needs_it() -> None:
    under_way, worker = PrefixesUnderWay(FakeClock()), new_worker()
    under_way.expect(worker, "a", [1, 2, 3])
    under_way.expect(worker, "b", [1, 2, 4])
    assert set(under_way.expected(worker)) == {1, 2, 3, 4}
    under_way.give_up(worker, "a")
    assert set(under_way.expected(worker)) == {1, 2, 4}
    under_way.give_up(worker, "b")
    under_way.give_up(worker, "b")
    assert not under_way.expected(worker)
    assert len(under_way) == 0


def test_shared_page_is_expected_until_last_request_is_dropped() -> None:
    under_way, worker = PrefixesUnderWay(FakeClock()), new_worker()
    rng = random.Random(0)
    expected: dict[str, list[int]] = {}
    for _ in range(500):
        request_id = rng.choice("abcdefg")
        if rng.randrange(3):
            # Two pages of a request may have the same identity by accident.
            expected[request_id] = rng.choices(range(12), k=rng.randrange(1, 6))
            under_way.expect(worker, request_id, expected[request_id])
        else:
            expected.pop(request_id, None)
            under_way.give_up(worker, request_id)
        assert set(under_way.expected(worker)) == {page for pages in expected.values() for page in pages}


@pytest.mark.usefixtures("no_collections")
def test_long_prompt_is_dropped_faster_than_page_by_page() -> None:
    """This runs on the router's event loop, several times per request."""
    under_way, worker = PrefixesUnderWay(FakeClock()), new_worker()
    identities = [random.getrandbits(64) for _ in range(100_000)]

    def give_up() -> float:
        under_way.expect(worker, "a", identities)
        begun = time.thread_time()
        under_way.give_up(worker, "a")
        return time.thread_time() - begun

    def one_by_one() -> float:
        pages = Counter(identities)
        begun = time.thread_time()
        for identity in identities:
            if pages[identity] > 1:
                pages[identity] -= 1
            else:
                del pages[identity]
        return time.thread_time() - begun

    assert min(give_up() for _ in range(5)) < min(one_by_one() for _ in range(5))


def test_cached_and_other_workers_pages_are_not_expected() -> None:
    under_way, worker, other = PrefixesUnderWay(FakeClock()), new_worker(), new_worker("q")
    worker.prefixes.identities = {1, 2}
    under_way.expect(worker, "a", [1, 2])
    under_way.expect(worker, "b", [])
    assert len(under_way) == 0
    under_way.expect(worker, "c", [1, 2, 3])
    assert set(under_way.expected(worker)) == {1, 2, 3}
    assert not under_way.expected(other)
    under_way.forget(worker)
    assert not under_way.expected(worker)


def test_expectation_ends_shortly_after_request() -> None:
    clock = FakeClock()
    under_way, worker = PrefixesUnderWay(clock), new_worker()
    under_way.expect(worker, "a", [1])
    under_way.finish(worker, "a", [1, 2])
    under_way.expect(worker, "b", [3])
    clock.advance(LAST_WORD_S / 2)
    assert set(under_way.expected(worker)) == {1, 2, 3}
    clock.advance(LAST_WORD_S)
    assert set(under_way.expected(worker)) == {3}
    assert len(under_way) == 1


def test_reported_page_is_not_expected_again() -> None:
    under_way, worker = PrefixesUnderWay(FakeClock()), new_worker()
    under_way.expect(worker, "a", [1, 2])
    under_way.expect(worker, "b", [1, 5])
    worker.prefixes.identities, worker.prefixes.num_messages = {1, 2}, 1
    assert set(under_way.expected(worker)) == {1, 5}
    worker.prefixes.identities, worker.prefixes.num_messages = set(), 2
    assert set(under_way.expected(worker)) == {1, 5}
