from typing import Any

import pytest

from tandem.engine.kvcache.pool import CpuKvPool
from tandem.kvtransfer.receiver_link import ReceiverLink
from tandem.kvtransfer.transports.shared_memory import SharedMemoryReceiver
from tandem.messages import Granted, Pushing, Refused, Revoke
from tests.fakes.page_layout import OpaqueLayout
from tests.fakes.transport import ScriptedReceiver


@pytest.fixture
def gone() -> list[bool]:
    """True once the sender's process has exited."""
    return [False]


@pytest.fixture
def sent() -> list[Any]:
    return []


@pytest.fixture
def one_sided(gone: list[bool], sent: list[Any]) -> ReceiverLink:
    transport = SharedMemoryReceiver(CpuKvPool(OpaqueLayout(4, 64), 4, "receiver-link"))
    return ReceiverLink("p", "life", "epoch", transport, lambda: gone[0], sent.append)


@pytest.fixture
def receiver() -> ScriptedReceiver:
    return ScriptedReceiver()


@pytest.fixture
def two_sided(receiver: ScriptedReceiver, gone: list[bool], sent: list[Any]) -> ReceiverLink:
    return ReceiverLink("p", "life", "epoch", receiver, lambda: gone[0], sent.append)


def test_messages_are_sent(one_sided: ReceiverLink, sent: list[Any]) -> None:
    one_sided.grant_lease("a", 4, [1, 2])
    one_sided.refuse_lease("b", "gone")
    one_sided.revoke_lease("a")
    assert sent == [Granted("a", 4, (1, 2)), Refused("b", "gone"), Revoke("a")]


def test_a_broken_stream_is_not_quiet_until_its_sender_is_gone(one_sided: ReceiverLink, gone: list[bool]) -> None:
    quiet = one_sided.end_epoch()
    assert not quiet.done() and not one_sided.is_quiet()
    gone[0] = True
    assert quiet.done()
    gone[0] = False
    assert quiet.done() and one_sided.is_quiet(), "quiet once is quiet for ever"


def test_next_epoch_proves_the_last_one_quiet(one_sided: ReceiverLink) -> None:
    # The next epoch may open before this one's end is noticed.
    one_sided.mark_quiet()
    assert not one_sided.is_quiet(), "while it is open it may be written to"
    assert one_sided.end_epoch().done()


def test_two_sided_quiet_depends_on_the_receiver(
    two_sided: ReceiverLink, receiver: ScriptedReceiver, gone: list[bool]
) -> None:
    quiet = two_sided.end_epoch()
    two_sided.mark_quiet()
    gone[0] = True
    assert receiver.aborted and not quiet.done()
    receiver.stopped.is_done = True
    assert quiet.done()


def test_an_announced_push_is_received_or_thrown_away(two_sided: ReceiverLink, receiver: ScriptedReceiver) -> None:
    receives = [
        two_sided.expect_push(Pushing(0, "a", 0, 2), [5, 6]),
        two_sided.expect_push(Pushing(1, "nobody's", 0, 3), None),
    ]
    assert receiver.expected == [(0, [5, 6], 2), (1, None, 3)]
    receiver.receives[0].is_done = True
    assert [receive.done() for receive in receives] == [True, False]


def test_end_of_epoch_ends_every_receive(two_sided: ReceiverLink, receiver: ScriptedReceiver) -> None:
    receive = two_sided.expect_push(Pushing(0, "a", 0, 2), [5, 6])
    two_sided.end_epoch()
    assert not receive.done(), "its thread may be in the middle of a page"
    receiver.stopped.is_done = True
    assert receive.done()


def test_a_one_sided_transport_is_not_asked_to_receive(one_sided: ReceiverLink) -> None:
    assert one_sided.expect_push(Pushing(0, "a", 0, 2), [1, 2]).done()
