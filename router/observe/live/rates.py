from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import NamedTuple

from tandem.messages import WorkerStats
from tandem.router.workers.worker import Worker

# Taken once a second.
NUM_SAMPLES = 4

_tokens_of = attrgetter("prompt_tokens_computed", "output_tokens_computed", "prefix_cached_tokens")


class Rates(NamedTuple):
    """
    Attributes:
        sent_bytes: by receiving worker and transport.
    """

    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    cached_tokens: float = 0.0
    sent_bytes: dict[tuple[str, str], float] | None = None


NO_RATES = Rates()


class _Sample(NamedTuple):
    at: float
    stats: WorkerStats


class WorkerRates:
    def __init__(self) -> None:
        self._samples: dict[str, tuple[Worker, deque[_Sample]]] = {}

    def sample(self, workers: Iterable[Worker]) -> None:
        known, self._samples = self._samples, {}
        for worker in workers:
            before = known.get(worker.worker_id)
            samples = before[1] if before and before[0] is worker else deque(maxlen=NUM_SAMPLES)
            if worker.num_steps >= 0 and (not samples or samples[-1].at < worker.last_heartbeat):
                samples.append(_Sample(worker.last_heartbeat, worker.stats))
            self._samples[worker.worker_id] = worker, samples

    def of(self, worker_id: str) -> Rates:
        known = self._samples.get(worker_id)
        if known is None or len(known[1]) < 2:
            return NO_RATES
        first, last = known[1][0], known[1][-1]
        elapsed_s = last.at - first.at
        prompt, output, cached = (
            (new - old) / elapsed_s for new, old in zip(_tokens_of(last.stats), _tokens_of(first.stats), strict=True)
        )
        before = {(s.receiver_id, s.transport): s.num_bytes for s in first.stats.shipped}
        sent = {
            (key := (s.receiver_id, s.transport)): (s.num_bytes - before.get(key, 0)) / elapsed_s
            for s in last.stats.shipped
        }
        return Rates(prompt, output, cached, sent)

    def total(self, rate: Callable[[Rates], float]) -> float:
        return sum(rate(self.of(worker_id)) for worker_id in self._samples)
