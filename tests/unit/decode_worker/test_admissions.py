from tandem.decode_worker import admissions
from tandem.decode_worker.admissions import Admissions
from tandem.messages import Admit
from tandem.sampling_params import SamplingParams
from tests.fakes.clock import FakeClock


def admit(request_id: str, attempt: int = 0, duration_s: float = 10.0) -> Admit:
    return Admit(request_id, attempt, (1, 2), (), SamplingParams(4), duration_s)


def test_admitted_request_is_found_until_taken() -> None:
    remembered = Admissions(FakeClock())
    first, second = admit("r"), admit("r", attempt=1)
    remembered.remember_admitted(first)
    remembered.remember_admitted(second)
    assert remembered.attempts() == [("r", 0), ("r", 1)]
    assert remembered.find_admitted(("r", 0)) is remembered.take_admitted(("r", 0)) is first
    assert remembered.find_admitted(("r", 0)) is remembered.take_admitted(("r", 0)) is None
    assert remembered.find_admitted(("r", 1)) is second


def test_each_request_has_its_own_time() -> None:
    clock = FakeClock()
    remembered = Admissions(clock)
    remembered.remember_admitted(admit("short", duration_s=5.0))
    remembered.remember_admitted(admit("long", duration_s=50.0))
    assert remembered.next_deadline() == clock.now + 5.0
    clock.advance(5.0)
    assert remembered.take_expired() == [("short", 0)]
    assert remembered.next_deadline() == clock.now + 45.0
    clock.advance(44.0)
    assert remembered.take_expired() == []
    clock.advance(1.0)
    assert remembered.take_expired() == [("long", 0)]
    assert remembered.next_deadline() is None


def test_ended_attempt_is_remembered_without_its_request() -> None:
    remembered = Admissions(FakeClock())
    remembered.remember_admitted(admit("r"))
    remembered.mark_ended(("r", 0))
    # An Abort may overtake its Admit.
    remembered.mark_ended(("other", 3))
    assert remembered.find_admitted(("r", 0)) is None and remembered.next_deadline() is None
    assert remembered.has_ended(("r", 0)) and remembered.has_ended(("other", 3))
    assert not remembered.has_ended(("r", 1))


def test_the_oldest_ends_are_forgotten() -> None:
    remembered = Admissions(FakeClock())
    for i in range(admissions.NUM_ENDED_REMEMBERED + 2):
        remembered.mark_ended((f"r{i}", 0))
    assert [remembered.has_ended((f"r{i}", 0)) for i in range(4)] == [False, False, True, True]
