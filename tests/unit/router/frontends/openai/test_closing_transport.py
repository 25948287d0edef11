"""Closing a connection, on a clock of the test's own."""

from collections.abc import Callable

import pytest

from tandem.router.frontends.openai import closing_transport
from tandem.router.frontends.openai.closing_transport import ClosingTransport, DiscardBudget


class Clock:
    """Stands in for a loop."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, Timer]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay_s: float, call: Callable[[], None]) -> "Timer":
        timer = Timer(call)
        self._timers.append((self.now + delay_s, timer))
        return timer

    def pass_s(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [entry for entry in self._timers if entry[0] <= end]:
            entry = min(due, key=lambda one: one[0])
            self._timers.remove(entry)
            self.now = max(self.now, entry[0])
            if not entry[1].is_cancelled:
                entry[1].call()
        self.now = end


class Timer:
    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeTransport:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.num_unsent = 0
        self.get_extra_info = None

    def write(self, data: bytes) -> None:
        self.num_unsent += len(data)

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def can_write_eof(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return "close" in self.calls or "abort" in self.calls

    def __getattr__(self, name: str) -> Callable[[], None]:
        return lambda: self.calls.append(name)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def inner() -> FakeTransport:
    return FakeTransport()


@pytest.fixture
def transport(clock: Clock, inner: FakeTransport) -> ClosingTransport:
    budget = DiscardBudget(1000, clock.time)
    return ClosingTransport(inner, clock, budget)  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_unsent", "end"), [(0, "abort"), (100, "close")])
def test_a_peer_that_is_still_sending_is_heard_for_a_while(
    num_unsent: int, end: str, transport: ClosingTransport, clock: Clock, inner: FakeTransport
) -> None:
    """In TLS, a close would read on without a limit."""
    inner.num_unsent = num_unsent
    transport.is_peer_sending = True
    transport.close()
    assert transport.is_closing()
    assert inner.calls == ["write_eof", "resume_reading"]
    transport.write(b"late")
    assert inner.num_unsent == num_unsent
    transport.discard(600)
    clock.pass_s(closing_transport.LINGER_S / 2)
    assert end not in inner.calls
    clock.pass_s(closing_transport.LINGER_S / 2)
    assert inner.calls[-1] == end


def test_a_peer_that_sends_more_than_the_budget_is_slowed(
    transport: ClosingTransport, clock: Clock, inner: FakeTransport
) -> None:
    transport.is_peer_sending = True
    transport.close()
    transport.discard(600)
    assert inner.calls[-1] == "resume_reading"
    transport.discard(900)
    assert inner.calls[-1] == "pause_reading"
    clock.pass_s(0.49)
    assert inner.calls[-1] == "pause_reading"
    clock.pass_s(0.02)
    assert inner.calls[-1] == "resume_reading"
    transport.discard(10_000_000)
    clock.pass_s(60.0)
    assert inner.calls[-2:] == ["pause_reading", "abort"], "it waits no longer than any other"


def test_connections_share_a_budget_that_grows_with_time(clock: Clock) -> None:
    budget = DiscardBudget(1000, clock.time)
    assert budget.take(1000) == 0.0
    assert budget.take(100) == pytest.approx(0.1)
    clock.pass_s(0.5)
    assert budget.take(399) == 0.0
    assert budget.take(1000) == pytest.approx(1.0, abs=0.01)
    clock.pass_s(3600.0)
    assert budget.take(1000) == 0.0, "it grows no further than for a second"
    assert budget.take(1) > 0.0


def test_a_closed_connection_ends_when_the_peer_takes_nothing(
    transport: ClosingTransport, clock: Clock, inner: FakeTransport
) -> None:
    transport.write(bytes(100))
    transport.close()
    for _ in range(20):
        inner.num_unsent -= 1
        clock.pass_s(closing_transport.UNREAD_TIMEOUT_S - 2)
    assert "abort" not in inner.calls, "the peer goes on reading"
    clock.pass_s(closing_transport.UNREAD_TIMEOUT_S + closing_transport.CHECK_INTERVAL_S)
    assert inner.calls[-1] == "abort"


def test_a_closed_connection_waits_little_for_the_peer_s_goodbye(
    transport: ClosingTransport, clock: Clock, inner: FakeTransport
) -> None:
    transport.close()
    clock.pass_s(closing_transport.GOODBYE_TIMEOUT_S + closing_transport.CHECK_INTERVAL_S)
    assert inner.calls == ["close", "abort"]


@pytest.mark.parametrize("close", ["close", "close_at_once"])
def test_a_lost_connection_has_no_timers(
    transport: ClosingTransport, clock: Clock, inner: FakeTransport, close: str
) -> None:
    transport.is_peer_sending = True
    getattr(transport, close)()
    transport.lost()
    num_calls = len(inner.calls)
    transport.close()
    clock.pass_s(3600.0)
    assert len(inner.calls) == num_calls


def test_closing_at_once_hears_nothing(transport: ClosingTransport, inner: FakeTransport) -> None:
    transport.is_peer_sending = True
    transport.close_at_once()
    transport.close()
    assert inner.calls == ["close"]
