"""The pairs of workers that can serve a request now, without making each of them.

There are prefill times decode workers of them. Choosing among 500 times 500 by looking at each pair would take the
router's one loop a quarter of a second for every request, so what is kept is which decode workers each prefill worker
is linked to (`Worker.decode_workers`), and pairs are made where somebody asks for them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

from router.placement import AGGREGATED, AUTO, DISAGGREGATED, Placement
from router.worker import Pair, Worker

WorkerCost = Callable[[Worker], float]


class Candidates(Sequence[Pair]):
    """A sequence of pairs, prefill workers in the order in which they joined. It is a view: it is true while `choose`
    runs, and what it shows changes as workers come and go.

    What takes time in proportion to the workers: `prefill_workers`, `decode_workers_of`, `alone`, `senders`,
    `receivers`, `least`, `least_of`, `least_apart`, `len`, an index. What takes none: `in`. Going through all pairs
    takes time in proportion to their number.
    """

    def __init__(
        self,
        workers: Mapping[str, Worker],
        may_serve: Callable[[Worker], bool] | None = None,
        placement: str = AUTO,
    ) -> None:
        """
        Args:
            workers: among which they are, by their ids.
            may_serve: which workers may have a part; None: all of them.
            placement: AUTO: any pair; otherwise the pairs of that placement alone, if there are such now, whether or
                not they may have a part: a request is served rather the other way than not at all, but where those that
                are wanted are only busy it waits.
        """
        self._workers = workers
        self._may_serve = may_serve
        self._only = _only(workers, placement)

    def among(self, may_serve: Callable[[Worker], bool]) -> "Candidates":
        """Those of the pairs both of whose workers may have a part."""
        return Candidates(self._workers, may_serve, self._only or AUTO)

    @property
    def prefill_workers(self) -> list[Worker]:
        """Those that can take a prompt now, in the order in which they joined; role `both` among them."""
        if (placement := self._only) is not None:
            return [w for w in self._workers.values() if self._is_open(w) and self._has_partner(w, placement)]
        if self._may_serve is None:
            return [worker for worker in self._workers.values() if worker.decode_workers]
        # Looking through each one's own decode workers would be looking at every pair.
        open_ids = {
            worker.worker_id for worker in self._workers.values() if worker.role != "prefill" and self._is_open(worker)
        }
        return [
            w for w in self._workers.values() if self._is_open(w) and not w.decode_workers.keys().isdisjoint(open_ids)
        ]

    def decode_workers_of(self, prefill: Worker) -> list[Worker]:
        """Those that can go on with what this one has computed; a worker of role `both` can itself."""
        decode_workers = self._open(list(prefill.decode_workers.values()))
        if (placement := self._only) is None:
            return decode_workers
        return [worker for worker in decode_workers if (worker is prefill) == (placement == AGGREGATED)]

    def alone(self) -> list[Worker]:
        """The workers that can serve a request by themselves."""
        if self._only == DISAGGREGATED:
            return []
        return self._open([w for w in self._workers.values() if w.role == "both" and w.decode_workers])

    def senders(self) -> list[Worker]:
        """The prefill workers of pairs of two workers; some may have no decode worker that is open."""
        if self._only == AGGREGATED:
            return []
        return self._open([w for w in self._workers.values() if w.sends and w.decode_workers])

    def receivers(self) -> list[Worker]:
        """The decode workers of pairs of two workers; some may have no prefill worker that is open."""
        return self._open([w for w in self._workers.values() if w.receives])

    def least(self, prefill_cost: WorkerCost, decode_cost: WorkerCost, both_cost: WorkerCost | None = None) -> Pair:
        """The pair with the least cost, where that is one cost for each of its workers added up; of equals that of the
        prefill worker that joined first.

        Args:
            both_cost: of a pair that is one worker of role `both`; None: its two costs added up.
        """
        one = both_cost or (lambda worker: prefill_cost(worker) + decode_cost(worker))
        senders = self.senders()
        return self.least_of(
            {worker: one(worker) for worker in self.alone()},
            {worker: prefill_cost(worker) for worker in senders},
            {worker: decode_cost(worker) for worker in self.receivers()} if senders else {},
        )

    def least_of(
        self, alone: Mapping[Worker, float], senders: Mapping[Worker, float], receivers: Mapping[Worker, float]
    ) -> Pair:
        """As `least`, with the costs of each: of those of `alone`, `senders` and `receivers`."""
        best = min(alone, key=alone.__getitem__, default=None)
        apart = self.least_apart(senders, receivers)
        if apart is not None:
            cost = senders[apart.prefill] + receivers[apart.decode]
            if best is None or cost < alone[best] or (cost == alone[best] and self._joined_first(apart.prefill, best)):
                return apart
        assert best is not None, "there is no candidate"
        return Pair(best, best)

    def least_apart(self, senders: Mapping[Worker, float], receivers: Mapping[Worker, float]) -> Pair | None:
        """Of the pairs of two workers that have a link that with the least cost; None if there is none.

        Args:
            senders, receivers: what it costs if a worker computes the prompt, and if it decodes.
        """
        if not senders or not receivers:
            return None
        by_cost: list[Worker] | None = None
        cheapest = min(receivers, key=receivers.__getitem__)
        best: Pair | None = None
        least = 0.0
        for prefill, cost in senders.items():
            if best is not None and cost + receivers[cheapest] >= least:
                continue
            decode: Worker | None = cheapest
            if prefill is cheapest or prefill.decode_workers.get(cheapest.worker_id) is not cheapest:
                by_cost = by_cost or sorted(receivers, key=receivers.__getitem__)
                decode = _cheapest_linked(prefill, by_cost, receivers)
            if decode is None:
                continue
            cost += receivers[decode]
            if best is None or cost < least:
                best, least = Pair(prefill, decode), cost
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


def _only(workers: Mapping[str, Worker], placement: str) -> Placement | None:
    """The one placement that there is a choice of; None: there are pairs of any."""
    if placement == AGGREGATED and any(w.worker_id in w.decode_workers for w in workers.values()):
        return AGGREGATED
    if placement == DISAGGREGATED and any(
        len(w.decode_workers) > (w.worker_id in w.decode_workers) for w in workers.values()
    ):
        return DISAGGREGATED
    return None


def _cheapest_linked(prefill: Worker, by_cost: Sequence[Worker], costs: Mapping[Worker, float]) -> Worker | None:
    """
    Args:
        by_cost: workers that take over from others, the cheapest first.
        costs: of each of them.
    """
    linked = prefill.decode_workers
    if len(linked) ** 2 < len(by_cost):
        # The cheapest are mostly not among so few.
        others = (worker for worker in linked.values() if worker in costs and worker is not prefill)
        return min(others, key=costs.__getitem__, default=None)
    return next((w for w in by_cost if w is not prefill and linked.get(w.worker_id) is w), None)
