"""Messages of retried actions."""

from tandem.repeat_limit import REPEAT_INTERVAL_S, RepeatLimit
from tests.fakes.clock import FakeClock


def test_repeated_message_is_let_through_once_a_minute() -> None:
    clock = FakeClock()
    limit = RepeatLimit(clock)
    assert [limit.allows(text) for text in ("a", "a", "b", "a", "b")] == [True, False, True, False, False]
    clock.advance(REPEAT_INTERVAL_S - 1)
    assert not limit.allows("a")
    clock.advance(2)
    assert limit.allows("a") and not limit.allows("a")
    limit.forget()
    assert limit.allows("a")
