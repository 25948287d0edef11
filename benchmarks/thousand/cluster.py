"""A cluster of real routers and scripted workers in virtual time.

One thread runs everything in order of virtual time; nothing waits. The first router is watched: its messages pass the
codecs, and its CPU time is counted by what it does. The others do the same work uncounted.
"""

import heapq
import itertools
import pickle
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.thousand.costs import Costs
from benchmarks.thousand.workers import PAGE_SIZE, SimWorker, Stream
from tandem.config import Role
from tandem.deploy.supervise.role_planner import RolePlanner
from tandem.deploy.supervise.role_plans import PLAN_INTERVAL_S
from tandem.lifecycle import RECEIVED, now_ns
from tandem.messages import Hello
from tandem.prefix import prefix_identities
from tandem.router.config import RouterAddresses, RouterConfig
from tandem.router.frontends.base import Frontend
from tandem.router.observe.live.snapshot import SnapshotBuilder
from tandem.router.peer_exchange import INTERVAL_S, CountsFeed, decode_counts
from tandem.router.policies.table import ROUTING_POLICIES
from tandem.router.requests.active_request import ActiveRequest
from tandem.router.requests.request_spec import RequestSpec, TokenizedPrompt
from tandem.router.router import WATCH_INTERVAL_S, Router
from tandem.router.workers.objectives import DEFAULT_OBJECTIVES
from tandem.sampling_params import SamplingParams
from tests.fakes.clock import FakeClock
from tests.fakes.tokenizer import ByteTokenizer

NUM_PROMPT_TOKENS = 1000
NUM_OUTPUT_TOKENS = 32
NUM_PROMPTS = 64
HEARTBEAT_INTERVAL_S = 0.25
CHANGES_INTERVAL_S = 0.1
LIVE_INTERVAL_S = 1.0


class SimRouter:
    """Attributes: costs: None unless watched."""

    def __init__(self, cluster: "Cluster", address: str, routing: str, costs: Costs | None) -> None:
        self.cluster, self.address, self.costs = cluster, address, costs
        names = cluster.router_names
        config = RouterConfig(
            "nowhere",
            "fake",
            2 * NUM_PROMPT_TOKENS,
            router_id=address,
            cluster_token="secret",
            max_queued_requests=10**9,
            workers=cluster.roles,
            routers={name: RouterAddresses(name, name, name) for name in names} if len(names) > 1 else {},
        )
        made: Any = ROUTING_POLICIES.load(routing)
        self.router = Router(config, made(0, cluster.clock), cluster.clock)
        self.frontend = Frontend(self.router, ByteTokenizer(), config)  # type: ignore[arg-type]
        self.frames = SnapshotBuilder(self.router, config)
        self.requests: deque[ActiveRequest] = deque()
        self._feeds: dict[str, CountsFeed] = {}

    def take(self, stream: Stream, messages: Sequence[Any]) -> None:
        """Takes a worker's batch."""
        if self.costs is not None:
            self.costs.receive(messages, lambda message: self._take_one(stream, message))
        else:
            for message in messages:
                self._take_one(stream, message)

    def _take_one(self, stream: Stream, message: Any) -> None:
        if isinstance(message, Hello):
            stream.registered = self.router.connect_worker(message, stream.say, lambda _: None)
        elif stream.registered is not None:
            self.router.receive(stream.registered, message)

    def count_sent(self, messages: Sequence[Any]) -> None:
        if self.costs is not None:
            self.costs.sent(messages)

    def do(self, name: str, work: Callable[[], Any]) -> Any:
        if self.costs is None:
            return work()
        with self.costs.counted(name):
            return work()

    def submit(self, prompt: TokenizedPrompt) -> None:
        tracker = self.router.make_tracker(RequestSpec(prompt, SamplingParams(NUM_OUTPUT_TOKENS, seed=1)))
        self.requests.append(self.do("submit a request", lambda: self.router.submit_request(tracker)))

    def close_ended(self) -> None:
        for _ in range(len(self.requests)):
            request = self.requests.popleft()
            if request.tracker.is_final:
                self.do("close a request", partial(self.router.close_request, request))
            else:
                self.requests.append(request)

    def tell_counts(self) -> None:
        for other in self.cluster.routers:
            if other is not self:
                if (feed := self._feeds.get(other.address)) is None:
                    feed = self._feeds[other.address] = CountsFeed(self.address, self.frontend.counts)
                message = self.do("to routers", feed.next)
                if self.costs is not None:
                    self.costs.add("to routers", 0, message.ByteSize(), 0.0)
                other.hear_counts(message)

    def hear_counts(self, message: Any) -> None:
        def hear() -> None:
            self.router.elsewhere.record(message.router_id, decode_counts(message), is_change=message.is_change)
            self.router.update_loads()

        if self.costs is not None:
            self.costs.add("from routers", 0, message.ByteSize(), 0.0)
        self.do("from routers", hear)


