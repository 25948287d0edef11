"""Grants and settlements of leases, with a scripted sender."""

from typing import Any

import pytest

from tandem.decode_worker.config import DecodeConfig
from tandem.decode_worker.lease import Lease
from tandem.decode_worker.leases import LeaseBook
from tandem.engine.kvcache.cache_manager import CacheManager, PageHandle
from tandem.kvtransfer.events import FromSender, ReceiverLinkClosed, ReceiverLinkOpened
from tandem.kvtransfer.transports.base import ReceiverTransport
from tandem.messages import (
    PROTOCOL_VERSION,
    Admit,
    Committed,
    Granted,
    LeaseLost,
    LeaseRequest,
    LinkHello,
    PageFormat,
    Pushing,
    Refused,
    Released,
    Renewed,
    Revoke,
)
from tandem.sampling_params import SamplingParams
from tests.fakes.clock import FakeClock
from tests.fakes.transport import ScriptedReceiver
from tests.fakes.workers import ListOutbox

PAGE_SIZE = 4
GRACE_S, DURATION_S, ADMIT_S = 2.0, 5.0, 60.0


class OneSided(ScriptedReceiver):
    two_sided = False


class Decode:
    """A lease book with one link, and its started requests.

    Attributes:
        started: (request id, first token) of each, in order.
        gone: whether the sender's process has exited.
    """

    def __init__(self, num_pages: int = 8, transport: ReceiverTransport | None = None, max_waiting: int = 1024) -> None:
        self.clock, self.outbox = FakeClock(), ListOutbox()
        self.cache = CacheManager(num_pages, PAGE_SIZE)
        config = DecodeConfig(lease_duration_s=DURATION_S, admit_grace_s=GRACE_S, max_waiting=max_waiting)
        self.book = LeaseBook(self.cache, self.outbox, config, self.clock, self._start)
        self.started: list[tuple[str, int]] = []
        self.gone = False
        self.handles: list[PageHandle] = []
        self.open("epoch", transport or OneSided())

    def open(self, epoch: str, transport: ReceiverTransport, sender: str = "p") -> None:
        hello = LinkHello(
            PROTOCOL_VERSION, sender, f"{sender} life", "d life", PageFormat("", 1, ""), ("scripted",), ()
        )
        self.book.receive(ReceiverLinkOpened(epoch, hello, transport, lambda: self.gone))

    def close(self, epoch: str = "epoch") -> None:
        self.book.receive(ReceiverLinkClosed(epoch))

    def admit(self, request_id: str, num_tokens: int) -> list[int]:
        """Admit a request; prompts of different lengths share no prefix."""
        prompt = list(range(1000 * num_tokens, 1001 * num_tokens))
        self.book.admit_request(Admit(request_id, 0, tuple(prompt), (), SamplingParams(8), ADMIT_S))
        return prompt

    def say(self, message: Any, epoch: str = "epoch") -> None:
        self.book.receive(FromSender(epoch, message))

    def answers(self, num_reserved: int = 0) -> list[Any]:
        """Run a step; return the link's new messages."""
        self.cache.free_deferred_pages()
        self.book.start_arrived()
        self.book.answer_requests(num_reserved)
        said, self.outbox.link = self.outbox.link, []
        assert self.cache.check_integrity() == ""
        return [message for _, message in said]

    def granted(self, request_id: str, num_tokens: int) -> Granted:
        """Get a grant; the lease id is the request id."""
        self.admit(request_id, num_tokens)
        self.say(LeaseRequest(request_id, request_id, 0, num_tokens))
        (granted,) = self.answers()
        assert isinstance(granted, Granted)
        return granted

    def lost(self) -> list[str]:
        return [message.request_id for message in self.outbox.of(LeaseLost)]

    def _start(self, lease: Lease) -> None:
        self.started.append((lease.admit.request_id, lease.committed.first_token))
        self.handles.append(lease.handle)


def committed(lease_id: str, num_pages: int, num_tokens: int) -> Committed:
    return Committed(lease_id, 7, num_pages, num_tokens, "", 0)


