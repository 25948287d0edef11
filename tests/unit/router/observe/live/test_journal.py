from tandem.messages import LinkState
from tandem.router.observe.live.journal import LOSS_S, MAX_ENTRIES, MERGE_S, Journal
from tests.fakes.clock import FakeClock
from tests.fakes.router_harness import RouterHarness
from tests.fakes.scripted_worker import ScriptedWorker


def told(journal: Journal, version: int = 0) -> list[tuple[str, str, int, bool]]:
    return [(entry.subject, entry.text, entry.count, entry.is_fault) for entry in journal.since(version)]


def test_lost_and_returned_worker() -> None:
    h = RouterHarness()
    version = h.router.live.journal.version
    h.router.lose_worker(h.d[0].worker, "silent", "no heartbeat for 1 s")
    ScriptedWorker(h.router, "d0", "decode", life="second")
    assert told(h.router.live.journal, version) == [
        ("d0", "lost, silent: no heartbeat for 1 s", 1, True),
        ("d0", "joined", 1, False),
    ]


def test_link_down_and_up_again() -> None:
    h = RouterHarness()
    journal = h.router.live.journal
    assert not any("to" in subject for subject, *_ in told(journal))
    version = journal.version
    h.p[0].say(LinkState("d0", "d0-life", up=False, reason="it broke"))
    h.p[0].say(LinkState("d0", "d0-life", up=True))
    assert told(journal, version) == [("p0 to d0", "down: it broke", 1, True), ("p0 to d0", "up again", 1, False)]


def grouped(journal: Journal) -> list[list[str]]:
    """Returns the subjects of each loss and its effects, oldest first; an entry that stands alone is a list of one."""
    groups: dict[int, list[str]] = {}
    for entry in journal.since(0):
        groups.setdefault(entry.loss or -entry.number, []).append(entry.subject)
    return list(groups.values())


def lose(h: RouterHarness, index: int = 0) -> None:
    h.router.lose_worker(h.d[index].worker, "disconnected", "the stream broke")


def test_effects_of_a_loss_belong_to_it_whichever_is_noticed_first() -> None:
    h, clock = RouterHarness(num_prefill=2, num_decode=2), FakeClock()
    journal = h.router.live.journal = Journal(clock)
    h.p[0].say(LinkState("d1", "d1-life", up=False, reason="another fault"))
    clock.advance(LOSS_S + 1)
    version = journal.version
    h.p[0].say(LinkState("d0", "d0-life", up=False, reason="reset"))
    journal.attempt_restarted("lease_lost")
    clock.advance(1.0)
    lose(h)
    journal.attempt_restarted("worker_lost")
    journal.attempt_restarted("given_back")
    h.p[1].say(LinkState("d0", "d0-life", up=False, reason="reset"))
    # An entry that joins its loss is sent again.
    assert {"p0 to d0", "d0"} <= {entry.subject for entry in journal.since(version + 2)}
    clock.advance(100.0)
    ScriptedWorker(h.router, "d0", "decode", life="second")
    for prefill in h.p:
        prefill.link_to_life("d0", "d0-second")
    effects = ["p0 to d0", "requests", "d0", "requests", "p1 to d0", "d0", "p0 to d0", "p1 to d0"]
    assert grouped(journal) == [["p0 to d1"], effects, ["requests"]]


def test_later_faults_are_not_effects_of_a_loss() -> None:
    h, clock = RouterHarness(num_decode=2), FakeClock()
    journal = h.router.live.journal = Journal(clock)
    lose(h)
    ScriptedWorker(h.router, "d0", "decode", life="second")
    h.p[0].link_to_life("d0", "d0-second")
    clock.advance(LOSS_S)
    journal.attempt_restarted("worker_lost")
    h.p[0].say(LinkState("d0", "d0-second", up=False, reason="reset"))
    h.p[0].say(LinkState("d0", "d0-second", up=True))
    clock.advance(LOSS_S + 1)
    lose(h, 1)
    assert grouped(journal) == [["d0", "d0"], ["requests"], ["p0 to d0"], ["p0 to d0"], ["d1"]]


def test_equal_events_merge() -> None:
    clock = FakeClock()
    journal = Journal(clock)
    journal.attempt_restarted("worker_lost")
    version = journal.version
    journal.worker_lost("d0", "disconnected", "gone")
    journal.attempt_restarted("worker_lost")
    assert told(journal, version) == [
        ("requests", "restarted: worker lost", 2, False),
        ("d0", "lost, disconnected: gone", 1, True),
    ]
    clock.advance(MERGE_S)
    journal.attempt_restarted("worker_lost")
    assert [count for _, _, count, _ in told(journal)] == [2, 1, 1]


def test_the_oldest_entries_are_forgotten() -> None:
    journal = Journal(FakeClock())
    for number in range(MAX_ENTRIES + 5):
        journal.worker_lost(f"d{number}", "silent", "")
    subjects = [subject for subject, *_ in told(journal)]
    assert (len(subjects), subjects[0]) == (MAX_ENTRIES, "d5")


def test_router_start_and_other_routers() -> None:
    journal = Journal(FakeClock())
    journal.started("router-0", 2)
    journal.router_seen("router-1", alive=False)
    assert told(journal) == [("router-0", "started, restart 2", 1, True), ("router-1", "does not answer", 1, True)]
