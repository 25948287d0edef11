"""A node in simulation: workers' parts, a store, a disk and a region, with every page's content checked.

Nothing happens by itself: messages, copies, forward passes and transfers run at the schedule's command, in any order.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from math import inf

from tandem.pagestore.keys import page_keys, root_key
from tests.fakes.clock import FakeClock
from tests.fakes.page_store.copies import PageCopy
from tests.fakes.page_store.disk import Disk
from tests.fakes.page_store.jobs import Job
from tests.fakes.page_store.memory import HALVES, PAGE_FORMAT, PAGE_SIZE, Memory, content_mark
from tests.fakes.page_store.resets import Resets
from tests.fakes.page_store.session import SimSession
from tests.fakes.page_store.store import SimStore
from tests.fakes.page_store.worker import Life, Reset, SimWorker

Action = Callable[[], object]
Draw = Callable[[int], int]
# Turns of all parts without a fault within which all requests must end.
MAX_ROUNDS = 2500
ROUND_S = 0.02
# The parts recount their books only now and then, which takes long.
RECOUNT_EVERY = 4
# What may stand still in a round: messages to the store and from it, copies, the disk, forward passes.
UP, DOWN, COPIES, DISK, FORWARDS = 1, 2, 4, 8, 16


@dataclass(frozen=True)
class Sizes:
    """
    Attributes:
        token_s: expected time to compute a token, in seconds; infinite: the workers have measured none.
        is_recounted: the parts check their own books now and then, too.
    """

    num_workers: int
    num_pages: int
    num_slots: int
    write_after: int = 0
    token_s: float = 1.0
    is_recounted: bool = True


class World:
    """
    Attributes:
        marks: content that each key stands for.
        copies: all that run, also those of dead workers until their exit is seen.
        counts: how often something happened.
    """

    def __init__(self, sizes: Sizes, disk: Disk | None = None) -> None:
        self.sizes = sizes
        self.num_slots, self.write_after, self.token_s = sizes.num_slots, sizes.write_after, sizes.token_s
        self.clock = FakeClock()
        self.numbers = count()
        self.counts: Counter[str] = Counter()
        self.marks: dict[bytes, bytes] = {}
        self.region = Memory(sizes.num_slots)
        self.copies: list[PageCopy] = []
        self.sessions: list[SimSession] = []
        self.resets = Resets()
        self.disk = disk
        self.dead: list[SimWorker] = []
        self.jobs: list[Job] = []
        self._num_checks = 0
        self.store = SimStore(self, [])
        self.workers = [SimWorker(self, f"worker-{i}", sizes.num_pages) for i in range(sizes.num_workers)]

    @property
    def num_resets(self) -> int:
        return self.resets.last

    def compute_s(self, num_tokens: int) -> float:
        """Returns the expected time to compute tokens; infinite for none, too, if nothing was measured."""
        return inf if self.token_s == inf else num_tokens * self.token_s

    # --- requests ---

    def submit(self, worker: SimWorker, namespace: str, whole_ids: list[int], prompt_len: int, kind: str) -> None:
        job = Job(next(self.numbers), namespace, whole_ids, whole_ids[:prompt_len], kind)
        self._register(job)
        self.jobs.append(job)
        worker.jobs.submit(job)
        worker.check_owners()

    def _register(self, job: Job) -> None:
        whole = job.whole_ids
        for number, key in enumerate(self._keys(job), 1):
            self.marks[key] = content_mark(job.namespace, tuple(whole[: number * PAGE_SIZE]))

    def _keys(self, job: Job) -> list[bytes]:
        return page_keys(root_key(PAGE_FORMAT, job.namespace), job.whole_ids, PAGE_SIZE)

    def chains(self) -> list[list[bytes]]:
        """Returns the keys of every request's whole sequence."""
        chains = {}
        for job in self.jobs:
            keys = self._keys(job)
            chains[tuple(keys)] = keys
        return list(chains.values())

    def reset(self) -> None:
        self.resets.begin([worker for worker in self.workers if worker.alive])
        for worker in self.workers:
            worker.inbox.append(Reset(self.resets.last))

    # --- copies and memory ---

    def begin_copy(self, copy: PageCopy) -> None:
        worker, slot = copy.worker, copy.slot
        copy.seen_reset = worker.seen_reset
        assert copy.is_out or not any(copy.page_id in forward.page_ids for forward in worker.forwards), (
            f"{worker.incarnation}: page {copy.page_id} is loaded while a forward in flight uses it"
        )
        others = [other for other in self.copies if other.slot == slot and (copy.is_out or other.is_out)]
        assert not others, f"slot {slot} is written by one copy and used by another"
        if not copy.is_out:
            assert worker.view.asked_since(slot, worker.seen_reset), (
                f"slot {slot}, found before a reset, is read after it"
            )
            self.counts["loads begun"] += 1
        self.copies.append(copy)
        self._check_source(copy)

    def run_copy(self, copy: PageCopy, half: int) -> None:
        copy.left.remove(half)
        pool = copy.worker.pool
        if copy.is_out:
            self.region.write(copy.slot, half, pool.read(copy.page_id, half))
        else:
            pool.write(copy.page_id, half, self.region.read(copy.slot, half))
        if not copy.left:
            copy.ended = self.clock.now
            self.copies.remove(copy)
            if not copy.is_out:
                copy.worker.landed(copy)
            self.counts["copied out" if copy.is_out else "copied in"] += 1

    def check_untouched(self, slot: int, what: str) -> None:
        """Checks that nobody uses a slot, or may touch it still."""
        for copy in self.copies:
            assert copy.slot != slot, (
                f"slot {slot} {what}, but {copy.worker.incarnation} {'writes' if copy.is_out else 'reads'} it"
            )
        assert self.store.disk is None or not self.store.disk.holds(slot), f"slot {slot} {what}, but the disk uses it"
        users = self.store.ledger.users(slot)
        assert not users, f"slot {slot} {what}, but belongs to {users}"

    def check_is_stored(self, slot: int, key: bytes, what: str) -> None:
        """Checks that a slot holds all of its key's content, and that nobody writes it."""
        assert all(copy.slot != slot or not copy.is_out for copy in self.copies), f"slot {slot} {what} while written"
        mark = self.marks.get(key, b"")
        assert not mark or self.region.holds(slot, mark), f"slot {slot} {what} with another content than its key's"
        assert self.region.stamp(slot) >= self.resets.completed, (
            f"slot {slot} {what}, but was computed before reset {self.resets.completed}"
        )

    def check(self) -> None:
        """Checks everything that may be read at any moment from now on."""
        for copy in self.copies:
            self._check_source(copy)
        if self.store.alive:
            for find, slots in self.store.ledger.finds.items():
                for slot, key in slots.items():
                    mark = self.marks.get(key, b"")
                    assert not mark or self.region.holds(slot, mark), f"slot {slot} changes while {find} pins it"
            for transfer in self.store.disk.in_flight if self.store.disk is not None else ():
                if not transfer.is_read:
                    mark = self.marks.get(transfer.page.key, b"")
                    assert not mark or self.region.holds(transfer.slot, mark, transfer.left), (
                        f"slot {transfer.slot} changes while it is written to the disk"
                    )
            self._num_checks += 1
            if self.is_recount_due(self._num_checks):
                violation = self.store.pages.check_integrity()
                assert not violation, violation
        for worker in self.workers:
            if worker.alive:
                worker.check_contents()

    def is_recount_due(self, num_checks: int) -> bool:
        return self.sizes.is_recounted and num_checks % RECOUNT_EVERY == 0

    def _check_source(self, copy: PageCopy) -> None:
        if not copy.mark:
            return
        if not copy.is_out:
            assert self.region.holds(copy.slot, copy.mark, copy.left), (
                f"{copy.worker.incarnation} loads another content from slot {copy.slot}"
            )
        elif copy.worker.alive:
            assert copy.worker.pool.holds(copy.page_id, copy.mark, copy.left), (
                f"{copy.worker.incarnation} stores another content than the key's in slot {copy.slot}"
            )

    # --- faults ---

    def kill_worker(self, worker: SimWorker, draw: Draw) -> None:
        worker.life = Life.EXITED
        worker.paused = False
        self.dead.append(worker)
        self.resets.lost(worker)
        for job in (*worker.jobs.queued, *worker.jobs.running):
            job.ended = True
        # Its pool is gone, its copies into the region may still land.
        self.copies = [copy for copy in self.copies if copy.worker is not worker or copy.is_out]
        if worker.session is not None:
            worker.flush()
            worker.session.cut(draw(4), 0)
            worker.session.open_at_worker = False
            worker.session = None
        self.counts["worker deaths"] += 1

    def see_exit(self, worker: SimWorker, draw: Draw) -> None:
        for copy in [copy for copy in self.copies if copy.worker is worker]:
            for half in list(copy.left)[: draw(3)]:
                self.run_copy(copy, half)
        self.copies = [copy for copy in self.copies if copy.worker is not worker]
        worker.life = Life.GONE
        self.dead.remove(worker)

    def revive_worker(self, number: int) -> None:
        if not self.workers[number].alive:
            self.workers[number] = SimWorker(self, self.workers[number].name, self.sizes.num_pages)

    def kill_store(self, draw: Draw) -> None:
        if self.store.alive:
            self.store.kill(draw)
            self.counts["store deaths"] += 1

    def revive_store(self) -> None:
        if not self.store.alive:
            former = [each for each in (*self.workers, *self.dead) if each.has_begun and not each.is_gone()]
            self.store = SimStore(self, former)

    # --- progress ---

    def progress(self) -> Iterator[Action]:
        """Everything that may happen next without a fault. Actions of messages keep the order of their queue."""
        self.sessions = [s for s in self.sessions if s.open_at_worker or s.open_at_store or s.up]
        for session in self.sessions:
            if session.up and session.store is self.store and self.store.runs:
                yield lambda session=session: self.store.deliver(session)
            if session.down and session.open_at_worker and session.worker.runs:
                yield lambda session=session: session.worker.deliver(session)
        for copy in self.copies:
            for half in copy.left:
                yield lambda copy=copy, half=half: self.run_copy(copy, half)
        if self.store.runs:
            yield self.store.poll
            for transfer in self.store.disk.in_flight if self.store.disk is not None else ():
                for half in transfer.left:
                    yield lambda transfer=transfer, half=half: self.store.disk.run(transfer, half)  # type: ignore[union-attr]
        for worker in self.workers:
            if worker.runs:
                yield worker.turn
                if worker.outbox:
                    yield worker.flush
                if worker.may_dial and worker.session is None and self.store.alive:
                    yield worker.dial
                if worker.late:
                    yield worker.deliver_late
            if worker.alive and worker.forwards:
                yield worker.run_device

    def round(self, lag: int = 0) -> bool:
        """Lets everything happen once; returns whether anything but polls did.

        Args:
            lag: what stands still, as bits.
        """
        worked = False
        self.clock.advance(ROUND_S)
        for session in list(self.sessions):
            while not lag & UP and session.store is self.store and session.up and self.store.runs:
                self.store.deliver(session)
                worked = True
            while not lag & DOWN and session.down and session.open_at_worker and session.worker.runs:
                session.worker.deliver(session)
                worked = True
        for copy in () if lag & COPIES else list(self.copies):
            for half in list(copy.left):
                self.run_copy(copy, half)
                worked = True
        if self.store.runs:
            disk = self.store.disk
            for transfer in () if disk is None or lag & DISK else list(disk.in_flight):
                for half in HALVES:
                    if half in transfer.left and disk is not None and transfer in disk.in_flight:
                        disk.run(transfer, half)
                        worked = True
            self.store.poll()
        for worker in self.workers:
            if worker.runs:
                worked |= worker.dial()
                worked |= bool(worker.view.epoch) and worker.deliver_late()
                worked |= worker.turn()
                worked |= worker.flush()
                worked |= not lag & FORWARDS and worker.run_device()
        self.check()
        return worked

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def next_deadline(self) -> float:
        """Returns the time of the workers' next deadline; infinite without one."""
        deadlines = [worker.tier.next_deadline() for worker in self.workers if worker.runs]
        return min((deadline for deadline in deadlines if deadline is not None), default=inf)

    def advance_to_deadline(self) -> None:
        """Lets time pass until the next deadline, at most a second."""
        self.advance(min(max(self.next_deadline() - self.clock.now, 0.0) + 1e-6, 1.0))