def test_grant_covers_the_prompt_and_the_first_step() -> None:
    decode = Decode()
    granted = decode.granted("r", 8)
    assert (granted.lease_id, granted.cached_len, len(granted.page_ids)) == ("r", 0, 3)
    assert decode.cache.num_leased_pages == 3
    decode.say(committed("r", 2, 8))
    assert decode.answers() == [] and decode.started == [("r", 7)]
    assert decode.cache.num_leased_pages == 0
    assert decode.book.next_deadline() is None, "nothing of it is remembered"


def test_cached_pages_are_not_shipped() -> None:
    decode = Decode()
    decode.granted("r", 8)
    decode.say(committed("r", 2, 8))
    decode.answers()
    (handle,) = decode.handles
    prompt = decode.admit("r", 8)
    decode.cache.cache_pages(handle, prompt, 8)
    decode.cache.release_pages(handle)
    decode.say(LeaseRequest("again", "r", 0, 8))
    (granted,) = decode.answers()
    assert (granted.cached_len, len(granted.page_ids)) == (8, 1)
    assert decode.book.hits.num_cached == 8
    decode.say(committed("again", 0, 8))
    decode.answers()
    assert decode.started[1:] == [("r", 7)]


# --- waiting for Admit or pages ---


def test_a_request_waits_for_its_admit() -> None:
    decode = Decode()
    decode.say(LeaseRequest("r", "r", 0, 8))
    assert decode.answers() == [] and decode.book.num_waiting == 1
    assert decode.book.next_deadline() == decode.clock.now + GRACE_S
    decode.admit("r", 8)
    assert [type(answer) for answer in decode.answers()] == [Granted]


def test_request_without_admit_is_refused() -> None:
    decode = Decode()
    decode.say(LeaseRequest("r", "r", 0, 8))
    decode.clock.advance(GRACE_S)
    assert decode.answers() == [Refused("r", "unknown")]
    assert decode.book.next_deadline() is None and decode.lost() == []


def test_a_request_of_another_length_than_announced_is_refused() -> None:
    decode = Decode()
    decode.admit("r", 8)
    decode.say(LeaseRequest("r", "r", 0, 9))
    assert decode.answers() == [Refused("r", "unknown")]


def test_request_larger_than_the_pool_is_refused() -> None:
    decode = Decode(num_pages=3)
    decode.admit("r", 12)
    decode.say(LeaseRequest("r", "r", 0, 12))
    assert decode.answers() == [Refused("r", "too_large")]


def test_request_of_an_ended_attempt_is_refused() -> None:
    decode = Decode()
    decode.admit("aborted", 8)
    decode.book.abort_attempt("aborted", 0)
    decode.book.mark_ended("given back", 0)
    for name in ("aborted", "given back"):
        decode.say(LeaseRequest(name, name, 0, 8))
    assert decode.answers() == [Refused("aborted", "gone"), Refused("given back", "gone")]


def test_request_without_pages_waits_for_its_grant() -> None:
    decode = Decode(num_pages=4)
    decode.granted("holder", 8)
    decode.admit("r", 8)
    decode.say(LeaseRequest("r", "r", 0, 8))
    assert decode.answers() == [] and decode.book.num_waiting == 1
    decode.say(Released("holder"))
    assert [answer.lease_id for answer in decode.answers()] == ["r"]


def test_grants_leave_reserved_pages() -> None:
    decode = Decode(num_pages=4)
    decode.admit("r", 8)
    decode.say(LeaseRequest("r", "r", 0, 8))
    assert decode.answers(num_reserved=2) == []
    assert [type(answer) for answer in decode.answers(num_reserved=1)] == [Granted]