class Cluster:
    """
    Attributes:
        watched: the first router.
        of_worker: costs of one watched worker.
        of_supervisor: costs of the planner.
        identities: packed identities of each prompt.
        roles: planned roles by worker id.
    """

    def __init__(self, num_workers: int, num_routers: int, *, linked: bool, routing: str, rate: float) -> None:
        """Args: linked: workers of `--workers` instead of half prefill and half decode; rate: requests per second."""
        self.clock = FakeClock(0.0)
        self._random = random.Random(0)
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._posted: deque[Callable[[], object]] = deque()
        self.of_worker, self.of_supervisor = Costs(), Costs()
        self.router_names = [f"router-{number}" for number in range(num_routers)]
        self.workers: dict[str, SimWorker] = {}
        roles: list[Role] = ["both"] * num_workers if linked else ["decode", "prefill"] * (num_workers // 2)
        self.roles = {f"{role}-{number}": role for number, role in enumerate(roles)}
        self.watched_costs = Costs()
        self.routers: list[SimRouter] = []
        for number, name in enumerate(self.router_names):
            self.routers.append(SimRouter(self, name, routing, None if number else self.watched_costs))
        self.watched = self.routers[0]
        self._planner = RolePlanner(DEFAULT_OBJECTIVES, self.clock)
        self.identities: dict[tuple[int, ...], bytes] = {}
        self._prompts = self._make_prompts()
        self._rate = rate
        self.new_workers = [SimWorker(self, number, role, is_watched=number == 1) for number, role in enumerate(roles)]

    # --- time ---

    def post(self, call: Callable[[], object]) -> None:
        self._posted.append(call)

    def call_in(self, seconds: float, call: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.clock.now + seconds, next(self._numbers), call))

    def settle(self) -> None:
        while self._posted:
            self._posted.popleft()()

    def run(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while self._events and self._events[0][0] <= end:
            self.clock.now, _, call = heapq.heappop(self._events)
            call()
            self.settle()
        self.clock.now = end

    def _every(self, seconds: float, call: Callable[[], object], after: float) -> None:
        def again() -> None:
            call()
            self.call_in(seconds, again)

        self.call_in(after, again)

    # --- phases ---

    def connect(self, seconds: float) -> None:
        """Starts all workers within some seconds, evenly."""
        each = seconds / len(self.new_workers)
        for number, worker in enumerate(self.new_workers):
            self.call_in(number * each, partial(self.join, worker))
        for router in self.routers:
            self._every(WATCH_INTERVAL_S, partial(router.do, "look at deadlines", router.router.check_deadlines), 0.1)
        self.run(seconds + 2 * WATCH_INTERVAL_S)

    def join(self, worker: SimWorker) -> None:
        self.workers[worker.worker_id] = worker
        worker.connect()
        self._every(HEARTBEAT_INTERVAL_S, worker.beat, self._random.uniform(0.0, HEARTBEAT_INTERVAL_S))
        self._every(CHANGES_INTERVAL_S, worker.tell_changes, self._random.uniform(0.0, CHANGES_INTERVAL_S))

    def open_links(self, senders: Sequence[SimWorker] | None = None) -> None:
        """Opens each link that the watched router wants."""
        for sender in senders if senders is not None else list(self.workers.values()):
            for worker_id in self.named_to(sender):
                if worker_id not in sender.links and worker_id != sender.worker_id:
                    sender.open_link(self.workers[worker_id])
                    self.settle()

    def named_to(self, sender: SimWorker) -> list[str]:
        registry = self.watched.router.workers
        registered = registry.get(sender.worker_id)
        if registered is None or not registered.sends:
            return []
        return [peer.worker_id for peer in registry.peers_of(registered)]

    def begin_load(self) -> None:
        for number, router in enumerate(self.routers):
            if len(self.routers) > 1:
                self._every(INTERVAL_S, router.tell_counts, INTERVAL_S * number / len(self.routers))
            self._every(LIVE_INTERVAL_S, partial(router.do, "sample for the page", router.frames.sample), 0.5)
            self._every(INTERVAL_S, router.close_ended, self._random.uniform(0.0, INTERVAL_S))
        self._every(PLAN_INTERVAL_S, self._plan, 0.3)
        routers = itertools.cycle(self.routers)
        self._every(1.0 / self._rate, lambda: next(routers).submit(self._random.choice(self._prompts)), 0.0)

    def _plan(self) -> None:
        leans = self._planner.leans
        demands = {}
        for router in self.routers:
            demands[router.address] = router.do("exchange leans", partial(router.router.exchange_leans, leans))
        with self.of_supervisor.counted("plan of roles"):
            self._planner.plan(demands)
        self.of_supervisor.add("plan of roles", 0, len(pickle.dumps((demands, [leans] * len(demands)))), 0.0)

    def _make_prompts(self) -> list[TokenizedPrompt]:
        draw = self._random.randrange
        shared = [draw(1000, 100_000) for _ in range(NUM_PROMPT_TOKENS // 2)]
        prompts = []
        for _ in range(NUM_PROMPTS):
            token_ids = (*shared, *(draw(1000, 100_000) for _ in range(NUM_PROMPT_TOKENS - len(shared))))
            identities = prefix_identities(token_ids, PAGE_SIZE, "")
            self.identities[token_ids] = b"".join(i.to_bytes(8, "little") for i in identities)
            prompts.append(TokenizedPrompt(token_ids, {RECEIVED: now_ns()}, "", "", {PAGE_SIZE: identities}))
        return prompts
