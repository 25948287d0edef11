"""How many requests a second a number of GPUs serves well, for each way to share them out.

Arrivals are independent of each other (Poisson), and all requests have the same lengths. docs/estimate.md has the
formulas.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, exp, inf

from deploy.estimate.worker import Worker

# More GPUs are not looked at for a rate: a cluster is one host.
MAX_GPUS = 64
_BISECTIONS = 40


@dataclass(frozen=True, slots=True)
class Load:
    """Requests and what is promised for them.

    Attributes:
        prompt_len, output_len: tokens of each request; none of the prompt is cached.
        ttft, itl: limits in seconds: until the first token, and between tokens; inf: none.
        good_share: of the requests, that must have their first token in time.

    Raises:
        ValueError: on construction, for numbers that make no load.
    """

    prompt_len: int
    output_len: int
    ttft: float = inf
    itl: float = inf
    good_share: float = 0.9

    def __post_init__(self) -> None:
        if self.prompt_len < 1 or self.output_len < 1:
            raise ValueError("a workload has at least one prompt token and one output token")
        if not (self.ttft > 0 and self.itl > 0):
            raise ValueError("limits on ttft and itl must be above 0")
        if not 0 < self.good_share < 1:
            raise ValueError(f"the share of good requests must be between 0 and 1, not {self.good_share:g}")

    @property
    def num_tokens(self) -> int:
        """Of a whole request."""
        return self.prompt_len + self.output_len

    @property
    def kv_len(self) -> int:
        """Tokens of a sequence in the middle of its output."""
        return self.prompt_len + self.output_len // 2


@dataclass(frozen=True, slots=True)
class Split:
    """One way to share GPUs out, and what it gives.

    Attributes:
        num_both: workers of role both; where there are any, there are no others.
        rate: requests per second that are served within the limits; 0: not even one is.
        bottleneck: "prefill", "decode" or "both".
        batch_size: sequences of a decode step at that rate where decode is what limits it.
        chunk_size: tokens of a prefill forward.
    """

    num_prefill: int
    num_decode: int
    num_both: int
    rate: float
    bottleneck: str
    batch_size: int
    chunk_size: int

    def __str__(self) -> str:
        return f"{self.num_both} both" if self.num_both else f"{self.num_prefill}:{self.num_decode}"


def splits(worker: Worker, load: Load, num_gpus: int) -> list[Split]:
    """All ways to share as many GPUs out, the best first; among equals the one with fewer prefill workers.

    Raises:
        ValueError: a request does not fit a worker's pool.
    """
    apart = [_apart(worker, load, num_prefill, num_gpus - num_prefill) for num_prefill in range(1, num_gpus)]
    return sorted([*apart, _both(worker, load, num_gpus)], key=lambda split: -split.rate)


def splits_for(worker: Worker, load: Load, rate: float) -> list[Split]:
    """As `splits`, with the fewest GPUs of which one way gives the rate; empty: MAX_GPUS do not."""
    # More GPUs never give less.
    too_few, enough = 0, MAX_GPUS + 1
    found: list[Split] = []
    while enough - too_few > 1:
        num_gpus = (too_few + enough) // 2
        tried = splits(worker, load, num_gpus)
        if tried[0].rate >= rate:
            enough, found = num_gpus, tried
        else:
            too_few = num_gpus
    return found


def largest_batch(worker: Worker, load: Load) -> int:
    """Sequences that a decode worker can run at once, within the limit between tokens and in its pool; 0: none."""
    return max((size for size in _batch_sizes(worker, load, "decode")), default=0)


def prefill_rate(worker: Worker, load: Load, num_workers: int) -> float:
    """Prompts per second of as many prefill workers that have their first token in time."""
    service = worker.prefill(1, load.prompt_len)
    return num_workers * max_utilisation(num_workers, service, load.ttft - service, load.good_share) / service


def decode_rate(worker: Worker, load: Load) -> float:
    """Requests per second of one decode worker; inf: their first token is their last."""
    if load.output_len == 1:
        return inf
    size = largest_batch(worker, load)
    return size / ((load.output_len - 1) * worker.decode_step(size, load.kv_len)) if size else 0.0


def max_utilisation(num_servers: int, service: float, wait: float, share: float) -> float:
    """How busy servers with one line may be for that share of what arrives to wait no longer than `wait`.

    The line is M/D/c's: the probability to wait at all is Erlang's, and that to wait longer falls exponentially, twice
    as fast as with exponential service times.

    Args:
        service: seconds that each takes.
        wait: seconds; below 0: not even one that waits for nobody is in time.
    """
    if wait < 0:
        return 0.0
    if wait == inf:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        late = _waits(num_servers, middle) * exp(-2 * (1 - middle) * num_servers * wait / service)
        low, high = (middle, high) if late <= 1 - share else (low, middle)
    return low


def _waits(num_servers: int, utilisation: float) -> float:
    """Erlang's C: the probability that all servers are busy."""
    offered = num_servers * utilisation
    blocked = 1.0
    for count in range(1, num_servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    return blocked / (1 - utilisation * (1 - blocked))


def _batch_sizes(worker: Worker, load: Load, role: str) -> Iterator[int]:
    """Those whose step keeps to the limit between tokens and whose sequences fit the pool."""
    pool_tokens = worker.pool_tokens("both" if role == "both" else "decode", load.num_tokens)
    for size in range(1, min(worker.max_batch_size, pool_tokens // load.num_tokens) + 1):
        if worker.decode_step(size, load.kv_len) <= load.itl:
            yield size


def _apart(worker: Worker, load: Load, num_prefill: int, num_decode: int) -> Split:
    worker.pool_tokens("prefill", load.num_tokens)
    prefill, decode = prefill_rate(worker, load, num_prefill), num_decode * decode_rate(worker, load)
    bottleneck = "prefill" if prefill <= decode else "decode"
    size = largest_batch(worker, load)
    return Split(num_prefill, num_decode, 0, min(prefill, decode), bottleneck, size, worker.chunk_size)


def _both(worker: Worker, load: Load, num_workers: int) -> Split:
    """Workers that compute a chunk of a prompt between two decode steps: the chunk is as large as the limit between
    tokens leaves room for, and the rate as high as keeps first tokens in time."""
    best = Split(0, 0, num_workers, 0.0, "both", 0, 0)
    if load.output_len == 1:
        rate = prefill_rate(worker, load, num_workers)
        return Split(0, 0, num_workers, rate, "both", 0, worker.chunk_size)
    for size in _batch_sizes(worker, load, "both"):
        step = worker.decode_step(size, load.kv_len)
        chunk = _largest_chunk(worker, load, load.itl - step)
        if not chunk:
            continue
        num_chunks = ceil(load.prompt_len / chunk)
        chunk_s = worker.prefill(1, load.prompt_len, chunk) / num_chunks
        prompt_s = num_chunks * (chunk_s + step)
        # `busy` of the steps have a chunk beside them. With as many prompts as ends, a step and its share of a chunk
        # take `cycle`.
        busy = size * num_chunks / (load.output_len - 1)
        if busy > max_utilisation(num_workers, prompt_s, load.ttft - prompt_s, load.good_share):
            continue
        cycle = step + busy * chunk_s
        rate = num_workers * size / ((load.output_len - 1) * cycle)
        if rate > best.rate:
            best = Split(0, 0, num_workers, rate, "both", size, chunk)
    return best


def _largest_chunk(worker: Worker, load: Load, room: float) -> int:
    """Tokens of a prompt's forward that takes at most `room` seconds; 0: there is none. A multiple of a page, or the
    worker's own."""
    largest = min(worker.chunk_size, load.prompt_len)

    def chunk_of(num_pages: int) -> int:
        # A whole prompt is one chunk, whether or not it fills its last page.
        return min(num_pages * worker.page_size, worker.chunk_size)

    fits, too_large = 0, ceil(largest / worker.page_size) + 1
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        chunk = chunk_of(middle)
        in_time = worker.prefill(1, load.prompt_len, chunk) / ceil(load.prompt_len / chunk) <= room
        fits, too_large = (middle, too_large) if in_time else (fits, middle)
    return chunk_of(fits)
