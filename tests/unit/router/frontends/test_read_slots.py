"""Limits on concurrent reads, and the reads that give way."""

import asyncio
from typing import Any

import pytest

from tandem.router.errors import OverloadedError, RequestTimeoutError
from tandem.router.frontends import read_slots
from tandem.router.frontends.read_slots import ReadSlots
from tests.fakes.router_harness import run, settle


class Sender:
    """A message that arrives through slots."""

    def __init__(self, slots: ReadSlots, name: str = "", connection: str = "") -> None:
        self.begun = False
        self._sent: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._name = name
        self.reading = asyncio.create_task(slots.read(self._receive, connection))

    async def _receive(self) -> str:
        self.begun = True
        return await self._sent

    async def send(self) -> str:
        self._sent.set_result(self._name)
        return await self.reading


def slots(num_slots: int, **settings: Any) -> ReadSlots:
    return ReadSlots(num_slots, **{"grace_s": 60.0, "timeout_s": 60.0, "max_waiting": 100, **settings})


@run
async def test_so_many_are_read_at_once_and_the_others_in_turn() -> None:
    s = slots(2)
    senders = [Sender(s, str(i)) for i in range(5)]
    await settle()
    for i, sender in enumerate(senders):
        assert [other.begun for other in senders] == [other < i + 2 for other in range(5)]
        assert await sender.send() == str(i)
        await settle()
    again = [Sender(s) for _ in range(3)]
    await settle()
    assert [sender.begun for sender in again] == [True, True, False]


@run
async def test_nobody_gives_way_where_nobody_waits() -> None:
    s = slots(1, grace_s=0.0)
    slow = Sender(s, "slow")
    await asyncio.sleep(0.05)
    assert await slow.send() == "slow"


@run
async def test_the_one_that_has_taken_longest_gives_way_after_its_grace() -> None:
    s = slots(2, grace_s=0.1)
    oldest = Sender(s)
    await asyncio.sleep(0.03)
    older, late = Sender(s), Sender(s)
    await settle()
    assert not late.begun
    with pytest.raises(OverloadedError, match="give way"):
        await oldest.reading
    await settle()
    assert late.begun and not older.reading.done()
    assert await older.send() == await late.send() == ""


@run
async def test_stalled_messages_give_way_one_after_the_other() -> None:
    s = slots(3, grace_s=0.02)
    stalled = [Sender(s) for _ in range(20)]
    late = Sender(s, "late")
    await asyncio.sleep(0.5)
    assert await late.send() == "late"
    for sender in stalled:
        sender.reading.cancel()
    outcomes = await asyncio.gather(*(sender.reading for sender in stalled), return_exceptions=True)
    assert any(isinstance(outcome, OverloadedError) for outcome in outcomes)


@run
async def test_a_thousand_calls_of_one_connection_keep_no_other_waiting() -> None:
    s = slots(4, grace_s=0.05)
    flood = [Sender(s, connection="flood") for _ in range(1000)]
    await settle()
    others = [Sender(s, str(number), f"other {number}") for number in range(3)]
    began = asyncio.get_running_loop().time()
    # Their messages come with their calls.
    assert await asyncio.gather(*(other.send() for other in others)) == ["0", "1", "2"]
    assert asyncio.get_running_loop().time() - began < 1.0
    for sender in flood:
        sender.reading.cancel()
    await asyncio.gather(*(sender.reading for sender in flood), return_exceptions=True)
    # No waiting call is left over.
    last = [Sender(s, connection="flood") for _ in range(4)]
    await settle()
    assert all(sender.begun for sender in last) and not s._waiting and not s._num_waiting


@run
async def test_beyond_those_that_may_wait_the_first_of_them_is_refused() -> None:
    s = slots(1, max_waiting=2, newest_first=True)
    reading = Sender(s)
    await settle()
    waiting = [Sender(s, str(i)) for i in range(3)]
    with pytest.raises(OverloadedError, match="too many requests are on their way"):
        await waiting[0].reading
    await reading.send()
    await settle()
    assert [sender.begun for sender in waiting] == [False, False, True]
    assert await waiting[2].send() == "2"
    await settle()
    assert await waiting[1].send() == "1"


@run
async def test_who_leaves_gives_up_the_place_held_or_waited_for() -> None:
    s = slots(1)
    reading, waiting, last = Sender(s), Sender(s), Sender(s, "last")
    await settle()
    waiting.reading.cancel()
    await settle()
    reading.reading.cancel()
    await settle()
    assert await last.send() == "last"
    # A slot for a call that leaves at the same moment goes to the next.
    first, second, third = Sender(s), Sender(s), Sender(s, "third")
    await settle()
    first.reading.cancel()
    await asyncio.sleep(0)
    second.reading.cancel()
    await settle()
    assert await third.send() == "third"


@run
async def test_no_wait_is_without_end() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_slots, "WAIT_TIMEOUT_S", 0.05)
        s = slots(1, timeout_s=0.1)
        stalled, late = Sender(s), Sender(s)
        with pytest.raises(OverloadedError, match="too many"):
            await late.reading
        with pytest.raises(RequestTimeoutError, match=r"did not come within 0\.1 s"):
            await stalled.reading
    assert await Sender(s, "next").send() == "next"
