"""The queue of leases without pages; the test decides which leases fit."""

from tandem.decode_worker.config import DecodeConfig
from tandem.decode_worker.lease import Lease
from tandem.decode_worker.waiting_leases import MAX_PASSED_OVER, WaitingLeases
from tandem.kvtransfer.receiver_link import ReceiverLink
from tandem.messages import Admit, LeaseRequest
from tandem.priority import HEAD_START_S
from tandem.sampling_params import SamplingParams
from tests.fakes.clock import FakeClock
from tests.fakes.transport import ScriptedReceiver

GRACE_S, MAX_OVERTAKEN = 2.0, 8
SECOND_NS = 10**9


class Line:
    """
    Attributes:
        num_pages: grantable pages; a lease takes one per token of its request.
        tried: requests tried in the last scan, in order.
    """

    def __init__(self, num_pages: int = 0, max_waiting: int = 1000) -> None:
        self.clock = FakeClock()
        config = DecodeConfig(admit_grace_s=GRACE_S, max_overtaken=MAX_OVERTAKEN, max_waiting=max_waiting)
        self.waiting = WaitingLeases(self.clock, config)
        self.link = ReceiverLink("p", "p life", "epoch", ScriptedReceiver(), lambda: False, lambda _: None)
        self.num_pages = num_pages
        self.tried: list[str] = []

    def lease(self, name: str, num_tokens: int, attempt: int = 0) -> Lease:
        return Lease(LeaseRequest(f"{name}.{attempt}", name, attempt, num_tokens), self.link)

    def admit(self, name: str, num_tokens: int, arrival_s: float = 0.0, priority: int = 0, attempt: int = 0) -> Admit:
        arrival_ns = int(arrival_s * SECOND_NS)
        return Admit(name, attempt, (1,) * num_tokens, (), SamplingParams(1), 60.0, arrival_ns, priority)

    def ask(self, name: str, num_tokens: int, arrival_s: float = 0.0, priority: int = 0, attempt: int = 0) -> str:
        """Queue a request; return the request refused for it, or ""."""
        admit = self.admit(name, num_tokens, arrival_s, priority, attempt)
        last = self.waiting.enqueue(self.lease(name, num_tokens, attempt), admit)
        return last.request.request_id if last else ""

    def restart(self, name: str, num_tokens: int, arrival_s: float = 0.0, attempt: int = 1) -> None:
        self.waiting.end_attempt((name, attempt - 1))
        assert self.waiting.announce(self.admit(name, num_tokens, arrival_s, attempt=attempt)) is None

    def look(self, num_pages: int | None = None) -> list[str]:
        """Run one step; return the granted requests."""
        self.num_pages = self.num_pages if num_pages is None else num_pages
        granted: list[str] = []
        self.tried.clear()

        def grant(waiting: Lease) -> bool:
            self.tried.append(waiting.request.request_id)
            if waiting.request.num_tokens > self.num_pages:
                return False
            self.num_pages -= waiting.request.num_tokens
            granted.append(waiting.request.request_id)
            return True

        assert self.waiting.take_overdue() == []
        self.waiting.grant_in_order(lambda: self.num_pages, grant)
        return granted


def test_oldest_request_goes_first_regardless_of_queue_time() -> None:
    line = Line()
    for name, arrival_s in (("b", 2), ("a", 1), ("c", 3)):
        line.ask(name, 1, arrival_s)
    assert line.look(3) == ["a", "b", "c"]


def test_a_larger_priority_goes_first_until_its_head_start_is_used_up() -> None:
    line = Line()
    line.ask("low", 1, 0.0)
    line.ask("in time", 1, HEAD_START_S - 1, priority=1)
    line.ask("too late", 1, HEAD_START_S + 1, priority=1)
    assert line.look(3) == ["in time", "low", "too late"]


def test_nothing_is_tried_again_until_something_has_changed() -> None:
    line = Line(num_pages=2)
    line.ask("large", 9)
    line.ask("largest", 10, 1.0)
    assert line.look() == [] and line.tried == ["large", "largest"]
    assert line.look() == [] and line.tried == []
    assert line.look(num_pages=1) == [] and line.tried == [], "fewer pages are no change"
    assert line.look(num_pages=3) == [] and line.tried == ["large", "largest"]
    line.ask("another", 9, 2.0)
    assert line.look() == [] and line.tried[-1] == "another"
    line.waiting.look_again()
    assert line.look() == [] and len(line.tried) == 3
    found = line.waiting.of_attempt(("large", 0))
    assert found is not None
    line.waiting.remove(found)
    assert line.look() == [] and line.tried == ["largest", "another"]


