"""Order of a tier's and a scheduler's turns."""

from tandem.messages import ResetCache, WorkerStats
from tandem.page_changes import PageChanges
from tandem.pagestore.client.events import StoreClosed, StoreOpened
from tandem.pagestore.client.tiered_scheduler import TieredScheduler
from tandem.worker.base import Scheduler
from tandem.worker.events import Event, FromRouter, RouterLost
from tandem.worker.page_tier import NoTier


class Told:
    def __init__(self) -> None:
        self.calls: list[object] = []


class ScriptedTier(NoTier):
    def __init__(self, told: Told) -> None:
        self.told = told
        self.has_loaded = False
        self.violation = ""
        self.deadline: float | None = None

    def receive(self, event: Event) -> None:
        self.told.calls.append(("tier", event))

    def load_token_s(self) -> tuple[float, ...]:
        return (1e-5, 1e-4, 0.0)

    def settle(self) -> bool:
        self.told.calls.append("settle")
        return self.has_loaded

    def next_deadline(self) -> float | None:
        return self.deadline

    def reset(self) -> None:
        self.told.calls.append("reset")

    def check_integrity(self) -> str:
        return self.violation


class ScriptedScheduler(Scheduler):
    def __init__(self, told: Told) -> None:
        self.told = told
        self.worked = False
        self.violation = "a violation"
        self.deadline: float | None = None

    def receive(self, event: Event) -> None:
        self.told.calls.append(("scheduler", event))

    def step(self) -> bool:
        self.told.calls.append("step")
        return self.worked

    def next_deadline(self) -> float | None:
        return self.deadline

    def stats(self) -> WorkerStats:
        return WorkerStats(num_running=3)

    def take_cache_changes(self) -> PageChanges | None:
        return PageChanges((b"1",), ())

    def check_integrity(self) -> str:
        return self.violation


def make() -> tuple[Told, ScriptedTier, ScriptedScheduler, TieredScheduler]:
    told = Told()
    tier, scheduler = ScriptedTier(told), ScriptedScheduler(told)
    return told, tier, scheduler, TieredScheduler(scheduler, tier)


def test_events_go_where_they_belong() -> None:
    told, _, _, both = make()
    store = StoreOpened("e1", 10), StoreClosed("e1", lambda: None)
    for event in store:
        both.receive(event)
    both.receive(RouterLost("r"))
    assert told.calls == [("tier", store[0]), ("tier", store[1]), ("scheduler", RouterLost("r"))]


def test_tier_is_reset_before_the_scheduler_drops_its_pages() -> None:
    told, _, _, both = make()
    reset = FromRouter(ResetCache())
    both.receive(reset)
    assert told.calls == ["reset", ("scheduler", reset)]


def test_tier_settles_before_each_step() -> None:
    told, tier, scheduler, both = make()
    assert not both.step()
    assert told.calls == ["settle", "step"]
    tier.has_loaded = True
    assert both.step()
    tier.has_loaded, scheduler.worked = False, True
    assert both.step()


def test_earlier_deadline_counts() -> None:
    _, tier, scheduler, both = make()
    assert both.next_deadline() is None
    scheduler.deadline = 5.0
    assert both.next_deadline() == 5.0
    tier.deadline = 4.0
    assert both.next_deadline() == 4.0


def test_the_rest_is_the_schedulers() -> None:
    _, tier, scheduler, both = make()
    assert (both.stats().num_running, both.check_integrity()) == (3, "a violation")
    scheduler.violation, tier.violation = "", "of the tier"
    assert both.check_integrity() == "of the tier"
    assert both.stats().load_token_s == (1e-5, 1e-4, 0.0)
    assert both.take_cache_changes() == PageChanges((b"1",), ())
