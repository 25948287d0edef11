"""Workers in turn."""

from tandem.router.policies.base import RoutingPolicy, RoutingRequest
from tandem.router.workers.candidates import Candidates
from tandem.router.workers.worker import Pair, Worker


class RoundRobin(RoutingPolicy):
    """Chooses the prefill and the decode worker that have waited longest: N requests over N x M pairs load all workers
    evenly."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._num_choices = 0

    def choose(self, candidates: Candidates, request: RoutingRequest) -> Pair:
        prefill = min(candidates.prefill_workers, key=self._last_chosen)
        decode = min(candidates.decode_workers_of(prefill), key=self._last_chosen)
        self._num_choices += 1
        self._last[prefill.worker_id] = self._last[decode.worker_id] = self._num_choices
        return Pair(prefill, decode)

    def _last_chosen(self, worker: Worker) -> int:
        return self._last.get(worker.worker_id, 0)
