"""What several routers cost in cached prefixes: of the tokens of prompts, the part that is cached where they are sent.

Here are the real policies, one for each router, and the real caches of prefill and decode workers, without pages'
memory, which tell every router what they have; time, arrivals and computing are simulated, so the result is the same on
every machine (some minutes). `guessed`: each router takes for cached what it has itself sent where, is told nothing.

Conversations begin at random, with one of a few beginnings that many share; each turn's prompt is all that was said
before and something new. `kept`: a conversation's turns come to one router, as over a connection that its client keeps;
`spread`: each turn comes to any of them, as from clients that spread their calls. One router that looks at load alone
is there to compare with.
"""

import heapq
import itertools
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.routing import PAGE_SIZE, worker_hello
from benchmarks.rows import Row, argument_parser, report
from benchmarks.sent_prefixes import SentPrefixes
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.messages import CachedPrefixes
from tandem.router.peer_exchange import INTERVAL_S
from tandem.router.policies.base import RoutingPolicy, RoutingRequest
from tandem.router.policies.cache_aware import CacheAware
from tandem.router.policies.least_loaded import LeastLoaded
from tandem.router.workers.candidates import Candidates
from tandem.router.workers.peer_counts import AssignedLoad
from tandem.router.workers.worker import Pair, Worker
from tandem.worker.engine_thread import CHANGES_INTERVAL_S

MakePolicy = Callable[[int, Callable[[], float]], RoutingPolicy]

NUM_WORKERS = 4
# About an 8B model on an H200: what a prefill worker computes in a second, and a decode worker's step.
PREFILL_TOKENS_PER_S = 25_000.0
STEP_S = 0.01
NUM_BEGINNINGS = 8
BEGINNING_TOKENS = 1_500
TURN_TOKENS = 400
OUTPUT_TOKENS = 200
NUM_TURNS = 8
THINK_S = 10.0
WARM_UP_S = 120.0
NUM_ROUTERS = (1, 2, 4, 8)
SEED = 0


@dataclass(slots=True)
class Cache:
    """A worker's.

    Attributes:
        busy_until: when it has computed what it was sent.
        num_told: how often it has told what has changed.
        is_telling: whether it has a moment for the next time.
    """

    manager: CacheManager
    busy_until: float = 0.0
    num_told: int = 0
    is_telling: bool = False

    def serve(self, prompt_ids: Sequence[int], computed_ids: Sequence[int]) -> int:
        """Takes a request in; returns the tokens of its prompt that were cached.

        Args:
            computed_ids: those of prompt and output that are cached afterwards.
        """
        handle = self.manager.acquire_pages(prompt_ids, len(computed_ids) + 1, max_cached_len=len(prompt_ids) - 1)
        assert handle is not None, "nothing else holds pages"
        cached_len = handle.cached_len
        self.manager.cache_pages(handle, computed_ids, len(computed_ids))
        self.manager.release_pages(handle)
        return cached_len


@dataclass(slots=True)
class Replica:
    """A router's part in choosing."""

    policy: RoutingPolicy
    workers: dict[str, Worker]
    candidates: Candidates = field(init=False)

    def __post_init__(self) -> None:
        self.candidates = Candidates(self.workers)


@dataclass(slots=True)
class Conversation:
    number: int
    token_ids: list[int]
    turn: int = 0


@dataclass(slots=True)
class Counts:
    prompt: int = 0
    prefill_cached: int = 0
    decode_cached: int = 0
    waits: list[float] = field(default_factory=list)


