"""A running stream leaves one worker for another; the test acts as the router."""

from collections.abc import Sequence
from typing import Any

import pytest

from tandem.both_worker.worker import make_both_scheduler
from tandem.decode_worker.config import DecodeConfig
from tandem.decode_worker.leases import MOVE_ROOM_PAGES
from tandem.decode_worker.speculation import NO_SPECULATION
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.kvtransfer.events import FromReceiver, FromSender, ReceiverLinkOpened, SenderLinkClosed, SenderLinkOpened
from tandem.kvtransfer.transports.shared_memory import SharedMemoryReceiver, SharedMemorySender
from tandem.messages import (
    PROTOCOL_VERSION,
    Abort,
    Admit,
    Committed,
    FirstToken,
    GaveBack,
    Granted,
    LeaseRequest,
    LinkHello,
    Move,
    NotMoved,
    PageFormat,
    Prefill,
    Pushing,
    Refused,
    Tokens,
)
from tandem.prefill_worker.config import PrefillConfig
from tandem.sampling_params import SamplingParams
from tandem.worker.events import FromRouter, RouterLost
from tandem.worker.kept_pages import KEEP_S
from tests.fakes.clock import FakeClock
from tests.fakes.engine import FakeEngine, expected_tokens
from tests.fakes.scripted_drafter import scripted
from tests.fakes.workers import ListOutbox

PAGE_SIZE = 4
ROUTER = "router"
EPOCH = "epoch"
PROMPT = tuple(range(10, 19))


class Side:
    def __init__(self, name: str, clock: FakeClock, num_pages: int, speculation: str) -> None:
        self.name = name
        self.engine = FakeEngine(num_pages, PAGE_SIZE)
        self.cache = CacheManager(num_pages, PAGE_SIZE, max_request_pages=num_pages // 2)
        self.outbox = ListOutbox()
        self.scheduler = make_both_scheduler(
            name,
            self.engine,
            self.cache,
            self.outbox,
            PrefillConfig(),
            DecodeConfig(speculation=speculation),
            has_links=True,
            clock=clock,
        )

    def receive(self, *messages: Any) -> None:
        for message in messages:
            self.scheduler.receive(FromRouter(message))

    def tokens(self, request_id: str) -> list[int]:
        """Return the request's tokens from here, over all attempts, each once."""
        tokens: dict[int, int] = {}
        for message in self.outbox.router:
            if isinstance(message, FirstToken) and message.request_id == request_id:
                tokens[message.index] = message.token_id
            for event in message.events if isinstance(message, Tokens) else ():
                if event.request_id == request_id:
                    tokens.update(enumerate(event.token_ids, event.index))
        return [tokens[index] for index in sorted(tokens)]


class Movers:
    """Two linked workers; streams leave the first."""

    def __init__(self, num_pages: int = 64, num_pages_there: int = 64, speculation: str = NO_SPECULATION) -> None:
        self.clock = FakeClock()
        self.here = Side("here", self.clock, num_pages, speculation)
        self.there = Side("there", self.clock, num_pages_there, speculation)
        page_format = PageFormat("fake", 1, "fake")
        hello = LinkHello(PROTOCOL_VERSION, "here", "here-life", "there-life", page_format, ("shared_memory",), ())
        receiver = SharedMemoryReceiver(self.there.engine.pool)
        self.there.scheduler.receive(ReceiverLinkOpened(EPOCH, hello, receiver, lambda: False))
        sender = SharedMemorySender(self.here.engine.pool, receiver.endpoint())
        self.here.scheduler.receive(SenderLinkOpened("there", "there-life", EPOCH, "shared_memory", sender))
        self.on_link: list[Any] = []

    def start(self, number: int, max_tokens: int = 60, prompt_ids: Sequence[int] = PROMPT) -> str:
        """Start a stream at the leaving worker; the first one is its oldest."""
        request_id, sampling = f"{ROUTER}-{number}", SamplingParams(max_tokens)
        prompt = tuple(prompt_ids)
        self.here.receive(
            Admit(request_id, 0, prompt, (), sampling, 60.0, arrival_ns=number),
            Prefill(request_id, 0, prompt, (), sampling, "here", arrival_ns=number),
        )
        self.turns(4)
        assert len(self.here.tokens(request_id)) > 1
        return request_id

    def order(self, request_id: str, prompt_ids: Sequence[int] = PROMPT, grammar: str = "") -> None:
        known = [*prompt_ids, *self.here.tokens(request_id)]
        num_tokens = (len(known) - 1) // PAGE_SIZE * PAGE_SIZE
        sampling = SamplingParams(60, stop_token_ids=(5000,), grammar=grammar)
        self.there.receive(Admit(f"{ROUTER}-copy", 0, tuple(known[:num_tokens]), (), sampling, 5.0, copy_of=request_id))
        self.here.receive(Move(request_id, 0, f"{ROUTER}-copy", "there", num_tokens))

    def go_on(self, request_id: str, max_tokens: int = 60) -> None:
        """Start the next attempt, pinned to the two workers."""
        output, sampling = tuple(self.here.tokens(request_id)), SamplingParams(max_tokens)
        self.there.receive(Admit(request_id, 1, PROMPT, output, sampling, 60.0))
        self.here.receive(Prefill(request_id, 1, PROMPT, output, sampling, "there", is_move=True))

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.here.scheduler.step()
            self.there.scheduler.step()
            for epoch, message in self._taken(self.here.outbox):
                self.there.scheduler.receive(FromSender(epoch, message))
            for epoch, message in self._taken(self.there.outbox):
                self.here.scheduler.receive(FromReceiver(epoch, message))
            for side in (self.here, self.there):
                assert side.scheduler.check_integrity() == ""

    def _taken(self, outbox: ListOutbox) -> list[tuple[str, Any]]:
        messages, outbox.link = outbox.link, []
        self.on_link += [message for _, message in messages]
        return messages

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.on_link if isinstance(message, kind)]

    def let_end(self) -> None:
        """Let all streams end; no page stays in use."""
        self.turns(80)
        self.clock.advance(KEEP_S)
        self.turns(3)
        for side in (self.here, self.there):
            stats = side.scheduler.stats()
            assert (stats.num_locked_pages, stats.num_leased_pages, stats.num_running, stats.num_queued) == (0,) * 4


