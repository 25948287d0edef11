"""Opening of transports: nothing blocks on it, and no unwanted end stays open."""

import asyncio
import threading

import pytest

from tandem.kvtransfer.transports import opening
from tandem.kvtransfer.transports.opening import OpeningError, open_end, open_ends
from tests.fakes.link_ends import wait_until
from tests.fakes.transport import ScriptedTransport


def test_opened_end_is_returned() -> None:
    end = ScriptedTransport()
    assert asyncio.run(open_end(lambda: end)) is end
    assert not end.aborted


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no such pool"), "no such pool"),
        (ConnectionRefusedError(111, "Connection refused"), "[Errno 111] Connection refused"),
        # Not the opening's own timeout, though of the same type.
        (TimeoutError("timed out"), "timed out"),
        (OSError(), "OSError()"),
        (ZeroDivisionError("surprise"), "ZeroDivisionError('surprise')"),
    ],
)
def test_errors_become_reasons(error: Exception, reason: str) -> None:
    def fail() -> ScriptedTransport:
        raise error

    with pytest.raises(OpeningError) as raised:
        asyncio.run(open_end(fail))
    assert str(raised.value) == reason and type(raised.value.__cause__) is type(error)


def test_late_end_is_closed_by_its_opening_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "OPEN_TIMEOUT_S", 0.05)
    end, may_open = ScriptedTransport(), threading.Event()
    end.copy_pages(0, [1], [1])

    def open_late() -> ScriptedTransport:
        assert may_open.wait(10.0)
        return end

    async def scenario() -> None:
        with pytest.raises(OpeningError, match=r"did not open within 0.05 s"):
            await open_end(open_late)
        may_open.set()
        await wait_until(lambda: end.aborted)
        # Poll until the end has released its peer's memory.
        await asyncio.sleep(0.05)
        assert any(thread.name == "open-transport" for thread in threading.enumerate())
        end.complete_all()
        await wait_until(lambda: all(thread.name != "open-transport" for thread in threading.enumerate()))

    asyncio.run(scenario())


@pytest.mark.parametrize("opened_before", [True, False])
def test_cancelled_opening_is_closed(opened_before: bool) -> None:
    end, may_open, opened = ScriptedTransport(), threading.Event(), threading.Event()

    def open_now() -> ScriptedTransport:
        assert may_open.wait(10.0)
        opened.set()
        return end

    async def scenario() -> None:
        task = asyncio.create_task(open_end(open_now))
        await asyncio.sleep(0.05)
        if opened_before:
            # Cancel before the loop learns that the end has opened.
            may_open.set()
            assert opened.wait(10.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_open.set()
        await wait_until(lambda: end.aborted)

    asyncio.run(scenario())


def test_opening_does_not_block_the_loop() -> None:
    may_open = threading.Event()

    def open_now() -> ScriptedTransport:
        assert may_open.wait(10.0)
        return ScriptedTransport()

    async def scenario() -> None:
        slow = asyncio.create_task(open_end(open_now))
        await asyncio.wait_for(open_end(ScriptedTransport), 5.0)
        assert not slow.done()
        may_open.set()
        await slow

    asyncio.run(scenario())


@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "failed"])
def test_several_ends_open_all_or_none(is_cancelled: bool) -> None:
    early, late, may_open, may_fail = ScriptedTransport(), ScriptedTransport(), threading.Event(), threading.Event()

    def open_late() -> ScriptedTransport:
        assert may_open.wait(10.0)
        return late

    def fail() -> ScriptedTransport:
        assert may_fail.wait(10.0)
        raise OSError("no memory")

    async def scenario() -> None:
        opening_all = asyncio.create_task(open_ends([lambda: early, open_late, fail]))
        await asyncio.sleep(0.05)
        if is_cancelled:
            opening_all.cancel()
        else:
            may_fail.set()
        with pytest.raises(asyncio.CancelledError if is_cancelled else OpeningError):
            await opening_all
        await wait_until(lambda: early.aborted)
        assert not late.aborted
        may_open.set()
        await wait_until(lambda: late.aborted)
        may_fail.set()
        both = [ScriptedTransport(), ScriptedTransport()]
        assert await open_ends([lambda: both[0], lambda: both[1]]) == both

    asyncio.run(scenario())
