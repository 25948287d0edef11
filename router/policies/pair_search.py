"""The cheapest pair of a prefill and a decode worker among hundreds of each."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tandem.router.policies.worker_costs import Floats
from tandem.router.workers.distance import DISTANCES, distance, place_at
from tandem.router.workers.worker import Worker


class PairSearch:
    """Finds the cheapest linked pairs of given workers. Bounds by place leave few prefill workers to look at."""

    def __init__(self, senders: Sequence[Worker], receivers: Sequence[Worker], *, spans_hosts: bool) -> None:
        """Args: spans_hosts: costs depend on the distance."""
        self._senders, self._receivers = senders, receivers
        self._numbers = {worker: number for number, worker in enumerate(receivers)}
        self._tiers = [_Tier(senders, receivers, at) for at in (DISTANCES if spans_hosts else DISTANCES[-1:])]

    def least(
        self,
        links_of: Callable[[Worker], Mapping[str, Worker]],
        sender_costs: Floats,
        receiver_costs: Sequence[Floats],
    ) -> tuple[int, int, float] | None:
        """Returns the numbers of the cheapest pair's workers and its cost, or None.

        Args:
            links_of: returns the workers linked to a sender.
            receiver_costs: costs after a handover, for each of DISTANCES if the workers span hosts; they do not
                decrease.
        """
        if not self._senders or not self._receivers:
            return None
        tiers = [_CostTier(tier, costs) for tier, costs in zip(self._tiers, receiver_costs, strict=True)]
        bounds = sender_costs + np.minimum.reduce([tier.bounds for tier in tiers])
        best, least = None, math.inf
        for sender in np.argsort(bounds).tolist():
            if bounds[sender] >= least:
                break
            worker, own = self._senders[sender], float(sender_costs[sender])
            linked = links_of(worker)
            if len(linked) ** 2 < len(self._receivers):
                # With few links, the cheapest workers are mostly not among them.
                found = self._cheapest_linked(worker, linked, receiver_costs)
                if found is not None and own + found[1] < least:
                    best, least = (sender, found[0]), own + found[1]
                continue
            for tier in tiers:
                for receiver, cost in tier.cheapest(sender):
                    if own + cost >= least:
                        break
                    other = self._receivers[receiver]
                    if other is not worker and linked.get(other.worker_id) is other:
                        best, least = (sender, receiver), own + cost
                        break
        return (*best, least) if best is not None else None

    def _cheapest_linked(
        self, worker: Worker, linked: Mapping[str, Worker], receiver_costs: Sequence[Floats]
    ) -> tuple[int, float] | None:
        numbers, costs = self._numbers, dict[int, float]()
        for other in linked.values():
            if other is not worker and (number := numbers.get(other)) is not None:
                tier = distance(worker, other) if len(receiver_costs) > 1 else 0
                costs[number] = float(receiver_costs[tier][number])
        return min(costs.items(), key=lambda item: item[1], default=None)


class _Tier:
    """Workers by place, for one distance.

    Attributes:
        order: receivers, those of one place together; starts: of each place in `order`.
        of_senders: each sender's place; the last number is that of places without a receiver.
    """

    def __init__(self, senders: Sequence[Worker], receivers: Sequence[Worker], distance: int) -> None:
        at: dict[str, list[int]] = {}
        for number, worker in enumerate(receivers):
            at.setdefault(place_at(worker, distance), []).append(number)
        sizes = [len(numbers) for numbers in at.values()]
        places = {place: number for number, place in enumerate(at)}
        self.order = np.array([number for numbers in at.values() for number in numbers], np.intp)
        self.starts = np.cumsum([0, *sizes[:-1]])
        self.of_senders = np.array([places.get(place_at(worker, distance), len(at)) for worker in senders], np.intp)


class _CostTier:
    """Attributes: bounds: least cost of a receiver at each sender's place."""

    def __init__(self, tier: _Tier, costs: Floats) -> None:
        self._tier = tier
        self._costs = costs
        lows = np.full(len(tier.starts) + 1, math.inf)
        np.minimum.reduceat(costs[tier.order], tier.starts, out=lows[:-1])
        self.bounds: Floats = lows[tier.of_senders]
        self._sorted: dict[int, list[tuple[int, float]]] = {}

    def cheapest(self, sender: int) -> Sequence[tuple[int, float]]:
        """Returns the receivers at a sender's place with their costs, cheapest first."""
        tier, place = self._tier, int(self._tier.of_senders[sender])
        if place == len(tier.starts):
            return ()
        if (known := self._sorted.get(place)) is None:
            end = tier.starts[place + 1] if place + 1 < len(tier.starts) else len(tier.order)
            numbers = tier.order[tier.starts[place] : end]
            costs = self._costs[numbers]
            order = np.argsort(costs)
            known = self._sorted[place] = list(zip(numbers[order].tolist(), costs[order].tolist(), strict=True))
        return known
