"""The pairs of workers that can serve a request now, without making each of them.

There are prefill times decode workers of them. Choosing among 500 times 500 by looking at each pair would take the
router's one loop a quarter of a second for every request, so what is kept is which decode workers each prefill worker
is linked to (`Worker.decode_workers`), and pairs are made where somebody asks for them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

from router.worker import Pair, Worker

WorkerCost = Callable[[Worker], float]


class Candidates(Sequence[Pair]):
    """A sequence of pairs, prefill workers in the order in which they joined. It is a view: it is true while `choose`
    runs, and what it shows changes as workers come and go.

    What takes time in proportion to the workers: `prefill_workers`, `decode_workers_of`, `least`, `len`, an index. What
    takes none: `in`. Going through all pairs takes time in proportion to their number.
    """

    def __init__(self, workers: Mapping[str, Worker], may_serve: Callable[[Worker], bool] | None = None) -> None:
        """
        Args:
            workers: among which they are, by their ids.
            may_serve: which workers may have a part; None: all of them.
        """
        self._workers = workers
        self._may_serve = may_serve

    def among(self, may_serve: Callable[[Worker], bool]) -> "Candidates":
        """Those of the pairs both of whose workers may have a part."""
        return Candidates(self._workers, may_serve)

    @property
    def prefill_workers(self) -> list[Worker]:
        """Those that can take a prompt now, in the order in which they joined; role `both` among them."""
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
        return [worker for worker in prefill.decode_workers.values() if self._is_open(worker)]

    def least(self, prefill_cost: WorkerCost, decode_cost: WorkerCost, both_cost: WorkerCost | None = None) -> Pair:
        """The pair with the least cost, where that is one cost for each of its workers added up; of equals that of the
        prefill worker that joined first.

        Args:
            both_cost: of a pair that is one worker of role `both`; None: its two costs added up.
        """
        costs = {w: decode_cost(w) for w in self._workers.values() if w.receives and self._is_open(w)}
        by_cost = sorted(costs, key=costs.__getitem__)
        best: Pair | None = None
        least = 0.0
        for prefill in self._workers.values():
            if not prefill.decode_workers or not self._is_open(prefill):
                continue
            if prefill.role == "both":
                cost = both_cost(prefill) if both_cost is not None else prefill_cost(prefill) + decode_cost(prefill)
                if best is None or cost < least:
                    best, least = Pair(prefill, prefill), cost
            if not prefill.sends or not by_cost:
                continue
            cost = prefill_cost(prefill)
            if best is not None and cost + costs[by_cost[0]] >= least:
                continue
            if (decode := _cheapest_linked(prefill, by_cost, costs)) is None:
                continue
            cost += costs[decode]
            if best is None or cost < least:
                best, least = Pair(prefill, decode), cost
        assert best is not None, "there is no candidate"
        return best

    def __bool__(self) -> bool:
        return bool(self.prefill_workers)

    def __len__(self) -> int:
        if self._may_serve is None:
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

    def _is_open(self, worker: Worker) -> bool:
        return self._may_serve is None or self._may_serve(worker)


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
