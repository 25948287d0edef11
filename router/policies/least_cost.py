"""The workers at which a request costs all requests the least (router/policies/cost_model.py)."""

import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from tandem.router.policies import cost_model
from tandem.router.policies.base import RoutingRequest
from tandem.router.policies.cost_model import Line, Load, PromptCost, Speed
from tandem.router.policies.prefix_policy import PrefixPolicy
from tandem.router.workers.candidates import Candidates
from tandem.router.workers.distance import DISTANCES
from tandem.router.workers.objectives import DEFAULT_OBJECTIVES, Objectives
from tandem.router.workers.worker import Estimate, Pair, Worker

# Among those that cost nearly the same chance decides, anew whenever a worker's load has changed: routers that see each
# other's choices late must not all make the same one. This is a thousandth of an objective.
TIE_COST = 1e-3


class _Costs:
    """What workers cost, one beside the other: few of them change between two choices.

    Attributes:
        workers: in the order of the others.
        prompts, decodes: of each.
        rooms: tokens of a request for which each has memory.
    """

    def __init__(self, random: random.Random) -> None:
        self.workers: list[Worker] = []
        self.prompts: list[PromptCost] = []
        self.decodes: list[Line] = []
        self.rooms: list[int] = []
        self._load_numbers: list[int] = []
        self._objectives = DEFAULT_OBJECTIVES
        self._random = random

    def update(self, workers: list[Worker], objectives: Objectives) -> None:
        """They are those of these workers, as they are now."""
        if workers != self.workers or objectives != self._objectives:
            self.workers, self._objectives = workers, objectives
            self._load_numbers = [-1] * len(workers)
            nothing = Line(0.0, 0.0, 0.0, 0.0)
            self.prompts = [PromptCost(0.0, 0.0, 0.0, 0.0)] * len(workers)
            self.decodes, self.rooms = [nothing] * len(workers), [0] * len(workers)
        known = self._load_numbers
        for i in [
            i for i, (worker, number) in enumerate(zip(workers, known, strict=True)) if worker.load_number != number
        ]:
            known[i] = workers[i].load_number
            self._reckon(i, workers[i])

    def of_prompt(self, cached: Mapping[Worker, int], num_tokens: int) -> dict[Worker, float]:
        """A prompt's. Args: cached: of its tokens, by workers; others have none."""
        nums = [num_tokens - cached[worker] if worker in cached else num_tokens for worker in self.workers]
        return dict(zip(self.workers, cost_model.prompt_costs(self.prompts, nums, num_tokens), strict=True))

    def of_decoding(self, expected: Mapping[Worker, int], num_tokens: int) -> list[float]:
        """A request's, without a handover. Args: expected: of its tokens, by workers; others have none."""
        found = cost_model.line_costs(self.decodes, num_tokens)
        if min(self.rooms, default=0) < num_tokens:
            for i, (worker, room) in enumerate(zip(self.workers, self.rooms, strict=True)):
                num_to_store = num_tokens - expected.get(worker, 0)
                if room < num_to_store:
                    load, speed = load_of(worker), speed_of(worker)
                    found[i] += cost_model.memory_cost(load, speed, self._objectives, num_to_store)
        return found

    def _reckon(self, i: int, worker: Worker) -> None:
        load, speed = load_of(worker), speed_of(worker)
        some = self._random.random
        prompt = cost_model.prompt_cost(load, speed, self._objectives)
        decode = cost_model.decode_line(load, speed, self._objectives)
        self.prompts[i] = prompt._replace(extra=TIE_COST * some())
        self.decodes[i] = decode._replace(extra=decode.extra + TIE_COST * some())
        self.rooms[i] = cost_model.num_free_tokens(load)


