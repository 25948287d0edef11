"""The policy that costs all requests the least (router/policies/cost_model.py)."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tandem.router.policies import cost_model
from tandem.router.policies.base import RoutingRequest
from tandem.router.policies.loads import LoadOption
from tandem.router.policies.pair_search import PairSearch
from tandem.router.policies.prefix_policy import PrefixPolicy
from tandem.router.policies.worker_costs import Floats, WorkerCosts
from tandem.router.workers.candidates import Candidates
from tandem.router.workers.distance import DISTANCES
from tandem.router.workers.objectives import Objectives
from tandem.router.workers.worker import Estimate, Pair, Worker


class LeastCost(PrefixPolicy):
    """Chooses the pair with the least sum of prefill, decode and handover cost."""

    def __init__(self, seed: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._costs = WorkerCosts(random.Random(seed))
        self._roles = _Roles([], [], [], spans_hosts=False)

    def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
        num_tokens, objectives = len(request.token_ids), request.objectives
        roles = self._roles_of(candidates)
        cached, expected = self.num_cached(roles.workers, request)
        costs = self._costs
        costs.update(roles.workers, objectives)
        ready, arriving = costs.of(cached), costs.of(expected)
        prefill_costs, decode_costs = costs.prefill(ready, num_tokens), costs.decode(arriving, num_tokens)
        options = self.load_options(roles.prefills, request, cached)
        ready, seconds = self._plan_loads(prefill_costs, ready, options, num_tokens)
        plan = _LoadPlan(costs.places, ready, seconds)

        apart = together = None
        apart_cost = alone_cost = 0.0
        if roles.alone:
            alone_costs = (prefill_costs + decode_costs)[roles.alone_at]
            number = int(alone_costs.argmin())
            together, alone_cost = Pair(roles.alone[number], roles.alone[number]), float(alone_costs[number])
        if roles.senders and roles.receivers:
            after = _after_handover(roles, decode_costs, arriving, num_tokens, objectives)
            found = roles.search.least(candidates.links_of, prefill_costs[roles.senders_at], after)
            if found is not None:
                sender, receiver, apart_cost = found
                apart = Pair(roles.senders[sender], roles.receivers[receiver])

        chosen, other = apart or together, None
        assert chosen is not None, "there is no candidate"
        if apart is not None and together is not None:
            chosen, other = (apart, together) if apart_cost < alone_cost else (together, apart)
        estimate = self._estimate(chosen, other, plan, expected, roles, num_tokens, objectives)
        return Pair(chosen.prefill, chosen.decode, estimate)

    def _roles_of(self, candidates: Candidates) -> "_Roles":
        now = candidates.alone(), candidates.senders(), candidates.receivers()
        known = self._roles
        if now != (known.alone, known.senders, known.receivers) or candidates.spans_hosts != known.spans_hosts:
            self._roles = _Roles(*now, spans_hosts=candidates.spans_hosts)
        return self._roles

    def _plan_loads(
        self, costs: Floats, ready: Floats, options: Mapping[Worker, Sequence[LoadOption]], num_tokens: int
    ) -> tuple[Floats, dict[Worker, float]]:
        """Takes the cheapest option of each worker, and lowers its cost to it.

        Args:
            costs: of the prompt at each worker without loading.
            ready: leading tokens that a worker has cached.

        Returns:
            Ready tokens with those to be loaded, and the times to load.
        """
        seconds: dict[Worker, float] = {}
        tried = [(worker, num_ready, load_s) for worker, own in options.items() for num_ready, load_s in own]
        if not tried:
            return ready, seconds
        ready = ready.copy()
        option_costs = self._costs.loaded(tried, num_tokens).tolist()
        for (worker, num_ready, load_s), cost in zip(tried, option_costs, strict=True):
            place = self._costs.places[worker]
            if cost < costs[place]:
                costs[place], ready[place], seconds[worker] = cost, num_ready, load_s
        return ready, seconds

    def _estimate(
        self,
        pair: Pair,
        other: Pair | None,
        plan: "_LoadPlan",
        expected: Mapping[Worker, int],
        roles: "_Roles",
        num_tokens: int,
        objectives: Objectives,
    ) -> Estimate:
        """Args: other: best pair of the other placement."""
        num_to_compute = num_tokens - plan.num_ready(pair.prefill)
        reason = "only"
        if other is not None:
            own, others = (_cost_parts(p, plan, expected, num_tokens, objectives) for p in (pair, other))
            reason = max(own, key=lambda name: others[name] - own[name])
        load_s = plan.seconds.get(pair.prefill, 0.0)
        return Estimate(
            num_to_compute,
            reason,
            cost_model.ttft_s(*cost_model.state_of(pair.prefill), num_to_compute, num_tokens, load_s),
            cost_model.itl_s(*cost_model.state_of(pair.decode), num_tokens),
            num_tokens - expected.get(pair.decode, 0),
            num_tokens - _usually(plan.ready[roles.prefills_at]),
        )


class _LoadPlan(NamedTuple):
    """
    Attributes:
        places: index of each worker.
        ready: their leading tokens that need no computing, cached or to be loaded.
        seconds: time to load; workers that load nothing are missing.
    """

    places: Mapping[Worker, int]
    ready: Floats
    seconds: Mapping[Worker, float]

    def num_ready(self, worker: Worker) -> int:
        return int(self.ready[self.places[worker]])


class _Roles:
    """The workers of a choice by their possible parts, which change only with workers and links.

    Attributes:
        workers: all of them, in the order of the costs.
        prefills: workers that may compute the prompt.
        alone_at, senders_at, receivers_at, prefills_at: places among `workers`.
    """

    def __init__(
        self, alone: list[Worker], senders: list[Worker], receivers: list[Worker], *, spans_hosts: bool
    ) -> None:
        self.alone, self.senders, self.receivers, self.spans_hosts = alone, senders, receivers, spans_hosts
        self.prefills = _union(alone, senders)
        self.workers = _union(self.prefills, receivers)
        places = {worker: place for place, worker in enumerate(self.workers)}
        self.alone_at, self.senders_at, self.receivers_at, self.prefills_at = (
            np.array([places[worker] for worker in some], np.intp)
            for some in (alone, senders, receivers, self.prefills)
        )
        self.search = PairSearch(senders, receivers, spans_hosts=spans_hosts)


def _usually(ready: Floats) -> int:
    """Returns the ready tokens that at least half of the workers do not exceed."""
    middle = len(ready) - 1 - len(ready) // 2
    return int(np.partition(ready, middle)[middle])


def _cost_parts(
    pair: Pair, plan: _LoadPlan, expected: Mapping[Worker, int], num_tokens: int, objectives: Objectives
) -> dict[str, float]:
    prefill, decode, distance = pair.prefill, pair.decode, pair.distance
    num_to_store = num_tokens - expected.get(decode, 0)
    num_to_compute = num_tokens - plan.num_ready(prefill)
    load_s = plan.seconds.get(prefill, 0.0)
    parts = cost_model.prompt_parts(*cost_model.state_of(prefill), objectives, num_to_compute, num_tokens, load_s)
    decode_parts = cost_model.decode_parts(*cost_model.state_of(decode), objectives, num_tokens, num_to_store)
    for name, part in decode_parts.items():
        parts[name] = parts.get(name, 0.0) + part
    parts["handover"] = 0.0
    if distance is not None:
        fixed, each = _handover_line(decode, objectives, distance)
        parts["handover"] = fixed + each * num_to_store
    return parts


def _after_handover(
    roles: _Roles, decode_costs: Floats, arriving: Floats, num_tokens: int, objectives: Objectives
) -> list[Floats]:
    """Returns the cost at each receiver after a handover, for each distance.

    Args:
        decode_costs: at each worker without a handover.
        arriving: each worker's tokens that need no shipping.
    """
    own_costs, own_tokens = decode_costs[roles.receivers_at], arriving[roles.receivers_at]
    distances = DISTANCES if roles.spans_hosts else DISTANCES[:1]
    # All workers of a cluster share their rates and page size.
    lines = [_handover_line(roles.receivers[0], objectives, distance) for distance in distances]
    return [own_costs + (fixed + each * num_tokens) - each * own_tokens for fixed, each in lines]


def _handover_line(decode: Worker, objectives: Objectives, distance: int) -> tuple[float, float]:
    return cost_model.handover_line(decode.rates.handover_s(distance), decode.page_size, objectives)


def _union(workers: list[Worker], others: list[Worker]) -> list[Worker]:
    if not workers or not others or workers == others:
        return workers or others
    return list(dict.fromkeys((*workers, *others)))
