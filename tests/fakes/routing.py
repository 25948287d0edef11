"""What a routing policy is asked with, one that keeps a record of all it is told, and one that checks it."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tandem.router.policies.base import AttemptFailure, RequestEnd, RoutingPolicy, RoutingRequest
from tandem.router.workers.candidates import Candidates
from tandem.router.workers.worker import Pair, Worker
from tests.fakes.scripted_worker import hello


def routing_request(token_ids: Sequence[int] = (1, 2, 3), **fields: Any) -> RoutingRequest:
    """A request whose prompt is `token_ids`, and whose other fields are plain."""
    plain: dict[str, Any] = {
        "request_id": "r",
        "attempt": 0,
        "output_ids": (),
        "max_new_tokens": 10,
        "priority": 0,
        "session_id": "",
        "cache_namespace": "",
    }
    return RoutingRequest(prompt_ids=tuple(token_ids), **{**plain, **fields})


class FirstLeastLoaded(RoutingPolicy):
    """As LeastLoaded, but without chance: of equals the pair whose prefill worker joined first."""

    def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
        return candidates.least(lambda worker: worker.num_assigned, lambda worker: worker.num_assigned)


class AnyPair(RoutingPolicy):
    """Any of the pairs that there are; mostly of those that hand over, where there are some."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
        apart = [pair for pair in candidates if pair.prefill is not pair.decode]
        return self._random.choice(apart if apart and self._random.randrange(4) else candidates)


def make_candidates(num_prefill: int, num_decode: int) -> Candidates:
    """Each prefill worker with each decode worker, all without load."""
    prefills, decodes = _workers("prefill", num_prefill), _workers("decode", num_decode)
    for prefill in prefills:
        link(prefill, *decodes)
    return Candidates({worker.worker_id: worker for worker in (*prefills, *decodes)})


def link(prefill: Worker, *decodes: Worker) -> None:
    """Has the prefill worker hand over to these decode workers."""
    prefill.decode_workers.update((decode.worker_id, decode) for decode in decodes)


def assign_load(pair: Pair, num_tokens: int = 0) -> Pair:
    """Has the workers' loads count a request with so many tokens to prefill."""
    pair.prefill.num_assigned += 1
    pair.decode.num_assigned += 1
    pair.prefill.num_pending_tokens += num_tokens
    return pair


def choose_in_turn(policy: RoutingPolicy, candidates: Candidates, count: int) -> Counter[str]:
    """How often each worker is chosen for so many requests, all of which stay."""
    counts: Counter[str] = Counter()
    for i in range(count):
        pair = assign_load(policy.choose(candidates, routing_request([i])))
        counts.update([pair.prefill.worker_id, pair.decode.worker_id])
    return counts


def _workers(role: str, count: int) -> list[Worker]:
    return [Worker(hello(f"{role}{i}", role), lambda _: None, lambda _: None, 0.0, 0.0) for i in range(count)]


class RecordingPolicy(RoutingPolicy):
    """Takes the first pair, and raises where it is told to.

    Attributes:
        calls: name of the method and its arguments, one after the other.
        loads: for each call about a pair: how many requests its prefill worker had then.
        fail_in: names of methods that raise.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.loads: list[int] = []
        self.fail_in: set[str] = set()

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]

    def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
        pair = candidates[0]
        self._record("choose", pair, request)
        return pair

    def attempt_started(self, pair: Pair, request: RoutingRequest) -> None:
        self._record("attempt_started", pair, request)

    def attempt_failed(self, pair: Pair, request: RoutingRequest, kind: AttemptFailure, reason: str) -> None:
        self._record("attempt_failed", pair, request, kind, reason)

    def request_finished(self, pair: Pair | None, request: RoutingRequest, end: RequestEnd) -> None:
        self._record("request_finished", pair, request, end)

    def worker_lost(self, worker: Worker, reason: str) -> None:
        self._record("worker_lost", worker, reason)

    def worker_joined(self, worker: Worker) -> None:
        self._record("worker_joined", worker)

    def _record(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments))
        if isinstance(arguments[0], Pair):
            self.loads.append(arguments[0].prefill.num_assigned)
        if name in self.fail_in:
            raise RuntimeError(f"a mistake in {name}")


class NeedsArguments(RecordingPolicy):
    """A policy that the router cannot make."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url


class CheckedPolicy(RoutingPolicy):
    """Leaves the choice to another policy, and finds out whether the calls come as the interface says.

    Attributes:
        violations: what was wrong, in the order in which it came; the router would only log what a hook raises.
        open_requests: for each request that is not finished: the pair that serves it, None if its attempt has failed.
        starts: request and number of each attempt, in the order in which they began.
        failures: how many attempts have failed, of each kind.
        losses: why workers were lost.
    """

    def __init__(self, policy: RoutingPolicy) -> None:
        self._policy = policy
        self.wants_prefixes = policy.wants_prefixes
        self.violations: list[str] = []
        self.open_requests: dict[str, Pair | None] = {}
        self.starts: list[tuple[str, int]] = []
        self.failures: Counter[AttemptFailure] = Counter()
        self.losses: list[str] = []
        self._chosen: tuple[Pair, RoutingRequest] | None = None
        self._attempts: dict[str, int] = {}
        self._finished: set[str] = set()
        self._workers: set[Worker] = set()

    def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
        self._check(self.open_requests.get(request.request_id) is None, "an attempt is chosen for beside another")
        self._check(request.attempt == self._attempts.get(request.request_id, -1) + 1, "an attempt is left out")
        self._check(request.max_new_tokens >= 1, "nothing is left to do")
        self._check({w for p in candidates for w in (p.prefill, p.decode)} <= self._workers, "a worker is not there")
        pair = self._policy.choose(candidates, request)
        self._chosen = (pair, request)
        return pair

    def attempt_started(self, pair: Pair, request: RoutingRequest) -> None:
        self._check(self._chosen == (pair, request), "what is started was not chosen")
        self._check(request.request_id not in self._finished, "an attempt after the end")
        self.open_requests[request.request_id] = pair
        self._attempts[request.request_id] = request.attempt
        self.starts.append((request.request_id, request.attempt))
        self._policy.attempt_started(pair, request)

    def attempt_failed(self, pair: Pair, request: RoutingRequest, kind: AttemptFailure, reason: str) -> None:
        self._check(self.open_requests.get(request.request_id) is pair, "an attempt fails that is not under way")
        self._check(request.attempt == self._attempts.get(request.request_id), "another attempt fails")
        self.open_requests[request.request_id] = None
        self.failures[kind] += 1
        self._policy.attempt_failed(pair, request, kind, reason)

    def request_finished(self, pair: Pair | None, request: RoutingRequest, end: RequestEnd) -> None:
        self._check(request.request_id in self.open_requests, "a request ends twice, or without an attempt")
        self._check(self.open_requests.pop(request.request_id, None) is pair, "a request ends with other workers")
        self._finished.add(request.request_id)
        self._policy.request_finished(pair, request, end)

    def worker_lost(self, worker: Worker, reason: str) -> None:
        self._check(worker in self._workers, "a worker is lost that had not joined")
        self._workers.discard(worker)
        self.losses.append(reason)
        self._policy.worker_lost(worker, reason)

    def worker_joined(self, worker: Worker) -> None:
        self._check(worker.worker_id not in {w.worker_id for w in self._workers}, "a worker joins beside itself")
        self._workers.add(worker)
        self._policy.worker_joined(worker)

    def _check(self, holds: bool, violation: str) -> None:
        if not holds:
            self.violations.append(violation)
