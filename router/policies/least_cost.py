"""The workers at which a request costs all requests the least (router/policies/cost_model.py)."""

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from router.candidates import Candidates
from router.objectives import Objectives
from router.policies import cost_model
from router.policies.base import RoutingRequest
from router.policies.cost_model import LATE, Line, Load, PromptCost, Speed
from router.policies.prefix_policy import PrefixPolicy
from router.worker import Estimate, Pair, Worker

# Among those that cost nearly the same chance decides, anew whenever a worker's load has changed: routers that see each
# other's choices late must not all make the same one. This is a thousandth of an objective.
TIE_COST = 1e-3


@dataclass(slots=True)
class _Costs:
    """What a worker costs, as long as its load and its speed are these.

    Attributes:
        load_number: which ones.
        prompt_tie, decode_tie: what is added, so that not all routers take the same of equals.
        room: tokens of a request for which there is memory.
    """

    load_number: int
    load: Load
    speed: Speed
    prompt: PromptCost
    prompt_tie: float
    decode: Line
    decode_tie: float
    room: int


class LeastCost(PrefixPolicy):
    """Reckons for each worker what it costs to compute the prompt there, and what to decode there, and takes the pair
    with the least of both and of the handover, which a worker that does both is spared."""

    def __init__(self, seed: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._random = random.Random(seed)
        self._objectives = Objectives()
        self._costs: dict[Worker, _Costs] = {}

    def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
        num_tokens = len(request.token_ids)
        alone, senders, receivers = candidates.alone(), candidates.senders(), candidates.receivers()
        prefills, decodes = _union(alone, senders), _union(alone, receivers)
        workers = _union(prefills, decodes)
        cached, expected = self.num_cached(workers, request)
        self._reckon(workers, request.objectives)
        prompt = self._prompt_costs(prefills, cached, num_tokens)
        decode = self._decode_costs(decodes, expected, num_tokens)
        # To decode it at another worker costs so much more.
        handed_over = self._handed_over(receivers, decode, expected, num_tokens)
        apart = candidates.least_apart({w: prompt[w] for w in senders}, handed_over)
        both = {worker: prompt[worker] + decode[worker] for worker in alone}
        here = min(both, key=both.__getitem__, default=None)
        together = None if here is None else Pair(here, here)
        chosen, other = apart or together, None
        assert chosen is not None, "there is no candidate"
        if here is not None and apart is not None and together is not None:
            is_apart = prompt[apart.prefill] + handed_over[apart.decode] < both[here]
            chosen, other = (apart, together) if is_apart else (together, apart)
        return Pair(chosen.prefill, chosen.decode, self._estimate(chosen, other, cached, expected, num_tokens))

    def worker_lost(self, worker: Worker, reason: str) -> None:
        super().worker_lost(worker, reason)
        self._costs.pop(worker, None)

    def _reckon(self, workers: Iterable[Worker], objectives: Objectives) -> None:
        """Brings the costs of those up to date that have changed: few have between two choices."""
        if objectives != self._objectives:
            self._objectives = objectives
            self._costs.clear()
        known = self._costs
        for worker in workers:
            costs = known.get(worker)
            if costs is None or costs.load_number != worker.load_number:
                known[worker] = self._costs_of(worker)

    def _prompt_costs(
        self, workers: Iterable[Worker], cached: Mapping[Worker, int], num_tokens: int
    ) -> dict[Worker, float]:
        costs = self._costs
        found: dict[Worker, float] = {}
        # PromptCost.at, without a call for each.
        for worker in workers:
            of = costs[worker]
            wait, token, attended, others = of.prompt
            num_to_compute = num_tokens - cached[worker] if worker in cached else num_tokens
            computing = num_to_compute * (token + attended * (num_tokens - 0.5 * num_to_compute))
            due = wait + computing
            if due > 1.0:
                due += (LATE - 1.0) * (due - 1.0)
            found[worker] = due + others * computing + of.prompt_tie
        return found

    def _decode_costs(
        self, workers: Iterable[Worker], expected: Mapping[Worker, int], num_tokens: int
    ) -> dict[Worker, float]:
        costs = self._costs
        found: dict[Worker, float] = {}
        for worker in workers:
            of = costs[worker]
            due, due_slope, extra, extra_slope = of.decode
            due += due_slope * num_tokens
            if due > 1.0:
                due += (LATE - 1.0) * (due - 1.0)
            found[worker] = due + extra + extra_slope * num_tokens + of.decode_tie
            if num_tokens > of.room:
                num_to_store = num_tokens - expected.get(worker, 0)
                found[worker] += cost_model.memory_cost(of.load, of.speed, self._objectives, num_to_store)
        return found

    def _handed_over(
        self, workers: Sequence[Worker], costs: Mapping[Worker, float], expected: Mapping[Worker, int], num_tokens: int
    ) -> dict[Worker, float]:
        """What these cost with a handover to them."""
        if not workers:
            return {}
        fixed = self._ship_cost(workers[0], 0)
        token = self._ship_cost(workers[0], 1) - fixed
        all_of_it = fixed + token * num_tokens
        found = {worker: costs[worker] + all_of_it for worker in workers}
        for worker, num_expected in expected.items():
            if worker in found:
                found[worker] -= token * num_expected
        return found

    def _ship_cost(self, decode: Worker, num_to_ship: int) -> float:
        """Args: num_to_ship: tokens that the decode worker has not cached."""
        num_pages = num_to_ship / decode.page_size
        return cost_model.handover_cost(decode.rates.handover_s, num_pages, self._objectives)

    def _estimate(
        self,
        pair: Pair,
        other: Pair | None,
        cached: Mapping[Worker, int],
        expected: Mapping[Worker, int],
        num_tokens: int,
    ) -> Estimate:
        """Args: other: the best pair of the other placement."""
        num_to_compute = num_tokens - cached.get(pair.prefill, 0)
        prefill, decode = self._costs[pair.prefill], self._costs[pair.decode]
        reason = "only"
        if other is not None:
            own, others = (self._terms(p, cached, expected, num_tokens) for p in (pair, other))
            reason = max(own, key=lambda name: others[name] - own[name])
        return Estimate(
            num_to_compute,
            reason,
            cost_model.ttft_s(prefill.load, prefill.speed, num_to_compute, num_tokens),
            cost_model.itl_s(decode.load, decode.speed, num_tokens),
            num_tokens - expected.get(pair.decode, 0),
        )

    def _terms(
        self, pair: Pair, cached: Mapping[Worker, int], expected: Mapping[Worker, int], num_tokens: int
    ) -> dict[str, float]:
        """A pair's cost, in its parts."""
        prefill, decode = self._costs[pair.prefill], self._costs[pair.decode]
        num_to_compute = num_tokens - cached.get(pair.prefill, 0)
        prompt = cost_model.prompt_terms(prefill.load, prefill.speed, self._objectives, num_to_compute, num_tokens)
        num_to_store = num_tokens - expected.get(pair.decode, 0)
        rest = cost_model.decode_terms(decode.load, decode.speed, self._objectives, num_tokens, num_to_store)
        rest["interference"] += prompt.pop("interference")
        is_apart = pair.prefill is not pair.decode
        ship = self._ship_cost(pair.decode, num_to_store) if is_apart else 0.0
        return prompt | rest | {"handover": ship}

    def _costs_of(self, worker: Worker) -> _Costs:
        objectives = self._objectives
        load = Load(
            worker.num_pending_tokens,
            worker.num_decoding,
            worker.num_kv_tokens,
            worker.num_pool_tokens,
            worker.num_held_tokens,
        )
        speed = Speed(worker.forward_times, worker.rates.mean_output_tokens)
        return _Costs(
            worker.load_number,
            load,
            speed,
            cost_model.prompt_cost(load, speed, objectives),
            TIE_COST * self._random.random(),
            cost_model.decode_line(load, speed, objectives),
            TIE_COST * self._random.random(),
            cost_model.num_free_tokens(load),
        )


def _union(workers: list[Worker], others: list[Worker]) -> list[Worker]:
    """All of both, each once; in a cluster of equals both are the same."""
    return workers if workers == others else list(dict.fromkeys((*workers, *others)))
