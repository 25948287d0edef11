"""Prefetches of a lease book: each ends with its grant, or with the request."""

from collections.abc import Callable
from typing import Any

import pytest

from tandem.decode_worker.config import DecodeConfig
from tandem.decode_worker.lease import Lease
from tandem.decode_worker.leases import LeaseBook
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.kvtransfer.events import FromSender, ReceiverLinkClosed, ReceiverLinkOpened
from tandem.messages import (
    PROTOCOL_VERSION,
    Admit,
    Committed,
    Granted,
    LeaseRequest,
    LinkHello,
    PageFormat,
    Refused,
    Released,
    TierHits,
)
from tandem.sampling_params import SamplingParams
from tests.fakes.clock import FakeClock
from tests.fakes.engine import FakeEngine
from tests.fakes.scripted_tier import ScriptedTier
from tests.fakes.transport import ScriptedReceiver
from tests.fakes.workers import ListOutbox

REQUEST_ID = "router-0"
KEY = (REQUEST_ID, 0, "decode")


class Book:
    """A lease book with one link and a pool that has no page left over for a prompt of 8 tokens while `fill` holds."""

    def __init__(self, prefill_worker_id: str = "", max_waiting: int = 1024) -> None:
        self.clock, self.outbox, self.tier = FakeClock(), ListOutbox(), ScriptedTier()
        self.engine, self.cache = FakeEngine(8, 4), CacheManager(8, 4)
        self.book = LeaseBook(
            self.cache,
            self.outbox,
            DecodeConfig(max_waiting=max_waiting),
            self.clock,
            self._start,
            tier=self.tier,
            prefill_worker_id=prefill_worker_id,
        )
        hello = LinkHello(PROTOCOL_VERSION, "p", "p life", "d life", PageFormat("", 1, ""), ("scripted",), ())
        self.book.receive(ReceiverLinkOpened("epoch", hello, ScriptedReceiver(), lambda: False))

    def admit(self, request_id: str = REQUEST_ID, num_tokens: int = 8, **kwargs: Any) -> None:
        output_ids = kwargs.pop("output_ids", ())
        prompt = tuple(range(num_tokens))
        self.book.admit_request(Admit(request_id, 0, prompt, output_ids, SamplingParams(8), 60.0, **kwargs))

    def ask(self, request_id: str = REQUEST_ID, num_tokens: int = 8) -> None:
        self.say(LeaseRequest(request_id, request_id, 0, num_tokens))

    def say(self, message: Any) -> None:
        self.book.receive(FromSender("epoch", message))

    def answers(self) -> list[Any]:
        self.cache.free_deferred_pages()
        self.book.answer_requests(0)
        said, self.outbox.link = self.outbox.link, []
        return [message for _, message in said]

    def fill(self) -> None:
        assert self.cache.acquire_pages([], 24, max_cached_len=0) is not None

    def _start(self, lease: Lease) -> None:
        raise AssertionError("nothing is committed")


def test_a_prefetch_lasts_from_admit_to_grant_and_is_found_there() -> None:
    book = Book()
    book.admit()
    assert book.tier.open == {KEY: tuple(range(8))}
    book.ask()
    assert book.tier.open, "a queued lease still profits"
    book.tier.load(KEY, 8, book.cache, book.engine)
    book.tier.hits[REQUEST_ID] = TierHits(host=4, disk=4)
    (granted,) = book.answers()
    assert isinstance(granted, Granted) and granted.cached_len == 8
    assert book.tier.ended == [KEY]
    assert (book.book.hits.num_cached, book.book.hits.loaded) == (8, TierHits(host=4, disk=4))


def test_a_grant_waits_for_no_load() -> None:
    book = Book()
    book.tier.loading.add(REQUEST_ID)
    book.admit()
    book.ask()
    (granted,) = book.answers()
    assert isinstance(granted, Granted) and granted.cached_len == 0
    assert book.tier.ended == [KEY] and book.book.hits.loaded == TierHits()


def test_hits_in_earlier_output_are_not_the_prompts() -> None:
    book = Book()
    book.admit(num_tokens=6, output_ids=(6, 7, 8))
    book.ask(num_tokens=9)
    book.tier.load(KEY, 8, book.cache, book.engine)
    book.tier.hits[REQUEST_ID] = TierHits(host=4, peer=4)
    book.answers()
    assert (book.book.hits.num_cached, book.book.hits.loaded) == (6, TierHits(host=4, peer=2))


