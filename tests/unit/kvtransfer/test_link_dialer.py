"""A sender's next epoch, and its mappings until then."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta

import pytest

from tandem.deploy.host.certificates import make_certificates
from tandem.kvtransfer.events import ReceiverLinkOpened, SenderLinkClosed, SenderLinkOpened
from tandem.messages import Peer
from tandem.rpc.auth import cluster_auth
from tandem.rpc.channel import bind, new_server
from tandem.rpc.credentials import ClusterCredentials
from tests.fakes.link_ends import ReceiverEnd, SenderEnd, wait_until
from tests.fakes.transport import ScriptedOpening

# Longer than the dialer's retry delay.
TOO_LONG_S = 0.6


async def break_stream(sender: SenderEnd, receiver: ReceiverEnd) -> None:
    (opened,) = sender.of(SenderLinkOpened)
    receiver.links.close_link(opened.epoch, "broken")
    await wait_until(lambda: len(sender.of(SenderLinkClosed)) == 1)


async def forget_peer(sender: SenderEnd, receiver: ReceiverEnd) -> None:
    sender.links.set_peers([])
    await wait_until(lambda: len(sender.of(SenderLinkClosed)) == 1)
    sender.links.set_peers([receiver.peer])


async def forget_peer_for_a_moment(sender: SenderEnd, receiver: ReceiverEnd) -> None:
    sender.links.set_peers([])
    sender.links.set_peers([receiver.peer])
    await wait_until(lambda: len(sender.of(SenderLinkClosed)) == 1)


async def break_stream_and_forget_peer(sender: SenderEnd, receiver: ReceiverEnd) -> None:
    await break_stream(sender, receiver)
    for peers in ([], [receiver.peer], [], [receiver.peer]):
        sender.links.set_peers(peers)
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    "end_first", [break_stream, forget_peer, forget_peer_for_a_moment, break_stream_and_forget_peer]
)
def test_next_epoch_waits_for_previous_copies(
    end_first: Callable[[SenderEnd, ReceiverEnd], Awaitable[None]],
) -> None:
    """A decode worker takes a new epoch as proof that the old one is quiet, and reuses its pages."""

    async def scenario() -> None:
        transports = {"scripted": ScriptedOpening()}
        async with ReceiverEnd(transports) as receiver, SenderEnd(transports) as sender:
            sender.links.set_peers([receiver.peer])
            await wait_until(lambda: len(sender.opened) == 1)
            await end_first(sender, receiver)
            # The first epoch's copies have not been reported complete.
            with suppress(TimeoutError):
                await wait_until(lambda: len(receiver.of(ReceiverLinkOpened)) > 1, TOO_LONG_S)
            assert len(receiver.of(ReceiverLinkOpened)) == 1
            (closed,) = sender.of(SenderLinkClosed)
            closed.when_quiet()
            await wait_until(lambda: len(sender.opened) == 2)

    asyncio.run(scenario())


def test_a_pool_counts_as_mapped_until_its_last_copy_is_over() -> None:
    """A mapping keeps a dead pool's memory, so a replacement worker waits for this."""

    async def scenario() -> None:
        transports = {"scripted": ScriptedOpening()}
        async with ReceiverEnd(transports) as receiver, SenderEnd(transports) as sender:
            assert sender.links.mapped_workers() == receiver.links.mapped_workers() == []
            sender.links.set_peers([receiver.peer])
            await wait_until(lambda: len(sender.opened) == 1)
            assert sender.links.mapped_workers() == [receiver.peer.worker_id]
            assert receiver.links.mapped_workers() == []
            sender.links.set_peers([])
            await wait_until(lambda: len(sender.of(SenderLinkClosed)) == 1)
            assert sender.links.mapped_workers() == [receiver.peer.worker_id], "copies may be under way"
            (closed,) = sender.of(SenderLinkClosed)
            closed.when_quiet()
            await wait_until(lambda: sender.links.mapped_workers() == [])

    asyncio.run(scenario())


def test_lasting_failure_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Such as an expired certificate: the dialer tries again five times a second."""

    async def scenario() -> None:
        expired = ClusterCredentials("token", make_certificates(timedelta(days=-2)))
        server = new_server([cluster_auth("token")])
        address = bind(server, "127.0.0.1", 0, expired.for_server())
        await server.start()
        async with SenderEnd({"scripted": ScriptedOpening()}, credentials=expired) as sender:
            sender.links.set_peers([Peer("d", "d life", address)])
            await asyncio.sleep(1.5)
        await server.stop(None)

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    (line,) = [text for text in caplog.messages if text.startswith("link to d")]
    assert "certificate has expired" in line
