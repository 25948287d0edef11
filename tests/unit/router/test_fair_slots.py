import asyncio

import pytest

from tandem.router import fair_slots
from tandem.router.fair_slots import FairSlots
from tests.fakes.router_harness import run, settle


class Work:
    """Requests that hold a slot until they are let go. Attributes: begun: their names, in order."""

    def __init__(self, slots: FairSlots) -> None:
        self._slots = slots
        self.begun: list[str] = []
        self._goes_on: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, *names: str) -> None:
        """Args: names: the client's letter and a number."""
        for name in names:
            self._goes_on[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._run(name))
            await settle()

    async def end(self, *names: str) -> None:
        for name in names:
            self._goes_on[name].set()
            await settle()

    async def leave(self, name: str) -> None:
        self._tasks[name].cancel()
        await settle()

    async def _run(self, name: str) -> None:
        async with self._slots.hold(name[0]):
            self.begun.append(name)
            await self._goes_on[name].wait()


@run
async def test_clients_take_turns() -> None:
    work = Work(FairSlots(1))
    await work.ask("a0", "a1", "a2", "a3", "b0", "c0", "b1")
    for number in range(6):
        await work.end(work.begun[number])
    assert work.begun == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]


@run
async def test_a_client_leaves_room_for_others() -> None:
    work = Work(FairSlots(3, max_per_client=2))
    await work.ask("a0", "a1", "a2", "a3", "b0", "b1")
    assert work.begun == ["a0", "a1", "b0"]
    await work.end("b0")
    assert work.begun == ["a0", "a1", "b0", "b1"]
    await work.end("b1")
    # A free slot is not for the client with two.
    assert work.begun == ["a0", "a1", "b0", "b1"]
    await work.end("a0")
    assert work.begun[4:] == ["a2"]


@run
async def test_those_who_leave_take_no_slot() -> None:
    slots = FairSlots(1)
    work = Work(slots)
    await work.ask("a0", "a1", "a2", "b0")
    await work.leave("a1")
    await work.leave("b0")
    assert (slots.num_waiting("a"), slots.num_waiting("b")) == (1, 0)
    await work.leave("a0")
    assert work.begun == ["a0", "a2"]
    await work.end("a2")
    await work.ask("c0")
    assert work.begun[-1] == "c0"


@run
async def test_a_slot_given_to_one_who_leaves_at_that_moment_goes_on() -> None:
    slots = FairSlots(1)
    work = Work(slots)
    await work.ask("a0", "b0", "c0")
    work._goes_on["a0"].set()
    # The task of a0 ends and passes the slot on; that of b0 has not run yet.
    while slots.num_waiting("b"):  # noqa: ASYNC110
        await asyncio.sleep(0)
    await work.leave("b0")
    assert work.begun == ["a0", "c0"]


@run
async def test_a_clients_queue_is_bounded() -> None:
    slots = FairSlots(1)
    work = Work(slots)
    await work.ask("a0")
    waiting = [asyncio.create_task(work._run("a0")) for _ in range(fair_slots.MAX_WAITING_PER_CLIENT)]
    await settle()
    with pytest.raises(TimeoutError):
        async with slots.hold("a"):
            pass
    await work.ask("b0")
    await work.end("b0", "a0")
    await asyncio.gather(*waiting)
    assert work.begun.count("b0") == 1 and work.begun.index("b0") == 2