def test_step_work_does_not_grow_with_the_queue() -> None:
    line = Line()
    for i in range(500):
        line.ask(f"r{i}", 5, float(i))
    assert line.look(num_pages=4) == [] and len(line.tried) == MAX_PASSED_OVER


def test_overtaking_is_bounded_over_all_attempts() -> None:
    line = Line()
    line.ask("large", 9)
    num_overtakes = 0
    for i in range(100):
        line.ask(f"small{i}", 1, 1.0 + i)
        num_overtakes += len(line.look(num_pages=3))
        if i % 5 == 4:
            line.restart("large", 9, attempt=1 + i // 5)
            num_overtakes += len(line.look())
            line.ask("large", 9, attempt=1 + i // 5)
    assert num_overtakes <= MAX_OVERTAKEN
    assert line.look(num_pages=9) == ["large"]
    assert len(line.look(num_pages=200)) == 100 - num_overtakes


def test_a_restarted_request_finds_its_place_held() -> None:
    line = Line()
    line.ask("large", 9)
    line.ask("small", 1, 1.0)
    line.waiting.look_again()
    line.restart("large", 9)
    assert line.look(num_pages=9) == [], "its pages are not given away while it asks again"
    line.ask("older", 1, -1.0)
    assert line.look() == ["older"]
    line.ask("large", 9, attempt=1)
    assert line.look(num_pages=9) == ["large"]
    assert line.look(num_pages=1) == ["small"]


def test_a_place_is_held_no_longer_than_a_lease_request_takes() -> None:
    line = Line()
    line.ask("large", 9)
    line.ask("small", 1, 1.0)
    line.restart("large", 9)
    assert line.waiting.next_deadline() == line.clock.now + GRACE_S
    line.clock.advance(GRACE_S)
    assert line.look(num_pages=9) == ["small"]
    assert line.waiting.next_deadline() is None


def test_a_request_that_ends_for_good_holds_no_place() -> None:
    line = Line()
    for name in ("cancelled", "cancelled between attempts"):
        line.ask(name, 9)
    line.ask("small", 1, 1.0)
    line.waiting.end_attempt(("cancelled", 0))
    line.restart("cancelled between attempts", 9)
    line.waiting.end_attempt(("cancelled between attempts", 1))
    assert line.look(num_pages=9) == ["small"]
    assert len(line.waiting) == 0


def test_only_queued_requests_keep_a_place() -> None:
    line = Line()
    line.ask("small", 1, 1.0)
    line.restart("came from elsewhere", 9)
    assert line.look(num_pages=9) == ["small"]


def test_beyond_the_limit_the_last_in_line_is_refused() -> None:
    line = Line(max_waiting=2)
    assert line.ask("b", 1, 2.0) == line.ask("c", 1, 3.0) == ""
    assert line.ask("a", 1, 1.0) == "c"
    assert line.ask("d", 1, 4.0) == "d"
    assert not line.waiting.park(line.lease("parked", 1))
    assert len(line.waiting) == 2
    assert line.look(num_pages=9) == ["a", "b"]
    assert line.waiting.park(line.lease("parked", 1))


def test_parked_request_without_admit_is_removed() -> None:
    line = Line()
    line.waiting.park(line.lease("first", 1))
    line.clock.advance(1.0)
    line.waiting.park(line.lease("second", 1))
    assert line.look(num_pages=9) == [] and line.tried == []
    assert line.waiting.next_deadline() == line.clock.now + 1.0
    line.clock.advance(1.0)
    assert [w.request.request_id for w in line.waiting.take_overdue()] == ["first"]
    second = line.waiting.announce(line.admit("second", 1))
    assert second is not None
    line.waiting.enqueue(second, line.admit("second", 1))
    line.clock.advance(100.0)
    assert line.look() == ["second"]
    assert len(line.waiting) == 0 and line.waiting.next_deadline() is None


def test_refused_requests_keep_their_overtake_count() -> None:
    line = Line(max_waiting=2)
    line.ask("large", 100, arrival_s=5)
    num_overtaken = 0
    for number in range(3 * MAX_OVERTAKEN):
        # A later lease that fits goes first while it may; then older ones push the large one out of the queue.
        line.ask(f"small {number}", 1, arrival_s=6 + number)
        num_overtaken += line.look(1) == [f"small {number}"]
        waiting = line.waiting.of_attempt((f"small {number}", 0))
        if waiting is not None:
            line.waiting.remove(waiting)
        line.ask(f"old {number}", 50, arrival_s=1)
        assert line.ask(f"older {number}", 50, arrival_s=0) == "large"
        for name in (f"old {number}", f"older {number}"):
            older = line.waiting.of_attempt((name, 0))
            assert older is not None
            line.waiting.remove(older)
        assert line.ask("large", 100, arrival_s=5) == ""
    assert num_overtaken == MAX_OVERTAKEN
