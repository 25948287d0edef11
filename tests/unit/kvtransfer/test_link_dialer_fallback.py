"""A sender whose transport does not open tries the next one and leaves nothing behind."""

import asyncio
import logging
import threading
from typing import Any

import pytest

from tandem.engine.kvcache.pool import CpuKvPool
from tandem.kvtransfer import link_dialer
from tandem.kvtransfer.events import (
    FromReceiver,
    FromSender,
    ReceiverLinkClosed,
    ReceiverLinkOpened,
    SenderLinkClosed,
    SenderLinkFailed,
    SenderLinkOpened,
)
from tandem.kvtransfer.transports import opening
from tandem.kvtransfer.transports.shared_memory import SharedMemory
from tandem.kvtransfer.transports.table import TRANSPORTS
from tandem.kvtransfer.transports.tcp import Tcp
from tandem.messages import LinkState, Renewed, Revoke
from tandem.rpc.credentials import ClusterCredentials
from tests.fakes.link_ends import ReceiverEnd, SenderEnd, wait_until
from tests.fakes.page_layout import OpaqueLayout
from tests.fakes.transport import ScriptedOpening, ScriptedTransport
from tests.fakes.workers import WorkerPair


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        r.getMessage()
        for r in caplog.records
        if r.levelno >= logging.WARNING and r.name.startswith("tandem.kvtransfer")
    ]


