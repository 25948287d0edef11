"""The end of a schedule: without faults all requests finish, everything comes to rest, and nothing is lost."""

from collections.abc import Sequence

from tandem.messages import PROTOCOL_VERSION
from tandem.pagestore.messages import (
    EndFind,
    Find,
    Found,
    GaveUp,
    Put,
    PutGranted,
    StoreHello,
    StoreServerMessage,
    StoreWelcome,
)
from tests.fakes.page_store.memory import PAGE_FORMAT
from tests.fakes.page_store.store import PROBE
from tests.fakes.page_store.world import MAX_ROUNDS, World

# Rounds without any event, as some parts look only now and then.
QUIET_ROUNDS = 4
# Later deadlines are those of things that do not happen.
REST_S = 0.9


def drain(world: World, store_away: str) -> None:
    """Ends all faults and runs everything until it rests.

    Args:
        store_away: "dead" or "paused": workers must finish their requests without the store, which then comes back.
    """
    for worker in world.workers:
        worker.paused = False
    for dead in list(world.dead):
        world.see_exit(dead, lambda limit: 0)
    for number in range(len(world.workers)):
        world.revive_worker(number)
    world.store.paused = store_away == "paused"
    if store_away == "dead":
        world.kill_store(lambda limit: 0)
    else:
        world.revive_store()
    _finish_jobs(world)
    world.store.paused = False
    world.revive_store()
    _finish_jobs(world)
    _rest(world)


def _finish_jobs(world: World) -> None:
    for _ in range(MAX_ROUNDS):
        if not world.round():
            if all(job.ended for job in world.jobs):
                return
            world.advance_to_deadline()
    waiting = [job for job in world.jobs if not job.ended]
    raise AssertionError(f"no progress: {waiting}" if waiting else "no rest: something happens all the time")


def _rest(world: World) -> None:
    quiet = 0
    for _ in range(MAX_ROUNDS):
        is_quiet = not world.round() and world.next_deadline() > world.clock.now + REST_S
        is_quiet = is_quiet and not (world.store.disk is not None and world.store.disk.is_busy)
        quiet = quiet + 1 if is_quiet else 0
        if quiet > QUIET_ROUNDS:
            return
        world.advance_to_deadline()
    raise AssertionError("no rest: something happens all the time")


def check_end(world: World) -> None:
    """Checks that nothing is lost: every page and slot can be had, and every stored page has its key's content."""
    assert not world.copies, "copies wait for something"
    for worker in world.workers:
        assert worker.session is not None and worker.session.epoch == world.store.pages.epoch, "a worker stays alone"
        cache = worker.cache
        assert (cache.num_locked_pages, cache.num_leased_pages) == (0, 0), f"{worker.incarnation} has lost pages"
        assert not worker.view.granted, f"{worker.incarnation} has kept grants of slots {set(worker.view.granted)}"
        finds = [number for number, slots in worker.view.found.items()]
        assert not finds, f"{worker.incarnation} has kept finds {finds}"
    assert not world.store.ledger.writers and not world.store.ledger.finds
    # The workers repeat a purge that the disk has failed to keep to the store's next life.
    is_lost = world.resets.incomplete and not world.store.pages.purge_failure
    assert not is_lost, f"the purges of resets {world.resets.incomplete} are lost"
    _Probe(world).check()


class _Probe:
    """A client of the store that looks for every page, and then takes all slots."""

    def __init__(self, world: World) -> None:
        self._world, self._store = world, world.store
        self._asked = 0
        hello = StoreHello(PROTOCOL_VERSION, "probe", "probe", 1, PAGE_FORMAT)
        self._store.pages.open_session(PROBE, hello, lambda: True)
        (welcome,) = self._take()
        assert isinstance(welcome, StoreWelcome)

    def check(self) -> None:
        for keys in self._world.chains():
            self._check_find(keys)
        for _ in range(QUIET_ROUNDS):
            self._world.round()
        self._check_room()

    def _check_find(self, keys: Sequence[bytes]) -> None:
        self._asked += 1
        self._store.pages.receive(PROBE, Find(self._asked, tuple(keys)))
        found = 0
        for _ in range(MAX_ROUNDS):
            coming = 1
            for answer in self._take():
                assert isinstance(answer, Found) and answer.first == found
                for key, slot in zip(keys[found:], answer.slots, strict=False):
                    self._world.check_is_stored(slot, key, "is found")
                found += len(answer.slots)
                coming = answer.num_coming
            if not coming:
                break
            self._world.round()
        else:
            raise AssertionError("a find does not end")
        self._store.pages.receive(PROBE, EndFind(self._asked))
        self._take()

    def _check_room(self) -> None:
        """Checks that all slots can be had at once."""
        keys = tuple(b"%32d" % i for i in range(self._world.num_slots))
        self._store.pages.receive(PROBE, Put(0, "probe", b"", keys, tuple(key[-8:] for key in keys)))
        (answer,) = self._take()
        assert isinstance(answer, PutGranted)
        assert sorted(answer.slots) == list(range(self._world.num_slots)), f"slots are lost: {answer.slots}"
        self._store.pages.receive(PROBE, GaveUp(answer.slots, answer.generations))
        self._world.check()

    def _take(self) -> list[StoreServerMessage]:
        self._store.send()
        answers, self._store.to_probe = self._store.to_probe, []
        return answers
