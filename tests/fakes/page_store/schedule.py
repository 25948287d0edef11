"""Random schedules of a simulated node, with checks at the end.

A schedule is a tape of bytes; each byte chooses the next event. When the tape ends, faults end too, and all requests
must finish.
"""

from math import inf
from pathlib import Path
from unittest.mock import patch

from tandem.pagestore.client import load_copies, writing
from tests.fakes.page_store.disk import Disk, SimDisk
from tests.fakes.page_store.end import check_end, drain
from tests.fakes.page_store.memory import PAGE_SIZE
from tests.fakes.page_store.real_disk import RealDisk
from tests.fakes.page_store.world import COPIES, DISK, DOWN, FORWARDS, UP, Sizes, World
from tests.fakes.simulation.schedule import Tape

# The largest request has as many pages.
LARGEST_PAGES = 6
MAX_LEN = LARGEST_PAGES * PAGE_SIZE
# Pages from which sequences differ.
FORKS = (LARGEST_PAGES, LARGEST_PAGES, 1, 3)
# Rounds during which copies may stand still.
MAX_LONG_ROUNDS = 10
FAULTS = (
    "kill worker",
    "pause worker",
    "kill store",
    "restart store",
    "pause store",
    *["cut stream"] * 3,
    *["repeat message"] * 2,
    "break disk",
    *["revive worker"] * 2,
    "revive store",
    "go on",
    "abort",
)
# Beginning of tapes for small pools and stores, a disk, and many faults.
STORMY = bytes((1, 1, 3, 0, 1, 0, 1, 1, 0))


def run_schedule(data: bytes, is_recounted: bool = True, folder: Path | None = None) -> World:
    """Runs a schedule to its end.

    Args:
        is_recounted: the parts check their own books now and then, too.
        folder: of a real disk tier; None: a scripted one, or none.

    Raises:
        AssertionError: a guarantee is broken.
    """
    # Copies may hold half of the tiny pools.
    with patch.object(load_copies, "HELD_SHARE", 0.5), patch.object(writing, "HELD_SHARE", 0.5):
        return _run(Tape(data), is_recounted, folder)


def _run(tape: Tape, is_recounted: bool, folder: Path | None) -> World:
    sizes = Sizes(
        num_workers=(2, 3, 2, 1)[tape.draw(4)],
        num_pages=LARGEST_PAGES + tape.draw(5),
        num_slots=(20, 8, 30, 4)[tape.draw(4)],
        write_after=(0, 0, 0, 2)[tape.draw(4)],
        token_s=(100.0, 1000.0, 0.1, 1000.0, 10.0, 1e-6, inf)[tape.draw(7)],
        is_recounted=is_recounted,
    )
    max_disk_pages = (8, 0, 20)[tape.draw(3)]
    if folder is not None:
        # Room for some segments.
        disk: Disk | None = RealDisk(folder, 8 * max_disk_pages + 64)
    else:
        disk = SimDisk(max_disk_pages) if max_disk_pages else None
    world = World(sizes, disk)
    # With few faults, caches fill up.
    has_faults = bool(tape.draw(4))
    is_fast = bool(tape.draw(2))
    store_away = ("", "", "dead", "paused")[tape.draw(4)] if has_faults else ""
    try:
        while not tape.ended:
            _happen(world, tape, has_faults, is_fast)
        drain(world, store_away)
        check_end(world)
    finally:
        if world.store.disk is not None:
            world.store.disk.close()
    world.counts["resets completed"] += world.resets.num_completed
    return world


def _happen(world: World, tape: Tape, has_faults: bool, is_fast: bool) -> None:
    kind = tape.draw(32)
    if kind < (6 if is_fast else 14):
        if actions := list(world.progress()):
            actions[tape.draw(len(actions))]()
            world.check()
    elif kind < 17:
        lag = tape.draw(32) if tape.draw(2) else 0
        for _ in range(1 + tape.draw(10 if is_fast else 4)):
            world.round(lag)
    elif kind < 23:
        # Several requests at once fill the pools.
        for _ in range((1, 1, 4)[tape.draw(3)]):
            _submit(world, tape)
    elif kind == 23:
        _abort(world, tape)
    elif kind == 24:
        world.advance((0.01, 0.3, 3.0, 30.0)[tape.draw(4)])
    elif has_faults:
        _disturb(world, tape)
    elif kind == 25 and not tape.draw(4):
        world.reset()


