"""Measures scheduling and page bookkeeping without a model.

Uses real schedulers, caches, leases and handovers, over an engine that returns at once and a transport that moves
nothing. Times are CPU times of the one thread, medians of several repetitions.
"""

import functools
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.host_workers import HostWorkers
from benchmarks.rows import Row, argument_parser, report
from tandem.engine.batch import Batch
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.rpc.codec import WORKER_CODEC

PAGE_SIZE = 16
# Average over four pages of each sequence.
NUM_STEPS = 4 * PAGE_SIZE
# Linear growth for a doubled size, plus a margin for overflowing processor caches.
MAX_GROWTH = 2.6


@dataclass(frozen=True, slots=True)
class Sizes:
    """Attributes: batches, prompts: doubling sizes give growth; context: tokens of each decoding request."""

    batches: Sequence[int] = (1, 64, 128, 256, 512)
    context: int = 1000
    prompts: Sequence[int] = (4096, 8192, 16384, 32768)
    repeats: int = 9


STEP_AIMS_MS = {64: 0.5, 256: 1.5}
PREFILL_AIMS_MS = {8192: 2.0}


def cpu_ms(work: Callable[[], object]) -> float:
    start = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - start) / 1e6


def new_prompt(num_tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(49152), k=num_tokens)


def decode_rows(batch_size: int, sizes: Sizes) -> Iterator[Row]:
    workers = HostWorkers(PAGE_SIZE, num_pages=batch_size * (sizes.context // PAGE_SIZE + 64))
    for n in range(batch_size):
        workers.submit(new_prompt(sizes.context + n % PAGE_SIZE, n), max_tokens=NUM_STEPS * (sizes.repeats + 2))
    workers.run_until_decoding(batch_size)
    # The first repetition warms up.
    steps = [cpu_ms(lambda: workers.decode_steps(NUM_STEPS)) / NUM_STEPS for _ in range(sizes.repeats + 1)]
    yield Row(f"decode step, batch {batch_size}", statistics.median(steps[1:]), "ms", high=STEP_AIMS_MS.get(batch_size))
    sequences = workers.running_sequences()
    for sequence in sequences:
        sequence.extend(1)
    batch, cpu = Batch("decode", sequences), torch.device("cpu")

    def build_tensors() -> None:
        batch.input_ids(cpu)
        batch.positions(cpu)
        torch.tensor(batch.logits_rows())

    tensors = [cpu_ms(build_tensors) for _ in range(10 * sizes.repeats)]
    yield Row(f"  its input tensors, batch {batch_size}", statistics.median(tensors), "ms")
    message = workers.last_tokens
    encodings = [cpu_ms(lambda: WORKER_CODEC.encode([message])) for _ in range(10 * sizes.repeats)]
    yield Row(f"  its message as protobuf, batch {batch_size}", statistics.median(encodings), "ms")


def prefill_rows(num_tokens: int, sizes: Sizes) -> Iterator[Row]:
    """Measure a new prompt and a fully cached one."""
    times: dict[str, list[float]] = {"match and insert": [], "  whole prefill in chunks": []}
    cached_times: dict[str, list[float]] = {name: [] for name in times}
    for seed in range(sizes.repeats):
        prompt = new_prompt(num_tokens, seed)
        cache = CacheManager(2 * num_tokens // PAGE_SIZE, PAGE_SIZE)
        workers = HostWorkers(PAGE_SIZE, num_pages=2 * num_tokens // PAGE_SIZE)
        for taken in (times, cached_times):
            taken["match and insert"].append(cpu_ms(functools.partial(match_and_insert, cache, prompt)))
            workers.submit(prompt, max_tokens=1)
            taken["  whole prefill in chunks"].append(cpu_ms(workers.prefill_steps))
            workers.run_until_idle()
    for name in times:
        high = PREFILL_AIMS_MS.get(num_tokens) if name == "match and insert" else None
        yield Row(f"{name}, {num_tokens} tokens, new", statistics.median(times[name]), "ms", high=high)
        yield Row(f"{name}, {num_tokens} tokens, cached", statistics.median(cached_times[name]), "ms", high=high)


def match_and_insert(cache: CacheManager, prompt: list[int]) -> None:
    handle = cache.acquire_pages(prompt, len(prompt), max_cached_len=len(prompt) - 1)
    assert handle is not None
    cache.cache_pages(handle, prompt, len(prompt))
    cache.release_pages(handle)


def growth_rows(rows: Sequence[Row], what: str, sizes: Sequence[int]) -> Iterator[Row]:
    by_name = {row.name: row.value for row in rows}
    for small, large in itertools.pairwise(sizes):
        if large == 2 * small:
            ratio = by_name[what.format(large)] / by_name[what.format(small)]
            yield Row(f"growth of {what.format(f'{small} to {large}')}", ratio, "x", high=MAX_GROWTH)


def measure(sizes: Sizes) -> list[Row]:
    rows = [row for batch_size in sizes.batches for row in decode_rows(batch_size, sizes)]
    rows += [row for num_tokens in sizes.prompts for row in prefill_rows(num_tokens, sizes)]
    rows += growth_rows(rows, "decode step, batch {}", sizes.batches)
    rows += growth_rows(rows, "match and insert, {} tokens, new", sizes.prompts)
    rows += growth_rows(rows, "match and insert, {} tokens, cached", sizes.prompts)
    rows += growth_rows(rows, "  whole prefill in chunks, {} tokens, new", sizes.prompts)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    arguments = argument_parser(__doc__).parse_args(argv)
    return report(measure(Sizes()), "Scheduling and page bookkeeping, CPU time", arguments.json)


if __name__ == "__main__":
    sys.exit(main())