def test_stream_goes_on_at_the_other_worker_with_a_few_tokens_computed_again() -> None:
    m = Movers()
    m.start(0)
    moving = m.start(1)
    m.order(moving)
    m.turns(4)
    assert m.here.outbox.of(GaveBack) == [GaveBack(moving, 0, is_move=True)] and not m.here.outbox.of(NotMoved)
    num_before = len(m.here.tokens(moving))
    num_computed = m.here.scheduler.stats().prompt_tokens_computed
    m.go_on(moving)
    m.turns(6)
    # Of the pages that went ahead, none is computed or shipped again.
    first = m.here.outbox.of(FirstToken)[-1]
    assert (first.attempt, first.index) == (1, num_before)
    assert m.here.scheduler.stats().prompt_tokens_computed - num_computed < 2 * PAGE_SIZE
    ahead, rest = m.of(Granted)
    assert rest.cached_len == ahead.cached_len + PAGE_SIZE * len(ahead.page_ids) - MOVE_ROOM_PAGES * PAGE_SIZE
    m.let_end()
    output = expected_tokens(PROMPT, 60)
    assert m.here.tokens(moving) == output[: num_before + 1]
    assert m.there.tokens(moving) == output[num_before:]
    assert m.here.tokens(f"{ROUTER}-0") == output


def half_right(token_ids: Sequence[int], most: int) -> list[int]:
    right = expected_tokens(token_ids, most)
    return right if len(token_ids) % 2 else [*right[:1], *[token + 1 for token in right[1:]]]


def test_moved_stream_that_speculates_has_the_same_tokens() -> None:
    max_tokens = 110
    with scripted(half_right, 3) as speculation:
        m = Movers(speculation=speculation)
        m.start(0, max_tokens)
        moving = m.start(1, max_tokens)
        m.order(moving)
        num_before = len(m.here.tokens(moving))
        num_steps = 4
        m.turns(num_steps)
        assert m.here.outbox.of(GaveBack) == [GaveBack(moving, 0, is_move=True)]
        # Its pages do not go ahead in vain: it takes no drafts meanwhile.
        assert len(m.here.tokens(moving)) <= num_before + num_steps
        m.go_on(moving, max_tokens)
        m.let_end()
    output = expected_tokens(PROMPT, max_tokens)
    num_here = len(m.here.tokens(moving))
    assert m.here.tokens(moving) == output[:num_here]
    assert m.there.tokens(moving) == output[num_here - 1 :]
    assert m.here.tokens(f"{ROUTER}-0") == output
    for side in (m.here, m.there):
        [drafted] = side.scheduler.stats().drafted
        assert 0 < drafted.num_accepted < drafted.num_tokens


def test_refused_move_ends_no_speculation() -> None:
    with scripted(expected_tokens, 3) as speculation:
        m = Movers(num_pages_there=40, speculation=speculation)
        m.there.cache.acquire_pages([], 38 * PAGE_SIZE, max_cached_len=0)
        m.start(0, 110)
        moving = m.start(1, 110)
        m.order(moving)
        m.turns(3)
        assert m.here.outbox.of(NotMoved) == [NotMoved(moving, 0, "busy")]
        num_before = len(m.here.tokens(moving))
        m.turns(4)
        assert len(m.here.tokens(moving)) == num_before + 4 * 4


