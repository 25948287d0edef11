"""Counters and gauges of the store."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class StoreCounts:
    """Totals over the store's life.

    Attributes:
        pages_present, pages_granted, pages_refused: answers to Put, one per key.
        pages_written: pages that workers made visible.
        keys_sought, keys_missed: keys of all finds; keys behind the stored run.
        hits: answered pages by tier (messages.HOST, DISK, PEER).
        failed_reads: failed reads from slower tiers, purged ones included.
    """

    pages_present: int = 0
    pages_granted: int = 0
    pages_refused: int = 0
    pages_written: int = 0
    keys_sought: int = 0
    keys_missed: int = 0
    failed_reads: int = 0
    purges: int = 0
    hits: dict[int, int] = field(default_factory=dict)

    def count_hits(self, tier: int, num_pages: int) -> None:
        self.hits[tier] = self.hits.get(tier, 0) + num_pages


@dataclass(frozen=True, slots=True)
class StoreStats:
    """State of the store.

    Attributes:
        is_quiet: whether no process may still copy for the store's last life.
        num_free, num_writing, num_reading, num_ready: slots by state; `num_ready` includes purged pages still in use.
        num_pinned: ready slots that finds or slower tiers use.
        num_sessions, num_closed: open sessions; closed ones whose copies may still run.
        num_finds, num_waiting: running finds; those that expect pages.
        num_queued, num_written_behind: pages to be written to disk; those being written.
    """

    is_quiet: bool
    num_slots: int
    num_free: int
    num_writing: int
    num_reading: int
    num_ready: int
    num_pinned: int
    num_sessions: int
    num_closed: int
    num_finds: int
    num_waiting: int
    num_queued: int
    num_written_behind: int
    num_evictions: int
    failed_writes: int
    counts: StoreCounts
