"""Random schedules of a simulated node, with checks at the end.

A schedule is a tape of bytes; each byte chooses the next event. When the tape ends, faults end too, and all requests
must finish.
"""

from tests.fakes.page_store.end import check_end, drain
from tests.fakes.page_store.jobs import token_at
from tests.fakes.page_store.memory import PAGE_SIZE
from tests.fakes.page_store.world import COPIES, DISK, DOWN, FORWARDS, UP, Sizes, World
from tests.fakes.simulation.schedule import Tape

# The largest request has as many pages.
LARGEST_PAGES = 6
MAX_LEN = LARGEST_PAGES * PAGE_SIZE
# Rounds during which copies may stand still.
MAX_LONG_ROUNDS = 10


def run_schedule(data: bytes, is_recounted: bool = True) -> World:
    """Runs a schedule to its end.

    Args:
        is_recounted: the parts check their own books after every event, too.

    Raises:
        AssertionError: a guarantee is broken.
    """
    tape = Tape(data)
    sizes = Sizes(
        num_workers=(2, 3, 2, 1)[tape.draw(4)],
        num_pages=LARGEST_PAGES + tape.draw(5),
        num_slots=(12, 6, 20, 3)[tape.draw(4)],
        max_disk_pages=(8, 0, 20)[tape.draw(3)],
        write_after=(0, 0, 0, 2)[tape.draw(4)],
        token_s=(10.0, 0.1, 1000.0, 1.0, 10.0, 1e-6)[tape.draw(6)],
        is_recounted=is_recounted,
    )
    world = World(sizes)
    # With few faults, caches fill up.
    has_faults = bool(tape.draw(4))
    is_fast = bool(tape.draw(2))
    store_away = ("", "", "dead", "paused")[tape.draw(4)] if has_faults else ""
    while not tape.ended:
        _happen(world, tape, has_faults, is_fast)
    drain(world, store_away)
    world.counts["resets completed"] += world.resets.num_completed
    check_end(world)
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
    for _ in range(MAX_LONG_ROUNDS):
        if world.copies:
            break
        world.round(COPIES)
    for _ in range(tape.draw(3)):
        world.round(COPIES | DOWN)
    if not tape.draw(10):
        world.reset()
    else:
        _fault(world, tape)
    lag = COPIES | (0, 0, UP, DOWN, DISK, FORWARDS)[tape.draw(6)]
    for _ in range(tape.draw(MAX_LONG_ROUNDS)):
        world.round(lag)
        if not tape.draw(4):
            _submit(world, tape)


def _submit(world: World, tape: Tape) -> None:
    """Few distinct beginnings, which outputs continue: prefixes are often shared, also with another namespace."""
    alive = [worker for worker in world.workers if worker.runs]
    if not alive:
        return
    length = 1 + max(tape.draw(MAX_LEN - 1), tape.draw(MAX_LEN - 1))
    # Prompts are equal up to a page.
    fork = tape.draw(2 * LARGEST_PAGES)
    token_ids = [token_at(i, int(i // PAGE_SIZE >= fork)) for i in range(length)]
    namespace = ("", "", "", "b")[tape.draw(4)]
    kind = ("prefill", "decode")[tape.draw(2)]
    worker = alive[tape.draw(len(alive))]
    world.submit(worker, namespace, token_ids, length + 1 + tape.draw(MAX_LEN - length), kind)


def _abort(world: World, tape: Tape) -> None:
    worker = world.workers[tape.draw(len(world.workers))]
    jobs = [*worker.jobs.queued, *worker.jobs.running]
    if worker.runs and jobs:
        worker.jobs.abort(jobs[tape.draw(len(jobs))])


def _fault(world: World, tape: Tape) -> None:
    kind = tape.draw(14)
    number = tape.draw(len(world.workers))
    worker = world.workers[number]
    if kind == 0 and worker.alive:
        world.kill_worker(worker, tape.draw)
    elif kind == 1:
        worker.paused = worker.alive and not worker.paused
    elif kind == 2:
        world.kill_store(tape.draw)
        if tape.draw(2):
            world.revive_store()
    elif kind == 3:
        world.store.paused = world.store.alive and not world.store.paused
    elif kind in (4, 5) and worker.session is not None:
        worker.session.cut(tape.draw(4), tape.draw(4))
        world.counts["streams cut"] += 1
    elif kind in (6, 7):
        world.revive_worker(number)
        if world.dead:
            world.see_exit(world.dead[0], tape.draw)
    elif kind in (8, 9):
        world.revive_store()
    elif kind == 10 and world.disk is not None:
        world.disk.fails = not world.disk.fails
    elif kind == 11 and worker.session is not None:
        worker.session.repeat(tape.draw)
    else:
        for paused in world.workers:
            paused.paused = False
        world.store.paused = False