class Cluster:
    """A node of as many prefill as decode workers, and its routers, in simulated time."""

    def __init__(self, make_policy: MakePolicy, num_routers: int, num_pages: int) -> None:
        """Args: make_policy: given a seed and a clock; num_pages: of each worker's pool."""
        names = [f"{role}-{number}" for role in ("prefill", "decode") for number in range(NUM_WORKERS)]
        self._caches = {name: Cache(CacheManager(num_pages, PAGE_SIZE)) for name in names}
        self._replicas = [
            Replica(make_policy(SEED + number, lambda: self._now), _workers(names, num_pages))
            for number in range(num_routers)
        ]
        self._random = random.Random(SEED)
        self._tells = self._replicas[0].policy.wants_prefixes
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._now = 0.0
        self._counts_from = 0.0
        self.counts = Counts()

    def run(self, rate: float, warm_up_s: float, seconds: float, is_kept: bool) -> Counts:
        """
        Args:
            rate: of conversations that begin, in a second.
            is_kept: whether each stays with its router.
        """
        self._counts_from = warm_up_s
        beginnings = [self._tokens(BEGINNING_TOKENS) for _ in range(NUM_BEGINNINGS)]
        begin = 0.0
        for number in itertools.count():
            begin += self._random.expovariate(rate)
            if begin >= warm_up_s + seconds:
                break
            conversation = Conversation(number, list(self._random.choice(beginnings)))
            self._at(begin, partial(self._take_turn, conversation, is_kept))
        self._at(INTERVAL_S, self._exchange)
        while self._events and self._now < warm_up_s + seconds:
            self._now, _, act = heapq.heappop(self._events)
            act()
        return self.counts

    def _take_turn(self, conversation: Conversation, is_kept: bool) -> None:
        conversation.token_ids += self._tokens(TURN_TOKENS)
        prompt_ids = tuple(conversation.token_ids)
        number = next(self._numbers)
        chosen_by = conversation.number if is_kept else self._random.randrange(len(self._replicas))
        replica = self._replicas[chosen_by % len(self._replicas)]
        request = RoutingRequest(str(number), 0, prompt_ids, (), OUTPUT_TOKENS, 0, "", "")
        pair = replica.policy.choose(replica.candidates, request)
        replica.policy.attempt_started(pair, request)
        pair.prefill.add_load(1, len(prompt_ids))
        pair.decode.add_load(1)
        prefill = self._caches[pair.prefill.worker_id]
        cached_len = prefill.serve(prompt_ids, prompt_ids)
        self._tell_soon(pair.prefill.worker_id)
        begins = max(self._now, prefill.busy_until)
        prefill.busy_until = begins + (len(prompt_ids) - cached_len) / PREFILL_TOKENS_PER_S
        if self._now >= self._counts_from:
            self.counts.prompt += len(prompt_ids)
            self.counts.prefill_cached += cached_len
            self.counts.waits.append(prefill.busy_until - self._now)
        self._at(prefill.busy_until, partial(self._decode, conversation, is_kept, replica, pair, request))

    def _decode(
        self, conversation: Conversation, is_kept: bool, replica: Replica, pair: Pair, request: RoutingRequest
    ) -> None:
        pair.prefill.add_load(-1, -request.num_prompt_tokens)
        output = self._tokens(OUTPUT_TOKENS)
        conversation.token_ids += output
        computed = conversation.token_ids[:-1]
        cached_len = self._caches[pair.decode.worker_id].serve(request.prompt_ids, computed)
        self._tell_soon(pair.decode.worker_id)
        if self._now >= self._counts_from:
            self.counts.decode_cached += cached_len

        def finish() -> None:
            pair.decode.add_load(-1)
            ended = RoutingRequest(request.request_id, 0, request.prompt_ids, tuple(output), 0, 0, "", "")
            replica.policy.request_finished(pair, ended, "finished")
            conversation.turn += 1
            if conversation.turn < NUM_TURNS:
                after = self._random.expovariate(1 / THINK_S)
                self._at(self._now + after, partial(self._take_turn, conversation, is_kept))

        self._at(self._now + OUTPUT_TOKENS * STEP_S, finish)

    def _tell_soon(self, name: str) -> None:
        """A worker's cache has changed."""
        cache = self._caches[name]
        if self._tells and not cache.is_telling:
            cache.is_telling = True
            self._at(self._now + CHANGES_INTERVAL_S, partial(self._tell, name))

    def _tell(self, name: str) -> None:
        cache = self._caches[name]
        cache.is_telling = False
        if (changes := cache.manager.take_changes()) is not None:
            stored, removed = b"".join(changes.stored), b"".join(changes.removed)
            for replica in self._replicas:
                replica.workers[name].prefixes.receive(CachedPrefixes(cache.num_told, False, stored, removed))
            cache.num_told += 1

    def _exchange(self) -> None:
        """Routers tell each other what they have assigned."""
        for replica in self._replicas:
            for name, worker in replica.workers.items():
                elsewhere = [other.workers[name].assigned_here for other in self._replicas if other is not replica]
                worker.set_load_elsewhere(
                    AssignedLoad(sum(e.num_requests for e in elsewhere), sum(e.num_pending_tokens for e in elsewhere))
                )
        self._at(self._now + INTERVAL_S, self._exchange)

    def _at(self, moment: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._numbers), act))

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(range(100_000), k=count)