def test_a_small_request_overtakes_a_large_one_only_so_often() -> None:
    decode = Decode(num_pages=8)
    decode.granted("holder", 8)
    decode.admit("large", 28)
    decode.say(LeaseRequest("large", "large", 0, 28))
    for i in range(DecodeConfig().max_overtaken):
        granted = decode.granted(f"small{i}", 3)
        decode.say(Released(granted.lease_id))
        decode.answers()
    decode.admit("late", 3)
    decode.say(LeaseRequest("late", "late", 0, 3))
    assert decode.answers() == [], "all wait until the large one has its pages"
    decode.say(Released("holder"))
    assert [answer.lease_id for answer in decode.answers()] == ["large"]


def test_admitted_request_without_lease_request_expires() -> None:
    decode = Decode()
    decode.admit("r", 8)
    assert decode.book.next_deadline() == decode.clock.now + ADMIT_S
    decode.clock.advance(ADMIT_S)
    assert decode.answers() == [] and decode.lost() == ["r"]
    decode.say(LeaseRequest("r", "r", 0, 8))
    assert decode.answers() == [Refused("r", "gone")]


@pytest.mark.parametrize("reported", [True, False])
def test_a_waiting_request_may_be_released(reported: bool) -> None:
    """No lease of this attempt follows; the side that knows the end reports it."""
    decode = Decode(num_pages=4)
    decode.granted("holder", 8)
    decode.admit("r", 8)
    decode.say(LeaseRequest("r", "r", 0, 8))
    decode.answers()
    decode.say(Released("r", reported))
    assert decode.book.num_waiting == 0
    assert decode.lost() == ([] if reported else ["r"])
    assert decode.book.take_admitted("r", 0) is None


# --- one settlement per granted lease ---


@pytest.mark.parametrize("reported", [True, False])
def test_a_released_lease_gives_its_pages_back(reported: bool) -> None:
    decode = Decode()
    decode.granted("r", 8)
    decode.say(Released("r", reported))
    decode.answers()
    assert decode.cache.num_free_pages == 8
    assert decode.lost() == ([] if reported else ["r"])


def test_a_lease_is_settled_once() -> None:
    decode = Decode()
    decode.granted("r", 8)
    decode.say(Released("r"))
    decode.say(Released("r"))
    decode.say(committed("r", 2, 8))
    decode.say(Released("never granted"))
    decode.answers()
    assert decode.started == [] and decode.cache.num_free_pages == 8 and decode.outbox.closed == {}


@pytest.mark.parametrize(("num_pages", "num_tokens"), [(1, 8), (3, 8), (2, 7), (2, 9), (0, 0)])
def test_a_commit_with_wrong_counts_is_not_believed(num_pages: int, num_tokens: int) -> None:
    decode = Decode()
    decode.granted("r", 8)
    decode.say(committed("r", num_pages, num_tokens))
    decode.answers()
    assert decode.started == [] and decode.lost() == ["r"]
    assert decode.cache.num_free_pages == 8


def test_another_sender_s_lease_is_not_touched() -> None:
    decode = Decode(transport=ScriptedReceiver())
    granted = decode.granted("r", 8)
    other = ScriptedReceiver()
    decode.open("other", other, sender="q")
    decode.clock.advance(DURATION_S - 1)
    for message in (Pushing(0, "r", 0, 2), Renewed("r"), committed("r", 2, 8), Released("r")):
        decode.say(message, "other")
    assert other.expected == [(0, None, 2)]
    decode.clock.advance(1)
    assert decode.answers() == [Revoke("r")], "its duration was not renewed either"
    assert decode.started == [] and decode.cache.num_leased_pages == len(granted.page_ids)


def test_a_lease_is_asked_for_once() -> None:
    decode = Decode()
    decode.granted("r", 8)
    decode.admit("waits", 24)
    decode.say(LeaseRequest("waits", "waits", 0, 24))
    assert decode.outbox.closed == {}
    for lease_id in ("r", "waits"):
        decode.say(LeaseRequest(lease_id, "another", 0, 8))
        assert decode.outbox.closed.pop("epoch") == f"lease {lease_id} was requested twice"
    assert (decode.cache.num_leased_pages, decode.book.num_waiting) == (3, 1)


# --- revoked leases return by their settlement ---


