"""A large request among a stream of small ones starts, however long the stream lasts.

Schedulers, caches and links are real, the test acts as the router, and each turn takes one second.
"""

import itertools

import pytest

from tandem.decode_worker.config import DecodeConfig
from tandem.messages import Finished, GaveBack, PrefillDeferred, Tokens
from tandem.prefill_worker.config import PrefillConfig
from tandem.priority import HEAD_START_S
from tests.fakes.workers import WorkerPair

PAGE_SIZE, NUM_PAGES = 64, 64
GRANT_TIMEOUT_S = 60.0
# Two thirds of the decode worker's pool. About five small requests end during its first wait.
LARGE_TOKENS = 40 * PAGE_SIZE
SMALL_TOKENS, SMALL_MAX_TOKENS, NUM_SMALL = 10, 240, 36
SECOND_NS = 10**9


class Stream:
    """A constant number of small requests: most are decoded, the rest wait for pages.

    Attributes:
        num_deferred: attempts that got no pages in time, by request.
        started: decoded requests, in order.
        ended: requests with all their tokens.
        came_at: arrival time of each request.
    """

    def __init__(self) -> None:
        prefill = {"num_pages": 1024, "config": PrefillConfig(chunk_size=4096, grant_timeout_s=GRANT_TIMEOUT_S)}
        self.pair = WorkerPair(page_size=PAGE_SIZE, num_pages=NUM_PAGES, prefill=prefill)
        self.num_deferred: dict[str, int] = {}
        self.started: dict[str, None] = {}
        self.ended: set[str] = set()
        self.came_at: dict[str, float] = {}
        self._numbers = itertools.count()
        self._requests: dict[str, dict[str, object]] = {}
        self._attempts: dict[str, int] = {}
        self._outputs: dict[str, list[int]] = {}

    def submit(self, request_id: str, num_tokens: int, max_tokens: int, priority: int = 0) -> None:
        number = next(self._numbers)
        self._requests[request_id] = {
            "prompt_ids": [number, *range(num_tokens - 1)],
            "max_tokens": max_tokens,
            "arrival_ns": int(self.pair.clock.now * SECOND_NS) + number,
            "priority": priority,
        }
        self.came_at[request_id] = self.pair.clock.now
        self._attempts[request_id] = 0
        self._outputs[request_id] = []
        self._start(request_id)

    def turn(self, priority: int = 0) -> None:
        """Args: priority: of this turn's new small requests."""
        while len(self._requests) < NUM_SMALL:
            number = next(self._numbers)
            # Spread their ends.
            max_tokens = SMALL_MAX_TOKENS - 37 * number % (SMALL_MAX_TOKENS // 2)
            self.submit(f"small{number}", SMALL_TOKENS, max_tokens, priority)
        self.pair.turn()
        self.pair.deliver()
        self.pair.clock.advance(1.0)
        self._receive()

    def turn_until_started(self, request_id: str, max_turns: int, priority: int = 0) -> list[str]:
        """Run turns until a request is decoded; return the later requests decoded before it."""
        before = set(self._attempts)
        for _ in range(max_turns):
            self.turn(priority)
            if request_id in self.started:
                break
        return [name for name in itertools.takewhile(lambda n: n != request_id, self.started) if name not in before]

    def _start(self, request_id: str) -> None:
        outputs = tuple(self._outputs[request_id])
        self.pair.submit(
            request_id,
            output_ids=outputs,
            attempt=self._attempts[request_id],
            **self._requests[request_id],  # type: ignore[arg-type]
        )

    def _receive(self) -> None:
        messages = [*self.pair.p.outbox.router, *self.pair.d.outbox.router]
        self.pair.p.outbox.router.clear()
        self.pair.d.outbox.router.clear()
        for message in messages:
            if isinstance(message, Tokens):
                for event in message.events:
                    self.started.setdefault(event.request_id)
                    outputs = self._outputs[event.request_id]
                    outputs += event.token_ids[len(outputs) - event.index :]
            elif isinstance(message, Finished):
                del self._requests[message.request_id]
                self.ended.add(message.request_id)
            elif isinstance(message, PrefillDeferred | GaveBack):
                if isinstance(message, PrefillDeferred):
                    self.num_deferred[message.request_id] = self.num_deferred.get(message.request_id, 0) + 1
                self.pair.abort(message.request_id, message.attempt)
                self._attempts[message.request_id] += 1
                self._start(message.request_id)


@pytest.fixture
def stream() -> Stream:
    """A stream that has already run for a while."""
    stream = Stream()
    for _ in range(2 * SMALL_MAX_TOKENS):
        stream.turn()
    assert stream.pair.d.scheduler.stats().num_queued > 0, "the pool is full"
    return stream


def test_large_request_starts_among_small_ones(stream: Stream) -> None:
    stream.submit("large", LARGE_TOKENS, 20)
    overtakers = stream.turn_until_started("large", max_turns=3600)
    assert "large" in stream.started
    assert stream.num_deferred["large"] >= 1, "it is restarted meanwhile"
    assert len(overtakers) <= DecodeConfig().max_overtaken
    stream.pair.check()
    for _ in range(100):
        stream.turn()
    assert "large" in stream.ended


def test_low_priority_request_starts_among_high_ones(stream: Stream) -> None:
    stream.submit("low", SMALL_TOKENS, 20, priority=-4)
    came_at = stream.pair.clock.now
    overtakers = stream.turn_until_started("low", max_turns=3600, priority=2)
    assert "low" in stream.started and overtakers, "priority counts"
    # One priority level is six head starts, so later requests queue behind it.
    last = max(stream.came_at[name] for name in overtakers)
    assert last - came_at <= 6 * HEAD_START_S