def _workers(names: Sequence[str], num_pages: int) -> dict[str, Worker]:
    workers = {}
    for name in names:
        hello = worker_hello(name, name.partition("-")[0], num_pages)
        workers[name] = Worker(hello, lambda _: None, lambda _: None, 0.0, 0.0)
    decode_workers = {name: worker for name, worker in workers.items() if worker.role == "decode"}
    for worker in workers.values():
        if worker.role == "prefill":
            worker.decode_workers.update(decode_workers)
    return workers


def rows_of(name: str, counts: Counts) -> Iterator[Row]:
    yield Row(f"{name}: cached at prefill", 100 * counts.prefill_cached / counts.prompt, "%")
    yield Row("  cached at decode", 100 * counts.decode_cached / counts.prompt, "%")
    waits = sorted(counts.waits)
    yield Row("  until the prompt is computed, median", 1e3 * statistics.median(waits), "ms")
    yield Row("  99 of 100", 1e3 * waits[len(waits) * 99 // 100], "ms")


def measure(
    num_routers: Sequence[int], rate: float, seconds: float, num_pages: int, warm_up_s: float = WARM_UP_S
) -> list[Row]:
    """
    Args:
        rate: of conversations that begin, in a second.
        seconds: of simulated time that count, after as many as it takes to warm up.
        num_pages: of each worker's pool.
    """
    least = Cluster(lambda seed, _: LeastLoaded(seed), 1, num_pages).run(rate, warm_up_s, seconds, is_kept=True)
    rows = list(rows_of("1 router, least_loaded", least))
    policies: tuple[tuple[MakePolicy, str], ...] = (
        (CacheAware, ""),
        (lambda seed, _: SentPrefixes(seed), ", guessed"),
    )
    for count, (policy, known) in itertools.product(num_routers, policies):
        for way in ("kept", "spread")[: 2 if count > 1 else 1]:
            counts = Cluster(policy, count, num_pages).run(rate, warm_up_s, seconds, is_kept=way == "kept")
            name = f"{count} routers, {way}" if count > 1 else "1 router, cache_aware"
            rows += rows_of(name + known, counts)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0."""
    parser = argument_parser(__doc__)
    parser.add_argument("--routers", type=int, nargs="+", default=NUM_ROUTERS, help="how many, in turn (%(default)s)")
    parser.add_argument("--rate", type=float, default=6.0, help="conversations that begin in a second (%(default)s)")
    parser.add_argument("--seconds", type=float, default=120.0, help="of simulated time that count (%(default)s)")
    parser.add_argument("--pages", type=int, default=25_000, help="of each worker's pool (%(default)s)")
    arguments = parser.parse_args(argv)
    rows = measure(arguments.routers, arguments.rate, arguments.seconds, arguments.pages)
    return report(rows, "What several routers cost in cached prefixes", arguments.json)


if __name__ == "__main__":
    sys.exit(main())