def test_second_transport_is_used_if_the_first_does_not_open(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        first, second = ScriptedOpening(), ScriptedOpening()
        first.sender_error = ValueError("the pool cannot be mapped")
        transports = {"first": first, "second": second}
        async with ReceiverEnd(transports) as receiver, SenderEnd(transports) as sender:
            sender.links.set_peers([receiver.peer])
            await wait_until(lambda: sender.opened == ["second"])
            assert warnings(caplog) == [
                f"link to {receiver.peer.worker_id}: transport first cannot be opened: the pool cannot be mapped; "
                "second is tried next"
            ]
            assert receiver.offers == [("first", "second"), ("second",)]
            await wait_until(lambda: len(receiver.of(ReceiverLinkClosed)) == 1)
            # It is not offered to that incarnation again.
            (opened,) = sender.of(SenderLinkOpened)
            receiver.links.close_link(opened.epoch, "broken")
            await wait_until(lambda: len(sender.of(SenderLinkClosed)) == 1)
            sender.of(SenderLinkClosed)[0].when_quiet()
            await wait_until(lambda: len(sender.opened) == 2)
            assert receiver.offers[2:] == [("second",)]
            assert first.senders == [] and not sender.of(SenderLinkFailed)

    asyncio.run(scenario())


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the logged transport and reasons of each link."""
    lines = [record.getMessage() for record in caplog.records]
    return [line.partition(": ")[2] for line in lines if "pages go over" in line]


@pytest.mark.parametrize(
    ("first_fails", "line"),
    [
        ("nowhere", "pages go over shared_memory"),
        ("here", "pages go over tcp; not shared_memory: the receiver's pool cannot be mapped"),
        ("there", "pages go over tcp; not shared_memory: the receiver cannot open it: RuntimeError('no pool to map')"),
        ("elsewhere", "pages go over tcp; not shared_memory: the receiver does not have it"),
    ],
)
def test_log_names_the_transport_and_earlier_failures(
    caplog: pytest.LogCaptureFixture, first_fails: str, line: str
) -> None:
    async def scenario() -> None:
        ours = {name: ScriptedOpening() for name in TRANSPORTS.for_device("cpu")}
        theirs = {name: ScriptedOpening() for name in ours}
        if first_fails == "here":
            ours["shared_memory"].sender_error = ValueError("the receiver's pool cannot be mapped")
        elif first_fails == "there":
            theirs["shared_memory"].receiver_error = RuntimeError("no pool to map")
        elif first_fails == "elsewhere":
            del theirs["shared_memory"]
        async with ReceiverEnd(theirs) as receiver, SenderEnd(ours) as sender:
            sender.links.set_peers([receiver.peer])
            await wait_until(lambda: len(sender.opened) == 1)

    with caplog.at_level(logging.INFO, "tandem.kvtransfer"):
        asyncio.run(scenario())
    assert told(caplog) == [line]


def test_another_worker_is_offered_every_transport() -> None:
    async def scenario() -> None:
        here, there = ScriptedOpening(), ScriptedOpening()
        here.sender_error = OSError("unreachable")
        transports = {"first": here, "second": there}
        async with ReceiverEnd(transports) as one, ReceiverEnd(transports) as other, SenderEnd(transports) as sender:
            sender.links.set_peers([one.peer])
            await wait_until(lambda: sender.opened == ["second"])
            here.sender_error = None
            sender.links.set_peers([one.peer, other.peer])
            await wait_until(lambda: sender.opened == ["second", "first"])
            assert other.offers == [("first", "second")]

    asyncio.run(scenario())


def test_total_failure_is_reported_and_all_transports_are_retried(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_dialer, "REOPEN_DELAY_S", 0.3)

    async def scenario() -> None:
        first, second = ScriptedOpening(), ScriptedOpening()
        first.sender_error, second.sender_error = ValueError("not this host"), OSError("connection refused")
        transports = {"first": first, "second": second}
        async with ReceiverEnd(transports) as receiver, SenderEnd(transports) as sender:
            sender.links.set_peers([receiver.peer])
            await wait_until(lambda: len(sender.of(SenderLinkFailed)) == 1)
            (failed,) = sender.of(SenderLinkFailed)
            assert (failed.peer_id, failed.peer_incarnation) == (receiver.peer.worker_id, receiver.peer.incarnation)
            assert failed.reason == ("no transport can be opened: first: not this host; second: connection refused")
            assert [line.rpartition("; ")[2] for line in warnings(caplog)] == ["second is tried next", "none is left"]
            assert first.num_attempts == 2, "an end here, an end there, and a pause"
            first.sender_error = None
            await wait_until(lambda: sender.opened == ["first"])
            assert receiver.offers == [("first", "second"), ("second",), ("first", "second")]

    asyncio.run(scenario())


def test_receiver_without_transport_is_reported_and_retried_later(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_dialer, "REOPEN_DELAY_S", 0.3)

    async def scenario() -> None:
        transport = ScriptedOpening()
        transport.receiver_error = OSError("no such address")
        async with ReceiverEnd({"only": transport}) as receiver, SenderEnd({"only": transport}) as sender:
            sender.links.set_peers([receiver.peer])
            await wait_until(lambda: len(sender.of(SenderLinkFailed)) == 1)
            assert "only: no such address" in sender.of(SenderLinkFailed)[0].reason
            assert transport.num_attempts == 1
            transport.receiver_error = None
            await wait_until(lambda: sender.opened == ["only"])
            assert transport.num_attempts == 3

    asyncio.run(scenario())


def test_workers_without_a_common_transport_say_so() -> None:
    async def scenario() -> None:
        async with (
            ReceiverEnd({"theirs": ScriptedOpening()}) as receiver,
            SenderEnd({"ours": ScriptedOpening()}) as sender,
        ):
            sender.links.set_peers([receiver.peer])
            await wait_until(lambda: len(sender.of(SenderLinkFailed)) == 1)
            assert "no common transport: ours at the sender, theirs here" in sender.of(SenderLinkFailed)[0].reason

    asyncio.run(scenario())


def test_slow_opening_delays_no_other_link() -> None:
    async def scenario() -> None:
        slow, quick = ScriptedOpening(), ScriptedOpening()
        slow.may_open.clear()
        async with (
            ReceiverEnd({"slow": ScriptedOpening()}) as one,
            ReceiverEnd({"quick": ScriptedOpening()}) as other,
            SenderEnd({"slow": slow, "quick": quick}) as sender,
        ):
            sender.links.set_peers([one.peer])
            await wait_until(lambda: slow.num_attempts == 1)
            sender.links.set_peers([one.peer, other.peer])
            await wait_until(lambda: sender.opened == ["quick"])
            assert not slow.senders
            slow.may_open.set()
            await wait_until(lambda: sender.opened == ["quick", "slow"])

    asyncio.run(scenario())


def test_late_opening_is_closed(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "OPEN_TIMEOUT_S", 0.2)

    async def scenario() -> None:
        hanging = ScriptedOpening()
        hanging.may_open.clear()
        ours, theirs = {"hanging": hanging, "second": ScriptedOpening()}, ScriptedOpening()
        async with ReceiverEnd({"hanging": theirs, "second": theirs}) as receiver, SenderEnd(ours) as sender:
            sender.links.set_peers([receiver.peer])
            await wait_until(lambda: sender.opened == ["second"])
            (line,) = warnings(caplog)
            assert "transport hanging cannot be opened: it did not open within 0.2 s; second is tried next" in line
            hanging.may_open.set()
            await wait_until(lambda: bool(hanging.senders) and hanging.senders[0].aborted)

    asyncio.run(scenario())
    assert_no_thread_is_left()


def test_link_dropped_while_opening_leaves_nothing_open() -> None:
    async def scenario() -> None:
        hanging, theirs = ScriptedOpening(), ScriptedOpening()
        hanging.may_open.clear()
        async with ReceiverEnd({"only": theirs}) as receiver, SenderEnd({"only": hanging}) as sender:
            sender.links.set_peers([receiver.peer])
            await wait_until(lambda: hanging.num_attempts == 1)
            sender.links.set_peers([])
            await wait_until(lambda: len(receiver.of(ReceiverLinkClosed)) == 1)
            hanging.may_open.set()
            await wait_until(lambda: bool(hanging.senders) and hanging.senders[0].aborted)
            assert sender.events == [], "the engine thread knows of no epoch that it would have to end"

    asyncio.run(scenario())
    assert_no_thread_is_left()


def test_a_link_opens_with_tcp_where_the_pool_cannot_be_mapped() -> None:
    """Real transports: the receiver's endpoint does not fit the sender's pages."""

    async def scenario() -> None:
        source = CpuKvPool(OpaqueLayout(4, 96), 4, "fallback-source")
        destination = CpuKvPool(OpaqueLayout(4, 64), 4, "fallback-destination")
        plain = ClusterCredentials()
        ours = {"shared_memory": SharedMemory(source, "127.0.0.1", plain), "tcp": Tcp(source, "127.0.0.1", plain)}
        into = destination, "127.0.0.1", plain
        theirs = {"shared_memory": SharedMemory(*into), "tcp": Tcp(*into)}
        async with ReceiverEnd(theirs) as receiver, SenderEnd(ours) as sender:
            sender.links.set_peers([receiver.peer])
            await wait_until(lambda: sender.opened == ["tcp"])
            (opened,) = sender.of(SenderLinkOpened)
            sender.links.send(opened.epoch, [Renewed("lease")])
            receiver.links.send(opened.epoch, [Revoke("lease")])
            await wait_until(lambda: len(receiver.of(FromSender)) == len(sender.of(FromReceiver)) == 1)
            ends: list[Any] = [opened.transport, *(event.transport for event in receiver.of(ReceiverLinkOpened))]
            for end in ends:
                await wait_until(end.abort().done)

    asyncio.run(scenario())


def test_router_learns_why_a_link_is_missing() -> None:
    pair = WorkerPair(open_sender=lambda *_: ScriptedTransport())
    pair.cut_link()
    pair.p.outbox.router.clear()
    pair.p.scheduler.receive(SenderLinkFailed("d", "d-life", "no transport can be opened: tcp: refused"))
    assert pair.p.outbox.router == [
        LinkState("d", "d-life", up=False, reason="no transport can be opened: tcp: refused")
    ]


def assert_no_thread_is_left() -> None:
    for thread in threading.enumerate():
        if thread.name in ("open-transport", "let-go-transport"):
            thread.join(5.0)
            assert not thread.is_alive()
