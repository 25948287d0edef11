from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from tandem.messages import WorkerStats
from tandem.router.workers.worker import Worker

# Windows in samples, which are taken once a second. Handovers are rarer than steps, so links need more.
NUM_SAMPLES = 4
NUM_LINK_SAMPLES = 11

_tokens_of = attrgetter(
    *("prompt_tokens_computed", "output_tokens_computed", "prefix_cached_tokens"),
    *("prefix_host_tokens", "prefix_disk_tokens", "prefix_peer_tokens"),
)


class Rates(NamedTuple):
    """Tokens per second.

    Attributes:
        host_tokens, disk_tokens, peer_tokens: cached tokens that came from the page store, by tier.
    """

    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    cached_tokens: float = 0.0
    host_tokens: float = 0.0
    disk_tokens: float = 0.0
    peer_tokens: float = 0.0


NO_RATES = Rates()


class _Sample(NamedTuple):
    """Attributes: sent: bytes sent since the sample before, by receiver."""

    at: float
    stats: WorkerStats
    sent: Mapping[str, int]


class WorkerRates:
    def __init__(self) -> None:
        self._samples: dict[str, tuple[Worker, deque[_Sample]]] = {}

    def sample(self, workers: Iterable[Worker]) -> None:
        known, self._samples = self._samples, {}
        for worker in workers:
            before = known.get(worker.worker_id)
            samples = before[1] if before and before[0] is worker else deque(maxlen=NUM_LINK_SAMPLES)
            if worker.num_steps >= 0 and (not samples or samples[-1].at < worker.last_heartbeat):
                samples.append(_Sample(worker.last_heartbeat, worker.stats, worker.take_sent_bytes()))
            self._samples[worker.worker_id] = worker, samples

    def of(self, worker_id: str) -> Rates:
        """Returns a worker's rates of the last 3 s."""
        window = self._window(worker_id, NUM_SAMPLES)
        if window is None:
            return NO_RATES
        first, last = window
        elapsed_s = last.at - first.at
        old_and_new = zip(_tokens_of(first.stats), _tokens_of(last.stats), strict=True)
        return Rates(*((new - old) / elapsed_s for old, new in old_and_new))

    def sent_to(self, worker_id: str) -> dict[str, float]:
        """Returns a worker's bytes per second over the last 10 s by receiving worker; idle links are missing."""
        window = self._window(worker_id, NUM_LINK_SAMPLES)
        if window is None:
            return {}
        first, last = window
        sent: Counter[str] = Counter()
        for sample in islice(self._samples[worker_id][1], 1, None):
            sent.update(sample.sent)
        return {receiver_id: num_bytes / (last.at - first.at) for receiver_id, num_bytes in sent.items() if num_bytes}

    def total(self, rate: Callable[[Rates], float]) -> float:
        return sum(rate(self.of(worker_id)) for worker_id in self._samples)

    def _window(self, worker_id: str, num_samples: int) -> tuple[_Sample, _Sample] | None:
        """Returns the first and the last of the newest samples."""
        known = self._samples.get(worker_id)
        if known is None or len(known[1]) < 2:
            return None
        samples = known[1]
        return samples[max(0, len(samples) - num_samples)], samples[-1]