def _disturb(world: World, tape: Tape) -> None:
    """A fault or a reset, mostly while copies are under way that take long."""
    if not tape.draw(3):
        _fault(world, tape)
        return
    is_out = bool(tape.draw(2))
    for _ in range(MAX_LONG_ROUNDS):
        if any(copy.is_out is is_out for copy in world.copies):
            break
        _submit(world, tape)
        world.round(COPIES)
    for _ in range(tape.draw(4)):
        world.round(COPIES | DOWN)
    if not tape.draw(10):
        world.reset()
    else:
        _fault(world, tape)
    lag = COPIES | (0, 0, UP, DOWN, DISK, DISK, FORWARDS)[tape.draw(7)]
    for _ in range(tape.draw(MAX_LONG_ROUNDS)):
        world.round(lag)
        if not tape.draw(4):
            _submit(world, tape)


def _submit(world: World, tape: Tape) -> None:
    """All sequences are equal up to a page, so that prefixes are often shared, and equal ones of another namespace."""
    alive = [worker for worker in world.workers if worker.runs]
    if not alive:
        return
    length = 1 + max(tape.draw(MAX_LEN - 1), tape.draw(MAX_LEN - 1))
    max_len = length + 1 + tape.draw(MAX_LEN - length)
    fork = FORKS[tape.draw(len(FORKS))]
    whole_ids = [2 * (i // PAGE_SIZE >= fork) + i % PAGE_SIZE for i in range(max_len)]
    namespace = ("", "", "", "b")[tape.draw(4)]
    kind = ("prefill", "decode")[tape.draw(2)]
    world.submit(alive[tape.draw(len(alive))], namespace, whole_ids, length, kind)


def _abort(world: World, tape: Tape) -> None:
    worker = world.workers[tape.draw(len(world.workers))]
    jobs = [*worker.jobs.queued, *worker.jobs.running]
    if worker.runs and jobs:
        worker.jobs.abort(jobs[tape.draw(len(jobs))])


def _fault(world: World, tape: Tape) -> None:
    kind = FAULTS[tape.draw(len(FAULTS))]
    # Preferably of a worker with copies under way.
    busy = [number for number, worker in enumerate(world.workers) if any(c.worker is worker for c in world.copies)]
    numbers = busy if busy and tape.draw(4) else range(len(world.workers))
    number = numbers[tape.draw(len(numbers))]
    worker = world.workers[number]
    session = worker.session
    if kind == "kill worker" and worker.alive:
        world.kill_worker(worker, tape.draw)
    elif kind == "pause worker":
        worker.paused = worker.alive and not worker.paused
    elif kind == "kill store":
        world.kill_store(tape.draw)
    elif kind == "restart store":
        world.kill_store(tape.draw)
        world.revive_store()
    elif kind == "pause store":
        world.store.paused = world.store.alive and not world.store.paused
    elif kind == "cut stream" and session is not None:
        session.cut(tape.draw(4), tape.draw(4))
        world.counts["streams cut"] += 1
    elif kind == "repeat message" and session is not None:
        session.repeat(tape.draw)
    elif kind == "break disk" and world.disk is not None:
        if isinstance(world.disk, RealDisk):
            world.disk.damage(tape.draw(256))
        world.disk.fails = not world.disk.fails
    elif kind == "abort":
        _abort(world, tape)
    elif kind == "revive worker":
        world.revive_worker(number)
        if world.dead:
            world.see_exit(world.dead[0], tape.draw)
    elif kind == "revive store":
        world.revive_store()
    else:
        for paused in world.workers:
            paused.paused = False
        world.store.paused = False