def abort(book: Book) -> None:
    book.book.abort_attempt(REQUEST_ID, 0)


def lose_router(book: Book) -> None:
    book.book.abort_all_attempts_of("router")


def give_back(book: Book) -> None:
    book.book.mark_ended(REQUEST_ID, 0)


@pytest.mark.parametrize("end", [abort, lose_router, give_back])
def test_an_admitted_requests_end_ends_its_prefetch(end: Callable[[Book], None]) -> None:
    book = Book()
    book.admit()
    end(book)
    assert book.tier.ended == [KEY]


def test_an_expired_admission_ends_its_prefetch() -> None:
    book = Book()
    book.admit()
    book.clock.advance(61.0)
    book.answers()
    assert book.tier.ended == [KEY]


def test_a_request_prefilled_here_ends_its_prefetch() -> None:
    book = Book()
    book.admit()
    assert book.book.take_admitted(REQUEST_ID, 0) is not None
    assert book.tier.ended == [KEY]


def close_link(book: Book) -> None:
    book.book.receive(ReceiverLinkClosed("epoch"))


def release(book: Book) -> None:
    book.say(Released(REQUEST_ID))


@pytest.mark.parametrize("end", [abort, lose_router, close_link, release])
def test_a_waiting_leases_end_ends_its_prefetch(end: Callable[[Book], None]) -> None:
    book = Book()
    book.fill()
    book.admit()
    book.ask()
    assert book.answers() == [] and book.tier.open
    end(book)
    book.answers()
    assert book.tier.ended == [KEY]
    # Nothing of the request is left to end again.
    abort(book)
    book.clock.advance(1e6)
    book.answers()
    assert book.tier.ended == [KEY]


def test_a_refused_request_keeps_its_prefetch_until_it_ends() -> None:
    book = Book()
    book.admit()
    book.ask(num_tokens=9)
    assert book.answers() == [Refused(REQUEST_ID, "unknown")]
    assert book.tier.open
    abort(book)
    assert book.tier.ended == [KEY]


def test_a_lease_refused_for_a_full_queue_keeps_its_prefetch() -> None:
    book = Book(max_waiting=1)
    book.fill()
    book.admit("router-1", arrival_ns=1)
    book.admit(arrival_ns=2)
    book.ask("router-1")
    book.ask()
    assert book.answers() == [Refused(REQUEST_ID, "full")]
    assert set(book.tier.open) == {KEY, ("router-1", 0, "decode")}
    abort(book)
    assert book.tier.ended == [KEY]


def test_a_lease_that_overtakes_its_admit_is_prefetched_from_the_admit_on() -> None:
    book = Book()
    book.ask()
    assert not book.tier.begun
    book.admit()
    assert book.tier.begun == [KEY]
    assert isinstance(book.answers()[0], Granted)
    assert book.tier.ended == [KEY]


def test_a_moved_stream_granted_at_its_admit_leaves_no_prefetch() -> None:
    book = Book()
    copy = "router-1"
    book.admit(copy, copy_of=REQUEST_ID)
    book.ask(copy)
    book.answers()
    book.say(Committed(copy, 0, num_pages=2, num_tokens=8, finish_reason="", ship_started_ns=0))
    book.book.start_arrived()
    # The lease request overtakes the Admit, which finds the kept pages and grants them at once.
    book.ask()
    book.admit()
    ((_, granted),) = book.outbox.link
    assert isinstance(granted, Granted) and granted.cached_len == 8
    assert not book.tier.open


def test_a_prompt_that_this_worker_prefills_is_not_prefetched_again() -> None:
    book = Book(prefill_worker_id="both-0")
    book.admit(prefill_worker_id="both-0")
    assert book.tier.begun == []
    assert book.book.take_admitted(REQUEST_ID, 0) is not None
    book.admit("router-1", prefill_worker_id="both-1")
    # A router of an earlier version does not say.
    book.admit("router-2")
    assert book.tier.begun == [("router-1", 0, "decode"), ("router-2", 0, "decode")]
