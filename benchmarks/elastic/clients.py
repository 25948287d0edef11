"""Clients of the simulated cluster, which call its routers without sockets."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.elastic.events import Events
from benchmarks.elastic.outcome import Seen
from benchmarks.elastic.pages import PAGE_SIZE
from tandem.lifecycle import RECEIVED, now_ns
from tandem.router.errors import RequestError
from tandem.router.requests.active_request import ActiveRequest
from tandem.router.requests.request_spec import RequestSpec, TokenizedPrompt
from tandem.router.requests.tracker import RequestState
from tandem.router.router import Router
from tandem.sampling_params import SamplingParams


class Arrival(NamedTuple):
    """Attributes: blocks: identities of its prompt's prefixes by block; (): it shares none."""

    at: float
    num_prompt_tokens: int
    num_output_tokens: int
    blocks: Sequence[int] = ()


class _InHand(NamedTuple):
    arrival: Arrival
    seen: Seen
    router: Router
    request: ActiveRequest


class Clients:
    """Attributes: seen: all requests so far, by arrival."""

    def __init__(self, events: Events, routers: Sequence[Router]) -> None:
        self.seen: list[Seen] = []
        self._events = events
        self._routers = itertools.cycle(routers)
        self._in_hand: dict[str, _InHand] = {}
        # Blocks of the prompt that its router places right now.
        self._submitting: Arrival | None = None
        self._next_block = 1 << 63

    def __len__(self) -> int:
        return len(self._in_hand)

    def send_all(self, arrivals: Iterator[Arrival]) -> None:
        """Submits each arrival at its time."""

        def send(arrival: Arrival) -> None:
            self.submit(arrival)
            if (following := next(arrivals, None)) is not None:
                self._events.at(following.at, lambda: send(following))

        if (first := next(arrivals, None)) is not None:
            self._events.at(first.at, lambda: send(first))

    def submit(self, arrival: Arrival) -> None:
        seen = Seen(self._events.now, arrival.num_prompt_tokens, arrival.num_output_tokens)
        self.seen.append(seen)
        identities = arrival.blocks
        if not identities:
            # Hashing unique tokens would only cost time.
            number = arrival.num_prompt_tokens // PAGE_SIZE
            identities = range(self._next_block, self._next_block + number)
            self._next_block += number
        prompt = TokenizedPrompt(
            (0,) * arrival.num_prompt_tokens, {RECEIVED: now_ns()}, identities={PAGE_SIZE: list(identities)}
        )
        router = next(self._routers)
        tracker = router.make_tracker(RequestSpec(prompt, SamplingParams(arrival.num_output_tokens)))
        self._submitting = arrival
        try:
            request = router.submit_request(tracker)
        except RequestError as error:
            seen.failure, seen.ended_at = str(error), self._events.now
            return
        finally:
            self._submitting = None
        self._in_hand[tracker.request_id] = _InHand(arrival, seen, router, request)
        self.look(tracker.request_id)

    def blocks_of(self, request_id: str) -> Sequence[int]:
        mine = self._in_hand.get(request_id)
        arrival = mine.arrival if mine is not None else self._submitting
        return arrival.blocks if arrival is not None else ()

    def count_gaps(self, request_id: str, num_gaps: int, num_slow: int) -> None:
        if (mine := self._in_hand.get(request_id)) is not None:
            mine.seen.num_gaps += num_gaps
            mine.seen.num_slow += num_slow

    def look(self, request_id: str) -> None:
        mine = self._in_hand.get(request_id)
        if mine is None:
            return
        tracker, seen = mine.request.tracker, mine.seen
        if seen.ttft_s is None and tracker.output_ids:
            seen.ttft_s = self._events.now - seen.at
        if tracker.is_final:
            seen.ended_at = self._events.now
            seen.num_attempts = tracker.attempt + 1
            if tracker.state is not RequestState.FINISHED:
                seen.failure = tracker.failure or tracker.state.name
            del self._in_hand[request_id]
            mine.router.close_request(mine.request)

    def look_at_all(self) -> None:
        """Finds requests that ended without a worker's message."""
        for request_id in list(self._in_hand):
            self.look(request_id)