def test_expired_lease_is_revoked_and_freed_only_by_its_settlement() -> None:
    decode = Decode()
    decode.granted("r", 8)
    decode.clock.advance(DURATION_S)
    assert decode.answers() == [Revoke("r")]
    assert decode.lost() == ["r"] and decode.book.num_expired == 1
    decode.clock.advance(1000)
    assert decode.answers() == [] and decode.cache.num_leased_pages == 3
    assert decode.book.next_deadline() is None
    decode.say(Released("r"))
    decode.answers()
    assert decode.cache.num_free_pages == 8 and decode.lost() == ["r"]


@pytest.mark.parametrize("message", [Renewed("r"), Pushing(0, "r", 0, 1)])
def test_a_sign_of_life_renews_a_lease(message: Any) -> None:
    decode = Decode()
    decode.granted("r", 8)
    for _ in range(3):
        decode.clock.advance(DURATION_S - 1)
        decode.say(message)
        assert decode.answers() == []
    decode.clock.advance(DURATION_S)
    assert decode.answers() == [Revoke("r")]


def test_abandoned_lease_is_revoked_and_its_commit_starts_nothing() -> None:
    decode = Decode()
    decode.granted("r", 8)
    decode.book.abort_attempt("r", 0)
    assert decode.answers() == [Revoke("r")]
    assert decode.cache.num_leased_pages == 3
    # The commit crossed the revocation.
    decode.say(committed("r", 2, 8))
    decode.answers()
    assert decode.started == [] and decode.lost() == []
    assert decode.cache.num_free_pages == 8


def test_losing_the_router_abandons_all() -> None:
    decode = Decode(num_pages=4, transport=ScriptedReceiver())
    decode.granted("arriving", 3)
    decode.say(Pushing(0, "arriving", 0, 1))
    decode.say(committed("arriving", 1, 3))
    decode.granted("granted", 3)
    decode.admit("waiting", 12)
    decode.say(LeaseRequest("waiting", "waiting", 0, 12))
    decode.book.abort_all_attempts_of("")
    assert decode.answers() == [Revoke("granted"), Refused("waiting", "gone")]
    assert decode.book.next_deadline() is not None, "a receive is under way"


# --- epochs end while senders may go on ---


def test_leased_pages_of_a_broken_epoch_wait_until_its_sender_is_gone() -> None:
    decode = Decode(num_pages=4)
    decode.granted("r", 8)
    decode.admit("waits", 8)
    decode.say(LeaseRequest("waits", "waits", 0, 8))
    decode.close()
    assert decode.answers() == [] and decode.lost() == ["r"]
    assert decode.book.num_waiting == 0
    assert (decode.cache.num_leased_pages, decode.cache.num_locked_pages) == (0, 3)
    decode.gone = True
    decode.answers()
    assert decode.cache.num_free_pages == 4


@pytest.mark.parametrize("noticed_first", [True, False])
def test_sender_s_next_epoch_proves_the_last_one_quiet(noticed_first: bool) -> None:
    decode = Decode()
    decode.granted("r", 8)
    if noticed_first:
        decode.close()
    decode.open("another sender's", OneSided(), sender="q")
    assert decode.answers() == [] and decode.cache.num_free_pages == 5
    decode.open("next", OneSided())
    if not noticed_first:
        decode.close()
    decode.answers()
    assert decode.cache.num_free_pages == 8


def test_epoch_end_does_not_report_abandoned_leases() -> None:
    decode = Decode()
    decode.granted("r", 8)
    decode.book.abort_attempt("r", 0)
    decode.close()
    assert decode.lost() == []


def test_messages_of_an_ended_epoch_are_ignored() -> None:
    decode = Decode()
    decode.admit("r", 8)
    decode.close()
    decode.say(LeaseRequest("r", "r", 0, 8))
    assert decode.answers() == [] and decode.book.num_waiting == 0


