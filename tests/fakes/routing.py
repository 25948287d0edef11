"""Inputs for routing policies, a policy that records its calls, and a checker of the policy interface."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tandem.router.policies.base import AttemptFailure, RequestEnd, RoutingPolicy, RoutingRequest
from tandem.router.workers.candidates import Candidates
from tandem.router.workers.worker import Pair, Worker
from tests.fakes.scripted_worker import hello


def routing_request(token_ids: Sequence[int] = (1, 2, 3), **fields: Any) -> RoutingRequest:
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
    """LeastLoaded without chance: among equals, the pair whose prefill worker joined first."""

    def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
        return candidates.least(lambda worker: worker.num_assigned, lambda worker: worker.num_assigned)


class AnyPair(RoutingPolicy):
    """Choose a random pair, mostly one with a handover if there is one."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
        apart = [pair for pair in candidates if pair.prefill is not pair.decode]
        return self._random.choice(apart if apart and self._random.randrange(4) else candidates)


def make_candidates(num_prefill: int, num_decode: int) -> Candidates:
    """Link each prefill worker to each decode worker, all without load."""
    prefills, decodes = _workers("prefill", num_prefill), _workers("decode", num_decode)
    for prefill in prefills:
        link(prefill, *decodes)
    return Candidates({worker.worker_id: worker for worker in (*prefills, *decodes)})


def link(prefill: Worker, *decodes: Worker) -> None:
    prefill.decode_workers.update((decode.worker_id, decode) for decode in decodes)


def assign_load(pair: Pair, num_tokens: int = 0) -> Pair:
    """Add a request with `num_tokens` to prefill to the workers' loads."""
    pair.prefill.num_assigned += 1
    pair.decode.num_assigned += 1
    pair.prefill.num_pending_tokens += num_tokens
    return pair


def choose_in_turn(policy: RoutingPolicy, candidates: Candidates, count: int) -> Counter[str]:
    """Count the choices of each worker over `count` requests, none of which ends."""
    counts: Counter[str] = Counter()
    for i in range(count):
        pair = assign_load(policy.choose(candidates, routing_request([i])))
        counts.update([pair.prefill.worker_id, pair.decode.worker_id])
    return counts


def _workers(role: str, count: int) -> list[Worker]:
    return [Worker(hello(f"{role}{i}", role), lambda _: None, lambda _: None, 0.0, 0.0) for i in range(count)]


class RecordingPolicy(RoutingPolicy):
    """Choose the first pair; raise in the configured methods.

    Attributes:
        calls: method name and arguments of each call, in order.
        loads: for each call about a pair, its prefill worker's requests at that time.
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
    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url


class CheckedPolicy(RoutingPolicy):
    """Delegate the choice to another policy, and check the order of the calls against the interface.

    Attributes:
        violations: violations in order; the router would only log an error raised in a hook.
        open_requests: for each unfinished request its pair, or None if its attempt has failed.
        starts: (request, attempt) in starting order.
        failures: number of failed attempts, by kind.
        losses: reasons for lost workers.
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
