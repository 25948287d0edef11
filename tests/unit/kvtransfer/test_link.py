"""The link's protocol with a transport whose copies complete on command."""

from typing import Any

import pytest

from engine.kvcache.base import PageLayout
from engine.kvcache.pool import CpuKvPool
from kvtransfer.link import LeaseState, Quiet, ReceiverLink, SenderLink
from kvtransfer.transports.shared_memory import SharedMemoryReceiver, SharedMemorySender
from tandem.messages import Committed, Granted, LeaseRequest, PoolEndpoint, Refused, Released, Revoke
from tests.fakes.transport import ScriptedTransport

LAYOUT = PageLayout(num_layers=2, page_size=4, num_kv_heads=1, head_dim=8, dtype="float32")


@pytest.fixture
def transport() -> ScriptedTransport:
    return ScriptedTransport()


@pytest.fixture
def sent() -> list[Any]:
    return []


@pytest.fixture
def link(transport: ScriptedTransport, sent: list[Any]) -> SenderLink:
    return SenderLink("d", "d-life", "epoch", "scripted", transport, sent.append)


def commit(link: SenderLink, lease: Any) -> None:
    link.commit(lease, first_token=7, num_pages=2, num_tokens=8, finish_reason="", first_token_time_ns=1)


def test_settlements_wait_for_their_own_copies_only(
    link: SenderLink, transport: ScriptedTransport, sent: list[Any]
) -> None:
    leases = [link.request_lease("r", i, 8) for i in range(2)]
    for lease in leases:
        link.receive(Granted(lease.lease_id, 0, (4, 5)))
        link.push(lease, [0, 1], [4, 5])
        commit(link, lease)
    assert [type(m) for m in sent] == [LeaseRequest, LeaseRequest]
    transport.copies[1].is_done = True
    link.poll()
    assert isinstance(sent[-1], Committed) and sent[-1].lease_id == leases[1].lease_id
    assert [lease.state for lease in leases] == [LeaseState.COMMITTING, LeaseState.COMMITTED]
    transport.complete_all()
    link.poll()
    link.poll()
    assert len(sent) == 4 and all(lease.settled for lease in leases)


def test_a_grant_that_is_no_longer_wanted_is_released_once(link: SenderLink, sent: list[Any]) -> None:
    lease = link.request_lease("r", 0, 8)
    link.release(lease)
    # The grant crossed the release: the receiver settles by the Released that is already on its way.
    link.receive(Granted(lease.lease_id, 0, (4, 5)))
    link.receive(Revoke(lease.lease_id))
    link.poll()
    assert [type(m) for m in sent] == [LeaseRequest, Released]


def test_released_waits_for_copies(link: SenderLink, transport: ScriptedTransport, sent: list[Any]) -> None:
    lease = link.request_lease("r", 0, 8)
    link.receive(Granted(lease.lease_id, 0, (4, 5)))
    link.push(lease, [0, 1], [4, 5])
    link.release(lease)
    assert len(sent) == 1
    transport.complete_all()
    link.poll()
    assert isinstance(sent[-1], Released)


def test_a_refused_lease_is_settled(link: SenderLink, sent: list[Any]) -> None:
    lease = link.request_lease("r", 0, 8)
    link.receive(Refused(lease.lease_id, "too_large"))
    assert lease.state is LeaseState.REFUSED and lease.refusal == "too_large"
    link.release(lease)
    assert len(sent) == 1


def test_closing_loses_leases_and_is_over_when_the_copies_are(
    link: SenderLink, transport: ScriptedTransport, sent: list[Any]
) -> None:
    lease = link.request_lease("r", 0, 8)
    link.receive(Granted(lease.lease_id, 0, (4, 5)))
    link.push(lease, [0, 1], [4, 5])
    quiet = link.close()
    assert lease.state is LeaseState.LOST and not quiet.done()
    transport.complete_all()
    assert quiet.done()
    assert len(sent) == 1, "nothing is said on a stream that has ended"


def test_pushes_are_numbered_without_gaps(link: SenderLink, transport: ScriptedTransport) -> None:
    leases = [link.request_lease("r", i, 8) for i in range(3)]
    for lease in reversed(leases):
        link.receive(Granted(lease.lease_id, 0, (4, 5)))
        link.push(lease, [0], [4])
    assert [seq for seq, _, _ in transport.pushes] == [0, 1, 2]


def test_a_receiver_settles_each_grant_once() -> None:
    sent: list[Any] = []
    pool = CpuKvPool(LAYOUT, 4, "settles")
    link = ReceiverLink("p", "life", "epoch", SharedMemoryReceiver(pool), Quiet(lambda: False), sent.append)
    link.grant("lease", 4, [1, 2])
    assert link.settle(Released("lease")) == []
    assert link.settle(Released("lease")) is None
    assert link.settle(Released("never granted")) is None
    assert sent == [Granted("lease", 4, (1, 2))]


def test_quiet_once_is_quiet_for_ever() -> None:
    gone = [False]
    quiet = Quiet(lambda: gone[0])
    assert not quiet.done()
    gone[0] = True
    assert quiet.done()
    gone[0] = False
    assert quiet.done()


def test_shared_memory_copies_whole_pages_to_where_they_belong() -> None:
    source, destination = CpuKvPool(LAYOUT, 4, "source"), CpuKvPool(LAYOUT, 6, "destination")
    for page in range(4):
        source.kv[page] = page + 1
    sender = SharedMemorySender(source, SharedMemoryReceiver(destination).endpoint())
    assert sender.push(0, [3, 0], [1, 5]).done()
    assert [float(destination.kv[page].mean()) for page in range(6)] == [0, 4, 0, 0, 0, 1]
    assert sender.abort().done()


def test_shared_memory_refuses_what_is_not_the_pool_it_was_told_of() -> None:
    source, destination = CpuKvPool(LAYOUT, 4, "here"), CpuKvPool(LAYOUT, 4, "there")
    endpoint = PoolEndpoint(*destination.file)
    with pytest.raises(ValueError, match="not the pool another-life"):
        SharedMemorySender(source, PoolEndpoint(endpoint.pid, endpoint.fd, "another-life", endpoint.num_bytes))
    with pytest.raises(ValueError, match="does not consist of pages"):
        SharedMemorySender(source, PoolEndpoint(endpoint.pid, endpoint.fd, endpoint.name, endpoint.num_bytes + 1))
    destination.close()
    with pytest.raises(ValueError, match=r"cannot be opened|not the pool"):
        SharedMemorySender(source, endpoint)
