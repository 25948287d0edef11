"""The policy that costs all requests the least (router/policies/cost_model.py)."""

import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from tandem.router.policies import cost_model
from tandem.router.policies.base import RoutingRequest
from tandem.router.policies.cost_model import CostLine
from tandem.router.policies.loads import LoadOption
from tandem.router.policies.prefix_policy import PrefixPolicy
from tandem.router.workers.candidates import Candidates
from tandem.router.workers.distance import DISTANCES
from tandem.router.workers.objectives import DEFAULT_OBJECTIVES, Objectives
from tandem.router.workers.worker import Estimate, Pair, Worker

# Upper bound of a worker's random tie cost, drawn again when its load changes. Routers see each other's choices late
# and must not all take the same worker.
TIE_COST = 1e-3
_NO_COST = CostLine(0.0, 0.0, 0.0, 0.0)


class _WorkerCosts:
    """Cost lines of workers; `update` recomputes those whose load has changed.

    Attributes:
        prefills, decodes: cost lines with a random tie cost.
        token_times: seconds per prompt token and per attended token.
        rooms: free tokens of the pools.
    """

    def __init__(self, random: random.Random) -> None:
        self.workers: list[Worker] = []
        self.prefills: list[CostLine] = []
        self.decodes: list[CostLine] = []
        self.token_times: list[tuple[float, float]] = []
        self.rooms: list[int] = []
        self._load_numbers: list[int] = []
        self._objectives = DEFAULT_OBJECTIVES
        self._random = random

    def update(self, workers: list[Worker], objectives: Objectives) -> None:
        if workers != self.workers or objectives != self._objectives:
            self.workers, self._objectives = workers, objectives
            count = len(workers)
            self._load_numbers = [-1] * count
            self.prefills, self.decodes = [_NO_COST] * count, [_NO_COST] * count
            self.token_times, self.rooms = [(0.0, 0.0)] * count, [0] * count
        known = self._load_numbers
        for i in [
            i for i, (worker, number) in enumerate(zip(workers, known, strict=True)) if worker.load_number != number
        ]:
            known[i] = workers[i].load_number
            self._compute(i, workers[i])

    def prefill_costs(self, cached: Mapping[Worker, int], num_tokens: int) -> dict[Worker, float]:
        nums = [num_tokens - cached[worker] if worker in cached else num_tokens for worker in self.workers]
        seconds = cost_model.compute_times(self.token_times, nums, num_tokens)
        return dict(zip(self.workers, cost_model.line_costs(self.prefills, seconds), strict=True))

    def load_costs(self, options: Sequence[tuple[Worker, int, float]], num_tokens: int) -> list[float]:
        """Returns the cost of each option: worker, leading tokens that need no computing, seconds to load."""
        places = {worker: place for place, worker in enumerate(self.workers)}
        times = [self.token_times[places[worker]] for worker, _, _ in options]
        seconds = cost_model.compute_times(times, [num_tokens - ready for _, ready, _ in options], num_tokens)
        lines = [
            cost_model.loaded_prefill_line(
                self.prefills[places[worker]],
                worker.num_pending_tokens * worker.forward_times.prompt_token_s,
                load_s,
                self._objectives,
            )
            for worker, _, load_s in options
        ]
        return cost_model.line_costs(lines, seconds)

    def decode_costs(self, expected: Mapping[Worker, int], num_tokens: int) -> list[float]:
        """Returns the cost at each worker without a handover.

        Args:
            expected: tokens cached or arriving.
        """
        costs = cost_model.line_costs(self.decodes, [num_tokens] * len(self.decodes))
        if min(self.rooms, default=0) < num_tokens:
            for i, (worker, room) in enumerate(zip(self.workers, self.rooms, strict=True)):
                num_to_store = num_tokens - expected.get(worker, 0)
                if room < num_to_store:
                    costs[i] += cost_model.memory_cost(*cost_model.state_of(worker), self._objectives, num_to_store)
        return costs

    def _compute(self, i: int, worker: Worker) -> None:
        load, speed = cost_model.state_of(worker)
        chance = self._random.random
        prefill = cost_model.prefill_line(load, speed, self._objectives)
        decode = cost_model.decode_line(load, speed, self._objectives)
        self.prefills[i] = prefill._replace(extra=TIE_COST * chance())
        self.decodes[i] = decode._replace(extra=decode.extra + TIE_COST * chance())
        self.token_times[i] = speed.times.prompt_token_s, speed.times.attended_token_s
        self.rooms[i] = cost_model.num_free_tokens(load)


