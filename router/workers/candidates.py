"""The pairs of workers that can serve a request now.

A scan of 500 x 500 pairs would take the router's event loop 0.25 s per request. So pairs are created on demand, from
the decode workers linked to each prefill worker (`Worker.decode_workers`).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

from tandem.router.workers.distance import DISTANCES, place_at
from tandem.router.workers.placement import AGGREGATED, AUTO, DISAGGREGATED, Placement
from tandem.router.workers.worker import Pair, Worker

WorkerCost = Callable[[Worker], float]


class Candidates(Sequence[Pair]):
    """A view of all pairs, prefill workers in order of joining; valid until workers or links change.

    `in` takes constant time, iteration time proportional to the number of pairs, everything else time proportional to
    the number of workers.
    """

    def __init__(
        self,
        workers: Mapping[str, Worker],
        may_serve: Callable[[Worker], bool] | None = None,
        placement: str = AUTO,
        *,
        spans_hosts: bool = False,
    ) -> None:
        """
        Args:
            may_serve: filter of open workers; None: all.
            placement: restricts pairs to one placement if such pairs exist, open or not. Requests wait for busy
                workers, but not for an impossible placement.
        """
        self._workers = workers
        self._may_serve = may_serve
        self._only = _only(workers, placement)
        self.spans_hosts = spans_hosts
        self._alone: list[Worker] | None = None
        self._senders: list[Worker] | None = None
        self._receivers: list[Worker] | None = None

    def among(self, may_serve: Callable[[Worker], bool]) -> "Candidates":
        return Candidates(self._workers, may_serve, self._only or AUTO, spans_hosts=self.spans_hosts)

    @property
    def prefill_workers(self) -> list[Worker]:
        """Open prefill workers with an open decode worker, in order of joining, including role `both`."""
        if (placement := self._only) is not None:
            return [w for w in self._workers.values() if self._is_open(w) and self._has_partner(w, placement)]
        if self._may_serve is None:
            return [worker for worker in self._workers.values() if worker.decode_workers]
        # A loop over each worker's decode workers would visit every pair.
        open_ids = {
            worker.worker_id for worker in self._workers.values() if worker.role != "prefill" and self._is_open(worker)
        }
        return [
            w for w in self._workers.values() if self._is_open(w) and not w.decode_workers.keys().isdisjoint(open_ids)
        ]

    def decode_workers_of(self, prefill: Worker) -> list[Worker]:
        """Returns the open decode workers linked to `prefill`; in role `both` also itself."""
        decode_workers = self._open(list(prefill.decode_workers.values()))
        if (placement := self._only) is None:
            return decode_workers
        return [worker for worker in decode_workers if (worker is prefill) == (placement == AGGREGATED)]

    def alone(self) -> list[Worker]:
        if self._alone is None:
            alone = [w for w in self._workers.values() if w.role == "both" and w.decode_workers]
            self._alone = [] if self._only == DISAGGREGATED else self._open(alone)
        return self._alone

    def senders(self) -> list[Worker]:
        """Some may have no open decode worker."""
        if self._senders is None:
            senders = [w for w in self._workers.values() if w.sends and w.decode_workers]
            self._senders = [] if self._only == AGGREGATED else self._open(senders)
        return self._senders

    def receivers(self) -> list[Worker]:
        """Some may have no open prefill worker."""
        if self._receivers is None:
            self._receivers = self._open([w for w in self._workers.values() if w.receives])
        return self._receivers

    def links_of(self, sender: Worker) -> Mapping[str, Worker]:
        """Returns the workers linked to a sender by id, open or not; in role `both` also itself."""
        return sender.decode_workers

    def least(
        self,
        prefill_cost: WorkerCost,
        decode_cost: WorkerCost,
        both_cost: WorkerCost | None = None,
        farther_cost: float = 0.0,
    ) -> Pair:
        """Returns the pair with the least sum of costs; of equals, the one whose prefill worker joined first.

        Args:
            both_cost: cost of a single worker of role `both`; None: the sum of its two costs.
            farther_cost: extra cost of a two-worker pair for each step of distance (router/workers/distance.py).
        """
        one = both_cost or (lambda worker: prefill_cost(worker) + decode_cost(worker))
        senders = self.senders()
        return self.least_of(
            {worker: one(worker) for worker in self.alone()},
            {worker: prefill_cost(worker) for worker in senders},
            {worker: decode_cost(worker) for worker in self.receivers()} if senders else {},
            farther_cost,
        )

    def least_of(
        self,
        alone: Mapping[Worker, float],
        senders: Mapping[Worker, float],
        receivers: Mapping[Worker, float],
        farther_cost: float = 0.0,
    ) -> Pair:
        best = min(alone, key=alone.__getitem__, default=None)
        at_distances = [receivers]
        if farther_cost and self.spans_hosts:
            steps = [farther_cost * distance for distance in DISTANCES[1:]]
            at_distances += [{worker: cost + step for worker, cost in receivers.items()} for step in steps]
        apart = self.least_apart(senders, *at_distances)
        if apart is not None:
            cost = senders[apart.prefill] + receivers[apart.decode] + farther_cost * (apart.distance or 0)
            if best is None or cost < alone[best] or (cost == alone[best] and self._joined_first(apart.prefill, best)):
                return apart
        assert best is not None, "there is no candidate"
        return Pair(best, best)

    def least_apart(self, senders: Mapping[Worker, float], *receivers: Mapping[Worker, float]) -> Pair | None:
        """Returns the cheapest linked two-worker pair, or None.

        Args:
            receivers: decode costs after a handover: one mapping for all distances, or one for each of DISTANCES with
                costs that do not decrease.
        """
        if not senders or not receivers[0]:
            return None
        at = DISTANCES if len(receivers) > 1 else DISTANCES[-1:]
        tiers = [_Tier(distance, costs) for distance, costs in zip(at, receivers, strict=True)]
        lowest = min(tier.lowest for tier in tiers)
        best: Pair | None = None
        least = math.inf
        for prefill, cost in senders.items():
            if cost + lowest >= least:
                continue
            for tier in tiers:
                if (decode := tier.cheapest(prefill, least - cost)) is not None:
                    best, least = Pair(prefill, decode), cost + tier.costs[decode]
        return best

    def __bool__(self) -> bool:
        return bool(self.prefill_workers)

    def __len__(self) -> int:
        if self._may_serve is None and self._only is None:
            return sum(len(worker.decode_workers) for worker in self._workers.values())
        return sum(len(self.decode_workers_of(worker)) for worker in self.prefill_workers)

    def __iter__(self) -> Iterator[Pair]:
        for prefill in self.prefill_workers:
            for decode in self.decode_workers_of(prefill):
                yield Pair(prefill, decode)

    def __contains__(self, pair: object) -> bool:
        return (
            isinstance(pair, Pair)
            and self._workers.get(pair.prefill.worker_id) is pair.prefill
            and pair.prefill.decode_workers.get(pair.decode.worker_id) is pair.decode
            and self._is_open(pair.prefill)
            and self._is_open(pair.decode)
            and self._only in (None, pair.placement)
        )

    @overload
    def __getitem__(self, index: int) -> Pair: ...

    @overload
    def __getitem__(self, index: slice) -> list[Pair]: ...

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        position = index if index >= 0 else index + len(self)
        if position >= 0:
            for prefill in self.prefill_workers:
                decode_workers = self.decode_workers_of(prefill)
                if position < len(decode_workers):
                    return Pair(prefill, decode_workers[position])
                position -= len(decode_workers)
        raise IndexError(f"there is no pair {index}")

    def _has_partner(self, prefill: Worker, placement: Placement) -> bool:
        if placement == AGGREGATED:
            return prefill.worker_id in prefill.decode_workers
        return any(w is not prefill and self._is_open(w) for w in prefill.decode_workers.values())

    def _joined_first(self, worker: Worker, other: Worker) -> bool:
        return worker is not other and next(w for w in self._workers.values() if w in (worker, other)) is worker

    def _open(self, workers: list[Worker]) -> list[Worker]:
        return workers if self._may_serve is None else [w for w in workers if self._may_serve(w)]

    def _is_open(self, worker: Worker) -> bool:
        return self._may_serve is None or self._may_serve(worker)


class PrefillCandidates(Candidates):
    """Workers for prompts that are only embedded: a pair is one prefill worker twice. So every policy chooses among
    them as among workers that also decode."""

    def __init__(self, workers: Mapping[str, Worker], may_serve: Callable[[Worker], bool] | None = None) -> None:
        super().__init__({name: w for name, w in workers.items() if w.role != "decode"}, may_serve)

    def among(self, may_serve: Callable[[Worker], bool]) -> "PrefillCandidates":
        return PrefillCandidates(self._workers, may_serve)

    @property
    def prefill_workers(self) -> list[Worker]:
        return self._open(list(self._workers.values()))

    def decode_workers_of(self, prefill: Worker) -> list[Worker]:
        return [prefill]

    def alone(self) -> list[Worker]:
        return self.prefill_workers

    def senders(self) -> list[Worker]:
        return []

    def receivers(self) -> list[Worker]:
        return []

    def __len__(self) -> int:
        return len(self.prefill_workers)

    def __contains__(self, pair: object) -> bool:
        return isinstance(pair, Pair) and pair.prefill is pair.decode and pair.prefill in self.prefill_workers


class PinnedCandidate(Candidates):
    """One given pair of two workers, in the place of all candidates. The registry need not link them for others."""

    def __init__(self, pair: Pair) -> None:
        super().__init__({worker.worker_id: worker for worker in (pair.prefill, pair.decode)})
        self._pair = pair

    def among(self, may_serve: Callable[[Worker], bool]) -> "PinnedCandidate":
        return self

    @property
    def prefill_workers(self) -> list[Worker]:
        return [self._pair.prefill]

    def decode_workers_of(self, prefill: Worker) -> list[Worker]:
        return [self._pair.decode]

    def alone(self) -> list[Worker]:
        return []

    def senders(self) -> list[Worker]:
        return [self._pair.prefill]

    def receivers(self) -> list[Worker]:
        return [self._pair.decode]

    def links_of(self, sender: Worker) -> Mapping[str, Worker]:
        return {self._pair.decode.worker_id: self._pair.decode}

    def least_apart(self, senders: Mapping[Worker, float], *receivers: Mapping[Worker, float]) -> Pair | None:
        return self._pair

    def __len__(self) -> int:
        return 1

    def __contains__(self, pair: object) -> bool:
        return pair == self._pair


def _only(workers: Mapping[str, Worker], placement: str) -> Placement | None:
    if placement == AGGREGATED and any(w.worker_id in w.decode_workers for w in workers.values()):
        return AGGREGATED
    if placement == DISAGGREGATED and any(
        len(w.decode_workers) > (w.worker_id in w.decode_workers) for w in workers.values()
    ):
        return DISAGGREGATED
    return None


class _Tier:
    def __init__(self, distance: int, costs: Mapping[Worker, float]) -> None:
        self._distance = distance
        self.costs = costs
        # Workers by place, sorted by cost only if the cheapest does not fit.
        self._places: dict[str, list[Worker]] = {}
        self._is_sorted: set[str] = set()
        if distance == DISTANCES[-1]:
            self._places[""] = list(costs)
        else:
            for worker in costs:
                self._places.setdefault(place_at(worker, distance), []).append(worker)
        self.lowest = min(costs.values())
        self._firsts = {place: min(workers, key=costs.__getitem__) for place, workers in self._places.items()}

    def cheapest(self, prefill: Worker, below: float) -> Worker | None:
        """Returns the cheapest worker linked to `prefill` that costs less than `below`, or None."""
        place = place_at(prefill, self._distance)
        first = self._firsts.get(place)
        if first is None or self.costs[first] >= below:
            return None
        if first is not prefill and prefill.decode_workers.get(first.worker_id) is first:
            return first
        workers = self._places[place]
        if place not in self._is_sorted:
            self._is_sorted.add(place)
            workers.sort(key=self.costs.__getitem__)
        found = self._cheapest_linked(prefill, place)
        return found if found is not None and self.costs[found] < below else None

    def _cheapest_linked(self, prefill: Worker, place: str) -> Worker | None:
        linked, costs, by_cost = prefill.decode_workers, self.costs, self._places[place]
        if len(linked) ** 2 < len(by_cost):
            # With few links, the cheapest workers are mostly not among them.
            others = [w for w in linked.values() if w in costs and w is not prefill]
            near = [w for w in others if place_at(w, self._distance) == place]
            return min(near, key=costs.__getitem__, default=None)
        return next((w for w in by_cost if w is not prefill and linked.get(w.worker_id) is w), None)
