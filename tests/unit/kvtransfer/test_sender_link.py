from dataclasses import replace
from typing import Any

import pytest

from tandem.kvtransfer.sender_link import SenderLeaseState, SenderLink
from tandem.messages import Committed, Granted, LeaseRequest, LinkWelcome, Pushing, Refused, Released, Renewed, Revoke
from tests.fakes.transport import ManualCompletion, ScriptedTransport


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
    committed = Committed(lease.lease_id, 7, num_pages=2, num_tokens=8, finish_reason="", ship_started_ns=1)
    link.commit_pages(lease, committed)


def test_settlements_wait_for_their_own_copies_only(
    link: SenderLink, transport: ScriptedTransport, sent: list[Any]
) -> None:
    leases = [link.request_lease("r", i, 8) for i in range(2)]
    for lease in leases:
        link.receive_from_peer(Granted(lease.lease_id, 0, (4, 5)))
        link.push_pages(lease, [0, 1], [4, 5])
        commit(link, lease)
    assert [type(m) for m in sent] == [LeaseRequest, LeaseRequest]
    transport.copies[0].is_done = True
    link.send_settlements()
    assert isinstance(sent[-1], Committed) and sent[-1].lease_id == leases[0].lease_id
    assert [lease.state for lease in leases] == [SenderLeaseState.COMMITTED, SenderLeaseState.COMMITTING]
    transport.complete_all()
    link.send_settlements()
    link.send_settlements()
    assert len(sent) == 4 and all(lease.settled for lease in leases)


def test_unwanted_grant_is_released_once(link: SenderLink, sent: list[Any]) -> None:
    lease = link.request_lease("r", 0, 8)
    link.release_lease(lease)
    # The grant crossed the release; Released settles it.
    link.receive_from_peer(Granted(lease.lease_id, 0, (4, 5)))
    link.receive_from_peer(Revoke(lease.lease_id))
    link.send_settlements()
    assert [type(m) for m in sent] == [LeaseRequest, Released]


def test_released_waits_for_copies(link: SenderLink, transport: ScriptedTransport, sent: list[Any]) -> None:
    lease = link.request_lease("r", 0, 8)
    link.receive_from_peer(Granted(lease.lease_id, 0, (4, 5)))
    link.push_pages(lease, [0, 1], [4, 5])
    link.release_lease(lease)
    assert len(sent) == 1
    transport.complete_all()
    link.send_settlements()
    assert isinstance(sent[-1], Released)


def test_a_refused_lease_is_settled(link: SenderLink, sent: list[Any]) -> None:
    lease = link.request_lease("r", 0, 8)
    link.receive_from_peer(Refused(lease.lease_id, "too_large"))
    assert lease.state is SenderLeaseState.REFUSED and lease.refusal == "too_large"
    link.release_lease(lease)
    assert len(sent) == 1


def test_epoch_end_loses_leases_and_waits_for_copies(
    link: SenderLink, transport: ScriptedTransport, sent: list[Any]
) -> None:
    lease = link.request_lease("r", 0, 8)
    link.receive_from_peer(Granted(lease.lease_id, 0, (4, 5)))
    link.push_pages(lease, [0, 1], [4, 5])
    quiet = link.end_epoch()
    assert lease.state is SenderLeaseState.LOST and not quiet.done()
    transport.complete_all()
    assert quiet.done()
    assert len(sent) == 1, "nothing is said on a stream that has ended"


def test_pushes_are_numbered_without_gaps(link: SenderLink, transport: ScriptedTransport) -> None:
    leases = [link.request_lease("r", i, 8) for i in range(3)]
    for lease in reversed(leases):
        link.receive_from_peer(Granted(lease.lease_id, 0, (4, 5)))
        link.push_pages(lease, [0], [4])
    assert [seq for seq, _, _ in transport.pushes] == [0, 1, 2]