class LeastCost(PrefixPolicy):
    """Chooses the pair with the least sum of prefill, decode and handover cost."""

    def __init__(self, seed: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        chance = random.Random(seed)
        self._prefills, self._decodes = _WorkerCosts(chance), _WorkerCosts(chance)

    def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
        num_tokens, objectives = len(request.token_ids), request.objectives
        alone, senders, receivers = candidates.alone(), candidates.senders(), candidates.receivers()
        prefills, decodes = _union(alone, senders), _union(alone, receivers)
        are_equal = prefills == decodes
        cached, expected = self.num_cached(prefills if are_equal else [*prefills, *decodes], request)
        of_prefills, of_decodes = self._prefills, self._prefills if are_equal else self._decodes
        of_prefills.update(prefills, objectives)
        of_decodes.update(decodes, objectives)
        prefill_costs = of_prefills.prefill_costs(cached, num_tokens)
        plan = self._plan_loads(prefill_costs, self.load_options(prefills, request, cached), cached, request)
        decode_costs = of_decodes.decode_costs(expected, num_tokens)
        local_decode_costs = decode_costs
        if request.adapter is not None:
            # A single worker loads an adapter once.
            for worker in prefill_costs:
                prefill_costs[worker] += _adapter_cost(worker, request)
            decode_costs = [
                cost + _adapter_cost(worker, request) for worker, cost in zip(decodes, decode_costs, strict=True)
            ]

        distances = DISTANCES if candidates.spans_hosts else DISTANCES[:1]
        receiver_costs = [
            _receiver_costs(receivers, decodes, decode_costs, expected, num_tokens, objectives, distance)
            for distance in distances
        ]
        sender_costs = prefill_costs if senders == prefills else {worker: prefill_costs[worker] for worker in senders}
        apart = candidates.least_apart(sender_costs, *receiver_costs)

        local_costs = dict(zip(decodes, local_decode_costs, strict=True)) if alone else {}
        alone_costs = {worker: prefill_costs[worker] + local_costs[worker] for worker in alone}
        here = min(alone_costs, key=alone_costs.__getitem__, default=None)
        together = None if here is None else Pair(here, here)

        chosen, other = apart or together, None
        assert chosen is not None, "there is no candidate"
        if here is not None and apart is not None and together is not None:
            apart_cost = prefill_costs[apart.prefill] + receiver_costs[apart.distance or 0][apart.decode]
            chosen, other = (apart, together) if apart_cost < alone_costs[here] else (together, apart)
        estimate = self._estimate(chosen, other, plan, expected, prefills, num_tokens, request)
        return Pair(chosen.prefill, chosen.decode, estimate)

    def _plan_loads(
        self,
        costs: dict[Worker, float],
        options: Mapping[Worker, Sequence[LoadOption]],
        cached: Mapping[Worker, int],
        request: RoutingRequest,
    ) -> "_LoadPlan":
        """Takes the cheapest option of each worker, and lowers its cost to it.

        Args:
            costs: of the prompt at each worker without loading.
        """
        if not options:
            return _LoadPlan(cached, {})
        num_tokens = len(request.token_ids)
        tried = [(worker, num_ready, load_s) for worker, own in options.items() for num_ready, load_s in own]
        option_costs = self._prefills.load_costs(tried, num_tokens)
        ready, seconds = dict(cached), {}
        for (worker, num_ready, load_s), cost in zip(tried, option_costs, strict=True):
            if cost < costs[worker]:
                costs[worker], ready[worker], seconds[worker] = cost, num_ready, load_s
        return _LoadPlan(ready, seconds)

    def _estimate(
        self,
        pair: Pair,
        other: Pair | None,
        plan: "_LoadPlan",
        expected: Mapping[Worker, int],
        prefills: Collection[Worker],
        num_tokens: int,
        request: RoutingRequest,
    ) -> Estimate:
        """
        Args:
            other: best pair of the other placement.
            prefills: workers that could compute the prompt.
        """
        num_to_compute = num_tokens - plan.ready.get(pair.prefill, 0)
        reason = "only"
        if other is not None:
            own, others = (_cost_parts(p, plan, expected, num_tokens, request) for p in (pair, other))
            reason = max(own, key=lambda name: others[name] - own[name])
        load_s = max(plan.seconds.get(pair.prefill, 0.0), pair.prefill.adapters.wait_s(request.adapter))
        return Estimate(
            num_to_compute,
            reason,
            cost_model.ttft_s(*cost_model.state_of(pair.prefill), num_to_compute, num_tokens, load_s),
            cost_model.itl_s(*cost_model.state_of(pair.decode), num_tokens),
            num_tokens - expected.get(pair.decode, 0),
            num_tokens - _usually_cached(plan.ready, prefills),
        )


class _LoadPlan(NamedTuple):
    """
    Attributes:
        ready: leading tokens that need no computing, cached or to be loaded.
        seconds: time to load.
    """

    ready: Mapping[Worker, int]
    seconds: Mapping[Worker, float]


def _usually_cached(cached: Mapping[Worker, int], workers: Collection[Worker]) -> int:
    """Returns the cached tokens that at least half of the workers do not exceed."""
    if 2 * len(cached) <= len(workers):
        return 0
    having = sorted(cached[worker] for worker in workers if worker in cached)
    index = len(having) - 1 - len(workers) // 2
    return having[index] if index >= 0 else 0


def _adapter_cost(worker: Worker, request: RoutingRequest) -> float:
    """Returns the cost of waiting for the request's adapter at a worker."""
    wait_s = worker.adapters.wait_s(request.adapter)
    # More than the random cost of ties, also for short waits.
    return cost_model.late(wait_s / request.objectives.ttft_s) + 2.0 * TIE_COST if wait_s else 0.0


def _cost_parts(
    pair: Pair, plan: _LoadPlan, expected: Mapping[Worker, int], num_tokens: int, request: RoutingRequest
) -> dict[str, float]:
    objectives = request.objectives
    prefill, decode, distance = pair.prefill, pair.decode, pair.distance
    num_to_store = num_tokens - expected.get(decode, 0)
    num_to_compute = num_tokens - plan.ready.get(prefill, 0)
    load_s = plan.seconds.get(prefill, 0.0)
    parts = cost_model.prompt_parts(*cost_model.state_of(prefill), objectives, num_to_compute, num_tokens, load_s)
    decode_parts = cost_model.decode_parts(*cost_model.state_of(decode), objectives, num_tokens, num_to_store)
    for name, part in decode_parts.items():
        parts[name] = parts.get(name, 0.0) + part
    parts["load"] += sum(_adapter_cost(worker, request) for worker in dict.fromkeys((prefill, decode)))
    parts["handover"] = 0.0
    if distance is not None:
        fixed, each = _handover_line(decode, objectives, distance)
        parts["handover"] = fixed + each * num_to_store
    return parts


def _receiver_costs(
    receivers: list[Worker],
    decodes: list[Worker],
    decode_costs: Sequence[float],
    expected: Mapping[Worker, int],
    num_tokens: int,
    objectives: Objectives,
    distance: int,
) -> dict[Worker, float]:
    """Returns the cost at each receiver after a handover.

    Args:
        decodes, decode_costs: workers, all receivers among them, and their costs without a handover.
    """
    if not receivers:
        return {}
    # All workers of a cluster share their rates and page size.
    fixed, each = _handover_line(receivers[0], objectives, distance)
    whole = fixed + each * num_tokens
    costs = dict(zip(decodes, [cost + whole for cost in decode_costs], strict=True))
    for worker, num_expected in expected.items():
        if worker in costs:
            costs[worker] -= each * num_expected
    return costs if receivers == decodes else {worker: costs[worker] for worker in receivers}


def _handover_line(decode: Worker, objectives: Objectives, distance: int) -> tuple[float, float]:
    return cost_model.handover_line(decode.rates.handover_s(distance), decode.page_size, objectives)


def _union(workers: list[Worker], others: list[Worker]) -> list[Worker]:
    if not workers or not others or workers == others:
        return workers or others
    return list(dict.fromkeys((*workers, *others)))