def test_a_failed_transport_ends_its_epoch_once() -> None:
    transport = ScriptedReceiver()
    decode = Decode(transport=transport)
    transport.failure_reason = "broken"
    decode.answers()
    assert decode.outbox.closed == {"epoch": "broken"}
    decode.outbox.closed.clear()
    decode.answers()
    assert decode.outbox.closed == {}


def test_protocol_error_affects_only_its_sender() -> None:
    decode = Decode(transport=ScriptedReceiver())
    decode.open("other", ScriptedReceiver(), sender="q")
    decode.granted("r", 8)
    decode.say(Pushing(0, "r", 2, 2))
    assert list(decode.outbox.closed) == ["epoch"] and "does not fit the grant" in decode.outbox.closed["epoch"]


# --- two-sided transports announce pushes ---


def test_request_starts_when_pages_arrive_not_at_commit() -> None:
    transport = ScriptedReceiver()
    decode = Decode(transport=transport)
    granted = decode.granted("r", 8)
    decode.say(Pushing(0, "r", 0, 1))
    decode.say(Pushing(1, "r", 1, 1))
    decode.say(committed("r", 2, 8))
    decode.answers()
    assert transport.expected == [(0, [granted.page_ids[0]], 1), (1, [granted.page_ids[1]], 1)]
    assert decode.started == [] and decode.book.next_deadline() is not None
    transport.receives[0].is_done = True
    decode.answers()
    assert decode.started == []
    transport.receives[1].is_done = True
    decode.answers()
    assert decode.started == [("r", 7)]


def test_pages_still_being_received_are_not_reused_after_a_release() -> None:
    transport = ScriptedReceiver()
    decode = Decode(transport=transport)
    decode.granted("r", 8)
    decode.say(Pushing(0, "r", 0, 2))
    decode.say(Released("r"))
    decode.answers()
    assert (decode.cache.num_leased_pages, decode.cache.num_locked_pages) == (0, 3)
    transport.complete_all()
    decode.answers()
    assert decode.cache.num_free_pages == 8


def test_a_commit_that_is_aborted_while_its_pages_arrive_starts_nothing() -> None:
    transport = ScriptedReceiver()
    decode = Decode(transport=transport)
    decode.granted("r", 8)
    decode.say(Pushing(0, "r", 0, 2))
    decode.say(committed("r", 2, 8))
    decode.book.abort_attempt("r", 0)
    transport.complete_all()
    assert decode.answers() == [] and decode.started == []
    assert decode.cache.num_free_pages == 8


def test_an_announced_push_runs_though_its_lease_has_died() -> None:
    """Otherwise all later pushes of the link would wait forever."""
    transport = ScriptedReceiver()
    decode = Decode(transport=transport)
    decode.granted("r", 8)
    decode.say(Pushing(0, "nobody's", 0, 2))
    decode.book.abort_attempt("r", 0)
    decode.say(Pushing(1, "r", 0, 2))
    decode.say(Released("r"))
    decode.say(Pushing(2, "r", 2, 7))
    assert transport.expected == [(0, None, 2), (1, None, 2), (2, None, 7)]
    decode.answers()
    assert decode.cache.num_locked_pages == 3, "a push that is thrown away is waited for too"
    transport.complete_all()
    decode.answers()
    assert decode.cache.num_free_pages == 8


def test_a_broken_epoch_keeps_pages_until_the_receiver_has_stopped() -> None:
    transport = ScriptedReceiver()
    decode = Decode(transport=transport)
    decode.granted("granted", 3)
    decode.granted("arriving", 3)
    decode.say(Pushing(0, "arriving", 0, 1))
    decode.say(committed("arriving", 1, 3))
    decode.close()
    decode.gone = True
    decode.answers()
    assert transport.aborted and decode.lost() == ["granted", "arriving"]
    assert decode.cache.num_free_pages == 6
    transport.stopped.is_done = True
    decode.answers()
    assert decode.cache.num_free_pages == 8