def test_stream_runs_here_until_its_pages_are_there() -> None:
    m = Movers()
    m.start(0)
    moving = m.start(1)
    m.order(moving)
    for _ in range(8):
        m.here.scheduler.step()
    assert not m.here.outbox.of(GaveBack)
    assert m.here.tokens(moving) == expected_tokens(PROMPT, len(m.here.tokens(moving)))


@pytest.mark.parametrize("reason", ["oldest", "no_link", "ended"])
def test_impossible_move_is_refused_at_once(reason: str) -> None:
    m = Movers()
    first, second = m.start(0), m.start(1)
    if reason == "no_link":
        m.here.scheduler.receive(SenderLinkClosed(EPOCH, "cut", lambda: None))
    if reason == "ended":
        m.here.receive(Abort(second, 0))
    m.order(first if reason == "oldest" else second)
    refused = first if reason == "oldest" else second
    assert m.here.outbox.of(NotMoved) == [NotMoved(refused, 0, reason)]
    assert not m.of(LeaseRequest)
    m.here.scheduler.receive(RouterLost(ROUTER))
    m.there.scheduler.receive(RouterLost(ROUTER))
    m.let_end()


def test_move_waits_in_no_line_for_pages() -> None:
    m = Movers(num_pages_there=8)
    m.there.cache.acquire_pages([], 6 * PAGE_SIZE, max_cached_len=0)
    m.start(0)
    moving = m.start(1)
    m.order(moving)
    m.turns(3)
    assert [refused.reason for refused in m.of(Refused)] == ["busy"]
    assert m.here.outbox.of(NotMoved) == [NotMoved(moving, 0, "busy")]
    m.turns(80)
    assert m.here.tokens(moving) == expected_tokens(PROMPT, 60)


def test_stream_stays_if_its_grammar_is_not_compiled_there() -> None:
    m = Movers()
    m.start(0)
    moving = m.start(1)
    # This model keeps to no grammar.
    m.order(moving, grammar="a grammar")
    m.turns(3)
    assert m.here.outbox.of(NotMoved) == [NotMoved(moving, 0, "grammar")]
    m.let_end()


def test_stream_stays_if_it_outgrows_its_lease() -> None:
    m = Movers()
    m.start(0)
    moving = m.start(1)
    m.order(moving)
    # The other worker is slow.
    for _ in range((MOVE_ROOM_PAGES + 1) * PAGE_SIZE):
        m.here.scheduler.step()
    m.turns(4)
    assert m.here.outbox.of(NotMoved) == [NotMoved(moving, 0, "outgrown")]
    m.let_end()
    assert m.here.tokens(moving) == expected_tokens(PROMPT, 60)


def test_kept_pages_are_let_go_without_a_next_attempt() -> None:
    m = Movers()
    m.start(0)
    moving = m.start(1)
    m.order(moving)
    m.turns(4)
    assert m.here.outbox.of(GaveBack)
    assert m.there.scheduler.stats().num_locked_pages
    m.let_end()


@pytest.mark.parametrize("num_turns", range(4))
def test_aborted_stream_or_lost_router_leaves_nothing(num_turns: int) -> None:
    for event in (FromRouter(Abort(f"{ROUTER}-1", 0)), RouterLost(ROUTER)):
        m = Movers()
        m.start(0)
        m.order(m.start(1))
        m.turns(num_turns)
        m.here.scheduler.receive(event)
        if isinstance(event, RouterLost):
            m.there.scheduler.receive(event)
        m.let_end()


@pytest.mark.parametrize("num_turns", range(4))
def test_lost_link_leaves_the_stream_where_it_is(num_turns: int) -> None:
    m = Movers()
    m.start(0)
    moving = m.start(1)
    m.order(moving)
    m.turns(num_turns)
    m.here.outbox.link.clear()
    m.here.scheduler.receive(SenderLinkClosed(EPOCH, "cut", lambda: None))
    m.turns(2)
    assert m.here.outbox.of(GaveBack) or m.here.outbox.of(NotMoved) == [NotMoved(moving, 0, "lost")]


def test_moving_stream_overtakes_all_prompts_at_the_worker_that_it_leaves() -> None:
    m = Movers()
    m.start(0)
    moving = m.start(1)
    m.order(moving)
    m.turns(4)
    sampling = SamplingParams(2)
    for number in (2, 3):
        prompt = tuple(range(100 * number, 100 * number + 40))
        m.here.receive(
            Admit(f"{ROUTER}-{number}", 0, prompt, (), sampling, 60.0, arrival_ns=1, priority=2),
            Prefill(f"{ROUTER}-{number}", 0, prompt, (), sampling, "here", arrival_ns=1, priority=2),
        )
    m.go_on(moving)
    m.turns(6)
    after = [message.request_id for message in m.here.outbox.of(FirstToken)][2:]
    assert after[0] == moving and len(after) == 3
    assert not [message for message in m.of(Committed) if message.finish_reason] and not m.of(Pushing)
