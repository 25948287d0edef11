"""Two workers' tiers on one store, with real copies of real bytes."""

import random
import time
from collections import deque
from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest

from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.engine.launch_list import LaunchList
from tandem.messages import NO_HITS, PROTOCOL_VERSION, PageFormat, TierHits
from tandem.pagestore.client.cpu_copies import CpuRegionCopies
from tandem.pagestore.client.events import FromStore, StoreClosed, StoreOpened
from tandem.pagestore.client.tier import StoreTier
from tandem.pagestore.keys import page_keys, root_key
from tandem.pagestore.messages import StoreClientMessage, StoreHello, StoreWelcome
from tandem.pagestore.server.page_store import PageStore
from tandem.worker.page_tier import PrefetchKey

SIZE = 4
PAGE_BYTES = 64
NUM_PAGES = 32
FORMAT = PageFormat("f" * 32, PAGE_BYTES, "page_size=4")
TIMEOUT_S = 20.0


def content(key: bytes) -> np.ndarray:
    return np.frombuffer(key * 2, np.uint8)


class Node:
    """A store, its region and its workers."""

    def __init__(self, num_slots: int) -> None:
        self.region = np.zeros((num_slots, PAGE_BYTES), np.uint8)
        self.store = PageStore(num_slots, time.monotonic)
        self.workers: list[Worker] = []
        self.names = count(1)

    def worker(self) -> "Worker":
        self.workers.append(Worker(self))
        self.workers[-1].connect()
        return self.workers[-1]

    def turn(self) -> None:
        """Delivers all messages, and gives each tier a turn."""
        for worker in self.workers:
            worker.tier.settle()
            while worker.sent:
                epoch, message = worker.sent.popleft()
                if epoch == self.store.epoch and worker.session:
                    self.store.receive(worker.session, message)
        self.store.poll()
        for session, messages in self.store.take_outgoing().items():
            for worker in self.workers:
                if worker.session == session:
                    for answer in messages:
                        if isinstance(answer, StoreWelcome):
                            worker.epoch = answer.epoch
                            worker.tier.receive(StoreOpened(answer.epoch, answer.num_slots))
                        else:
                            worker.tier.receive(FromStore(self.store.epoch, answer))
        self.check()

    def rest(self) -> None:
        """Runs until no tier has anything to do."""
        deadline = time.monotonic() + TIMEOUT_S
        while any(worker.sent or worker.tier.next_deadline() is not None for worker in self.workers):
            assert time.monotonic() < deadline
            self.turn()
            time.sleep(0.0002)
        self.turn()

    def check(self) -> None:
        violations = [worker.cache.check_integrity() or worker.tier.check_integrity() for worker in self.workers]
        assert {*violations, self.store.check_integrity()} == {""}

    def restart_store(self) -> None:
        former = {worker.pid: (lambda: False) for worker in self.workers}
        self.store = PageStore(len(self.region), time.monotonic, former_users=former)
        for worker in self.workers:
            worker.disconnect()


