from dataclasses import fields
from operator import attrgetter

from tandem.engine.base import EngineBase
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.messages import WorkerStats
from tandem.worker.forward_timer import ForwardTimer

# All other fields are counts and are summed, so a scheduler's new counter needs no change here.
_COUNTS = tuple(
    f.name for f in fields(WorkerStats) if f.name not in ("shipped", "forward_times", "load_token_s", "drafted")
)
_counts_of = attrgetter(*_COUNTS)


def worker_stats(engine: EngineBase, cache: CacheManager, timer: ForwardTimer, *own: WorkerStats) -> WorkerStats:
    """Combines the counts of a worker's engine, cache and schedulers."""
    shared = WorkerStats(
        num_total_pages=cache.num_pages,
        num_free_pages=cache.num_free_pages,
        num_cached_pages=cache.num_cached_pages,
        num_locked_pages=cache.num_locked_pages,
        num_leased_pages=cache.num_leased_pages,
        prompt_tokens_computed=engine.counters.prompt_tokens_computed,
        output_tokens_computed=engine.counters.output_tokens_computed,
    )
    counts = zip(*map(_counts_of, (shared, *own)), strict=True)
    return WorkerStats(
        **dict(zip(_COUNTS, map(sum, counts), strict=True)),
        shipped=tuple(s for part in own for s in part.shipped),
        drafted=tuple(d for part in own for d in part.drafted),
        forward_times=timer.times(),
        # Known above the schedulers (tandem.pagestore.client.tiered_scheduler).
        load_token_s=(),
    )