def test_receives_of_a_released_lease_are_over_with_the_epoch() -> None:
    transport = ScriptedReceiver()
    decode = Decode(transport=transport)
    decode.granted("r", 8)
    decode.say(Pushing(0, "r", 0, 2))
    decode.say(Released("r"))
    # The link ends before the last bytes are read.
    decode.close()
    decode.answers()
    assert decode.cache.num_locked_pages == 3
    transport.stopped.is_done = True
    decode.answers()
    assert decode.cache.num_free_pages == 8


def test_the_oldest_commit_starts_first() -> None:
    transport = ScriptedReceiver()
    decode = Decode(transport=transport)
    for name in ("a", "bb"):
        decode.granted(name, 3)
        decode.say(Pushing(len(name), name, 0, 1))
    for name in ("bb", "a"):
        decode.say(committed(name, 1, 3))
    transport.complete_all()
    decode.answers()
    assert [request_id for request_id, _ in decode.started] == ["bb", "a"]


# --- a commit arrives with the end of its epoch ---


def test_lease_committed_before_the_epoch_end_is_decoded() -> None:
    """Both may come in one batch: the pages are here, and nothing is lost with the link."""
    decode = Decode()
    decode.granted("r", 8)
    decode.granted("not committed", 3)
    decode.say(committed("r", 2, 8))
    decode.close()
    decode.answers()
    assert decode.started == [("r", 7)] and decode.lost() == ["not committed"]
    assert decode.cache.num_leased_pages == 0


def test_two_sided_only_arrived_pages_survive_the_epoch_end() -> None:
    transport = ScriptedReceiver()
    decode = Decode(transport=transport)
    for number, name in enumerate(("here", "under way")):
        decode.granted(name, 3)
        decode.say(Pushing(number, name, 0, 1))
        decode.say(committed(name, 1, 3))
    transport.receives[0].is_done = True
    decode.close()
    transport.stopped.is_done = True
    decode.answers()
    assert decode.started == [("here", 7)] and decode.lost() == ["under way"]


def test_end_of_an_unknown_epoch_changes_nothing() -> None:
    decode = Decode()
    decode.granted("r", 8)
    decode.close("another worker's")
    decode.close()
    decode.answers()
    decode.close()
    assert decode.answers() == [] and decode.lost() == ["r"]


# --- the queue is limited ---


def test_full_queue_refuses_and_allows_a_retry() -> None:
    decode = Decode(num_pages=4, max_waiting=1)
    decode.granted("holder", 8)
    for name in ("r", "later"):
        decode.admit(name, 8)
        decode.say(LeaseRequest(name, name, 0, 8))
    decode.say(LeaseRequest("parked", "not admitted", 0, 8))
    assert decode.answers() == [Refused("later", "full"), Refused("parked", "full")]
    decode.say(Released("holder"))
    assert [answer.lease_id for answer in decode.answers()] == ["r"]
    decode.say(Released("r"))
    decode.say(LeaseRequest("later again", "later", 0, 8))
    assert [type(answer) for answer in decode.answers()] == [Granted]


def test_an_attempt_has_one_lease_at_a_time() -> None:
    decode = Decode(num_pages=4)
    decode.granted("holder", 8)
    decode.admit("r", 8)
    decode.say(LeaseRequest("r", "r", 0, 8))
    decode.say(LeaseRequest("of the same attempt", "r", 0, 8))
    assert decode.answers() == [Refused("of the same attempt", "unknown")]
    assert decode.book.num_waiting == 1


def test_newly_cached_prefix_may_make_a_lease_fit() -> None:
    """Once the prompt is cached, it takes one page instead of three."""
    decode = Decode(num_pages=5)
    decode.granted("first", 8)
    decode.admit("second", 8)
    decode.say(LeaseRequest("second", "second", 0, 8))
    assert decode.answers() == []
    decode.say(committed("first", 2, 8))

    def start(lease: Lease) -> None:
        decode.cache.cache_pages(lease.handle, lease.admit.prompt_ids, 8)
        decode.book.look_again()

    decode.book._start = start
    assert [(a.lease_id, a.cached_len) for a in decode.answers()] == [("second", 8)]