def test_a_lease_is_renewed_until_it_is_settled(link: SenderLink, sent: list[Any]) -> None:
    lease = link.request_lease("r", 0, 8)
    link.renew_lease(lease)
    link.release_lease(lease)
    link.renew_lease(lease)
    assert [type(m) for m in sent] == [LeaseRequest, Renewed, Released]


def test_after_a_failure_nothing_is_settled(link: SenderLink, transport: ScriptedTransport, sent: list[Any]) -> None:
    lease = link.request_lease("r", 0, 8)
    link.receive_from_peer(Granted(lease.lease_id, 0, (4, 5)))
    link.push_pages(lease, [0, 1], [4, 5])
    commit(link, lease)
    # The copies ended without arrival.
    transport.failure_reason = "broken"
    transport.complete_all()
    link.send_settlements()
    assert link.failure == "broken" and len(sent) == 1 and not lease.settled


def test_pages_in_flight_are_bounded(transport: ScriptedTransport, sent: list[Any]) -> None:
    link = SenderLink("d", "d-life", "epoch", "scripted", transport, sent.append, max_pages_in_flight=3)
    lease = link.request_lease("r", 0, 20)
    link.receive_from_peer(Granted(lease.lease_id, 0, (4, 5, 6, 7)))
    assert link.num_pages_allowed() == 3
    link.push_pages(lease, [0, 1], [4, 5])
    assert link.num_pages_allowed() == 1
    transport.complete_all()
    assert link.num_pages_allowed() == 3


def test_overlapping_copy_time_is_counted_once(
    link: SenderLink, transport: ScriptedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter((100, 130, 150, 400, 410))
    monkeypatch.setattr("tandem.kvtransfer.sender_link.now_ns", lambda: next(times))
    lease = link.request_lease("r", 0, 12)
    link.receive_from_peer(Granted(lease.lease_id, 0, (4, 5, 6)))
    link.push_pages(lease, [0], [4])
    link.push_pages(lease, [1], [5])
    assert link.copying_ns == 30
    transport.complete_all()
    link.send_settlements()
    assert link.copying_ns == 50
    link.push_pages(lease, [2], [6])
    assert link.copying_ns == 50 + 10


def test_only_two_sided_transports_announce_pushes(sent: list[Any]) -> None:
    for two_sided, announced in ((False, []), (True, [Pushing(0, "", 0, 2), Pushing(1, "", 2, 1)])):
        sent.clear()
        link = SenderLink("d", "d-life", "epoch", "scripted", ScriptedTransport(two_sided), sent.append)
        lease = link.request_lease("r", 0, 12)
        link.receive_from_peer(Granted(lease.lease_id, 0, (4, 5, 6)))
        link.push_pages(lease, [0, 1], [4, 5])
        link.push_pages(lease, [2], [6])
        assert [replace(m, lease_id="") for m in sent[1:]] == announced


def test_opening_message_is_invalid_on_an_open_link(link: SenderLink) -> None:
    with pytest.raises(ValueError, match="unexpected LinkWelcome"):
        link.receive_from_peer(LinkWelcome("epoch", "scripted", (), ()))


def test_transport_failing_during_a_check_commits_nothing(
    link: SenderLink, transport: ScriptedTransport, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread may fail between two checks."""
    leases = [link.request_lease("r", i, 8) for i in range(2)]
    for lease in leases:
        link.receive_from_peer(Granted(lease.lease_id, 0, (4, 5)))
        link.push_pages(lease, [0, 1], [4, 5])

    def fails(copy: ManualCompletion) -> bool:
        transport.failure_reason = "the page connection failed"
        return True

    monkeypatch.setattr(ManualCompletion, "done", fails)
    commit(link, leases[0])
    transport.failure_reason = ""
    link.release_lease(leases[1])
    link.send_settlements()
    assert [type(m) for m in sent] == [LeaseRequest, LeaseRequest]
    link.end_epoch()
    assert [lease.state for lease in leases] == [SenderLeaseState.LOST, SenderLeaseState.LOST]