class LeastCost(PrefixPolicy):
    """Reckons for each worker what it costs to compute the prompt there, and what to decode there, and takes the pair
    with the least of both and of the handover, which a worker that does both is spared."""

    def __init__(self, seed: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        chance = random.Random(seed)
        self._prefills, self._decodes = _Costs(chance), _Costs(chance)

    def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
        num_tokens, objectives = len(request.token_ids), request.objectives
        alone, senders, receivers = candidates.alone(), candidates.senders(), candidates.receivers()
        prefills, decodes = _union(alone, senders), _union(alone, receivers)
        are_equals = prefills == decodes
        cached, expected = self.num_cached(prefills if are_equals else [*prefills, *decodes], request)
        of_prefills, of_decodes = self._prefills, self._prefills if are_equals else self._decodes
        of_prefills.update(prefills, objectives)
        of_decodes.update(decodes, objectives)
        prompt = of_prefills.of_prompt(cached, num_tokens)
        decodings = of_decodes.of_decoding(expected, num_tokens)
        # To decode it at another worker costs so much more, and the more the further that is away.
        distances = DISTANCES if candidates.spans_hosts else DISTANCES[:1]
        handed_over = [
            _handed_over(receivers, decodes, decodings, expected, num_tokens, objectives, at) for at in distances
        ]
        decode = dict(zip(decodes, decodings, strict=True)) if alone else {}
        of_senders = prompt if senders == prefills else {worker: prompt[worker] for worker in senders}
        apart = candidates.least_apart(of_senders, *handed_over)
        both = {worker: prompt[worker] + decode[worker] for worker in alone}
        here = min(both, key=both.__getitem__, default=None)
        together = None if here is None else Pair(here, here)
        chosen, other = apart or together, None
        assert chosen is not None, "there is no candidate"
        if here is not None and apart is not None and together is not None:
            is_apart = prompt[apart.prefill] + handed_over[apart.distance or 0][apart.decode] < both[here]
            chosen, other = (apart, together) if is_apart else (together, apart)
        estimate = self._estimate(chosen, other, cached, expected, prefills, num_tokens, objectives)
        return Pair(chosen.prefill, chosen.decode, estimate)

    def _estimate(
        self,
        pair: Pair,
        other: Pair | None,
        cached: Mapping[Worker, int],
        expected: Mapping[Worker, int],
        prefills: Collection[Worker],
        num_tokens: int,
        objectives: Objectives,
    ) -> Estimate:
        """Args: other: the best pair of the other placement; prefills: workers that could compute the prompt."""
        num_to_compute = num_tokens - cached.get(pair.prefill, 0)
        reason = "only"
        if other is not None:
            own, others = (_terms(p, cached, expected, num_tokens, objectives) for p in (pair, other))
            reason = max(own, key=lambda name: others[name] - own[name])
        return Estimate(
            num_to_compute,
            reason,
            cost_model.ttft_s(load_of(pair.prefill), speed_of(pair.prefill), num_to_compute, num_tokens),
            cost_model.itl_s(load_of(pair.decode), speed_of(pair.decode), num_tokens),
            num_tokens - expected.get(pair.decode, 0),
            num_tokens - _usually_cached(cached, prefills),
        )


def _usually_cached(cached: Mapping[Worker, int], workers: Collection[Worker]) -> int:
    """So many tokens have half of the workers cached at most."""
    if 2 * len(cached) <= len(workers):
        return 0
    having = sorted(cached[worker] for worker in workers if worker in cached)
    index = len(having) - 1 - len(workers) // 2
    return having[index] if index >= 0 else 0


def load_of(worker: Worker) -> Load:
    return Load(
        worker.num_pending_tokens,
        worker.num_decoding,
        worker.num_kv_tokens,
        worker.num_pool_tokens,
        worker.num_held_tokens,
        worker.max_decoding,
        worker.lean,
    )


def speed_of(worker: Worker) -> Speed:
    return Speed(worker.forward_times, worker.rates.mean_output_tokens)


def _terms(
    pair: Pair, cached: Mapping[Worker, int], expected: Mapping[Worker, int], num_tokens: int, objectives: Objectives
) -> dict[str, float]:
    """A pair's cost, in its parts."""
    of_prefill = load_of(pair.prefill), speed_of(pair.prefill), objectives
    of_decode = load_of(pair.decode), speed_of(pair.decode), objectives
    num_to_store = num_tokens - expected.get(pair.decode, 0)
    prompt = cost_model.prompt_terms(*of_prefill, num_tokens - cached.get(pair.prefill, 0), num_tokens)
    rest = cost_model.decode_terms(*of_decode, num_tokens, num_to_store)
    for both in ("interference", "role"):
        rest[both] += prompt.pop(both)
    distance = pair.distance
    ship = _ship_cost(pair.decode, num_to_store, objectives, distance) if distance is not None else 0.0
    return prompt | rest | {"handover": ship}


def _handed_over(
    receivers: list[Worker],
    decodes: list[Worker],
    costs: Sequence[float],
    expected: Mapping[Worker, int],
    num_tokens: int,
    objectives: Objectives,
    distance: int,
) -> dict[Worker, float]:
    """What the receivers cost with a handover to them from so far away.

    Args:
        costs: of `decodes`, which they are among, without one.
    """
    if not receivers:
        return {}
    fixed = _ship_cost(receivers[0], 0, objectives, distance)
    token = _ship_cost(receivers[0], 1, objectives, distance) - fixed
    all_of_it = fixed + token * num_tokens
    found = dict(zip(decodes, [cost + all_of_it for cost in costs], strict=True))
    for worker, num_expected in expected.items():
        if worker in found:
            found[worker] -= token * num_expected
    return found if receivers == decodes else {worker: found[worker] for worker in receivers}


def _ship_cost(decode: Worker, num_to_ship: int, objectives: Objectives, distance: int) -> float:
    """Args: num_to_ship: tokens that the decode worker has not cached."""
    num_pages = num_to_ship / decode.page_size
    return cost_model.handover_cost(decode.rates.handover_s(distance), num_pages, objectives)


def _union(workers: list[Worker], others: list[Worker]) -> list[Worker]:
    """All of both, each once; in a cluster of equals both are the same."""
    if not workers or not others or workers == others:
        return workers or others
    return list(dict.fromkeys((*workers, *others)))