class Worker:
    """Computes prompts: each page's content is its key.

    Attributes:
        num_quiet: sessions whose copies are over.
        computed: pages computed.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.pid = next(node.names)
        self.session = self.epoch = ""
        self.sent: deque[tuple[str, StoreClientMessage]] = deque()
        self.pool = np.zeros((NUM_PAGES, PAGE_BYTES), np.uint8)
        self.cache = CacheManager(NUM_PAGES, SIZE)
        self.copies = CpuRegionCopies(self.pool, node.region)
        self.tier = StoreTier(
            self.cache,
            LaunchList(SIZE),
            self.copies,
            FORMAT,
            lambda epoch, message: self.sent.append((epoch, message)),
            time.monotonic,
            lambda num_cached, num_tokens: TIMEOUT_S,
        )
        self.num_quiet = 0
        self.computed = 0

    def connect(self) -> None:
        self.session = f"session-{next(self.node.names)}"
        hello = StoreHello(PROTOCOL_VERSION, "worker", str(self.pid), self.pid, FORMAT)
        self.node.store.open_session(self.session, hello, lambda: False)

    def disconnect(self) -> None:
        self.tier.receive(StoreClosed(self.epoch, self._quiet))
        self.session = ""

    def _quiet(self) -> None:
        self.num_quiet += 1

    def prefetch(self, token_ids: list[int], namespace: str = "") -> TierHits:
        key: PrefetchKey = (str(next(self.node.names)), 0, "prefill")
        self.tier.prefetch(key, token_ids, namespace)
        while self.tier.is_loading(key):
            self.node.turn()
            time.sleep(0.0002)
        return self.tier.end(key)

    def serve(self, token_ids: list[int], namespace: str = "") -> TierHits:
        """Loads and computes a prompt, and checks its pages. Returns what was loaded."""
        hits = self.prefetch(token_ids, namespace)
        handle = self.cache.acquire_pages(
            token_ids, len(token_ids), max_cached_len=len(token_ids) - 1, namespace=namespace
        )
        deadline = time.monotonic() + TIMEOUT_S
        while handle is None:
            assert time.monotonic() < deadline
            self.node.turn()
            handle = self.cache.acquire_pages(
                token_ids, len(token_ids), max_cached_len=len(token_ids) - 1, namespace=namespace
            )
        keys = page_keys(root_key(FORMAT, namespace), token_ids, SIZE)
        for i, (page_id, key) in enumerate(zip(handle.page_ids, keys, strict=False)):
            if i < handle.num_shared:
                assert (self.pool[page_id] == content(key)).all(), "a page holds another prompt's content"
            else:
                self.pool[page_id] = content(key)
                self.computed += 1
        self.cache.cache_pages(handle, token_ids, len(token_ids))
        self.cache.release_pages(handle)
        self.node.turn()
        return hits

    def forget(self) -> None:
        self.cache.drop_cached_pages()


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node(num_slots=256)
    yield node
    node.rest()
    for worker in node.workers:
        assert (worker.cache.num_locked_pages, worker.cache.num_held_pages) == (0, 0)
        worker.copies.close()
    stats = node.store.stats()
    assert (stats.num_pinned, stats.num_writing, stats.num_finds) == (0, 0, 0)


def prompt(number: int, num_pages: int, extra: int = 1) -> list[int]:
    return [number * 1000 + i for i in range(num_pages * SIZE + extra)]


def host(num_pages: int) -> TierHits:
    return TierHits(host=num_pages * SIZE)


def test_pages_that_one_worker_computed_serve_the_other(node: Node) -> None:
    first, second = node.worker(), node.worker()
    node.rest()
    assert first.serve(prompt(1, 10)) == NO_HITS
    node.rest()
    assert node.store.stats().num_ready == 10
    assert second.serve(prompt(1, 10)) == host(10)
    assert (first.computed, second.computed) == (10, 0)
    # Nor are they written again.
    node.rest()
    assert node.store.stats().counts.pages_written == 10


def test_evicted_pages_come_back(node: Node) -> None:
    worker = node.worker()
    node.rest()
    for _ in range(3):
        for number in range(6):
            worker.serve(prompt(number, 10))
            node.rest()
    assert worker.computed == 60, "a working set of twice the pool is computed once"
    assert node.store.stats().num_ready == 60


def test_continuation_loads_and_writes_only_its_own_pages(node: Node) -> None:
    first, second = node.worker(), node.worker()
    node.rest()
    first.serve(prompt(1, 6))
    node.rest()
    second.serve(prompt(1, 6))
    second.serve(prompt(1, 10))
    assert second.computed == 4
    node.rest()
    assert first.serve(prompt(1, 12)) == host(4)
    assert first.computed == 6 + 2


def test_namespaces_do_not_meet(node: Node) -> None:
    first, second = node.worker(), node.worker()
    node.rest()
    first.serve(prompt(1, 5), "a")
    node.rest()
    assert second.serve(prompt(1, 5), "b") == NO_HITS
    assert second.serve(prompt(1, 5), "a") == host(5)


def test_restarted_worker_begins_warm(node: Node) -> None:
    first = node.worker()
    node.rest()
    for number in range(3):
        first.serve(prompt(number, 10))
        node.rest()
    node.store.close_session(first.session)
    first.disconnect()
    assert first.num_quiet == 1
    again = node.worker()
    node.rest()
    assert [again.serve(prompt(number, 10)) for number in range(3)] == [host(10)] * 3
    assert again.computed == 0


def test_store_that_died_is_filled_again(node: Node) -> None:
    first, second = node.worker(), node.worker()
    node.rest()
    first.serve(prompt(1, 10))
    first.serve(prompt(2, 10))
    # Its copies of the last pages may run: a new session opens after them.
    node.restart_store()
    assert first.prefetch(prompt(1, 12)) == NO_HITS
    deadline = time.monotonic() + TIMEOUT_S
    while not all(worker.num_quiet for worker in node.workers):
        assert time.monotonic() < deadline
        node.turn()
    for worker in node.workers:
        worker.connect()
    node.rest()
    assert second.serve(prompt(1, 10)) == NO_HITS
    first.serve(prompt(2, 10))
    node.rest()
    second.forget()
    assert second.serve(prompt(1, 10)) == second.serve(prompt(2, 10)) == host(10)


def test_nothing_of_before_a_reset_is_found_after_it(node: Node) -> None:
    first, second = node.worker(), node.worker()
    node.rest()
    first.serve(prompt(1, 10))
    node.rest()
    first.serve(prompt(2, 10))
    running = first.cache.acquire_pages(prompt(1, 10), 41, max_cached_len=40)
    assert running is not None and running.num_shared == 10
    # Copies of the second prompt's pages run.
    for worker in node.workers:
        worker.tier.reset()
        worker.forget()
    first.cache.release_pages(running)
    node.rest()
    assert node.store.stats().num_ready == 0
    first.serve(prompt(1, 10))
    node.rest()
    assert second.serve(prompt(1, 10)) == second.serve(prompt(2, 10)) == NO_HITS


@pytest.mark.parametrize("seed", range(3))
def test_random_conversations_on_tiny_pools_and_a_tiny_store(seed: int) -> None:
    node = Node(num_slots=48)
    workers = [node.worker(), node.worker()]
    node.rest()
    numbers = random.Random(seed)
    # More than the store and the pools hold.
    conversations = [[number] * 5 for number in range(10)]
    loaded = 0
    for turn in range(300):
        talk = numbers.choice(conversations)
        if len(talk) > 60:
            del talk[5:]
        talk.extend(numbers.randrange(3) for _ in range(numbers.randrange(1, 12)))
        worker = numbers.choice(workers)
        loaded += worker.serve(list(talk)).total // SIZE
        if turn == 150:
            for other in workers:
                other.tier.reset()
                other.forget()
    computed = sum(worker.computed for worker in workers)
    node.rest()
    node.check()
    for worker in workers:
        worker.copies.close()
    # How many depends on the time that copies take.
    assert loaded > 100, (loaded, computed)
    assert node.store.stats().num_evictions > 0
