"""Random requests on a real engine with real schedulers, in a pool that is too small.

The scenario acts as the router and checks the guarantees that the router needs.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.both_worker.local_worker import LocalWorker
from tandem.decode_worker.config import DecodeConfig
from tandem.engine.engine import Engine
from tandem.messages import Failed, Finished, FirstToken, GaveBack, PrefillDeferred, Tokens, WorkerMessage
from tandem.prefill_worker.config import PrefillConfig
from tandem.sampling_params import SamplingParams

CHUNK_SIZE = 64
MAX_BATCH_SIZE = 16
MAX_LIVE = 24
# Lengths of shared prefixes; MAX_SUFFIX and MAX_OUTPUT bound the tokens after them.
PREFIX_LENS = (0, 16, 40, 64, 100, 160)
MAX_SUFFIX = 60
MAX_OUTPUT = 60
ADMIT_PROBABILITY = 0.4
ABORT_PROBABILITY = 0.01
IDLE_TIMEOUT_S = 30.0
PREFILL = PrefillConfig(CHUNK_SIZE)
DECODE = DecodeConfig(MAX_BATCH_SIZE)


@dataclass
class Request:
    request_id: str
    number: int
    prompt_ids: list[int]
    sampling: SamplingParams
    attempt: int = 0
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""


class Scenario:
    """
    Attributes:
        finished: requests with all their tokens, in order of finishing.
    """

    def __init__(
        self,
        engine: Engine,
        vocab_size: int,
        samplings: Sequence[Callable[[int], dict[str, Any]]],
        seed: int,
    ) -> None:
        """Args: samplings: makers of SamplingParams arguments from a random number, one per request."""
        self._engine = engine
        self._worker = LocalWorker(engine, PREFILL, DECODE, self._receive)
        self._rng = random.Random(seed)
        self._vocab_size = vocab_size
        self._samplings = samplings
        self._prefixes = [self._tokens(n) for n in PREFIX_LENS]
        self._live: dict[str, Request] = {}
        self._given_back: list[Request] = []
        self._num_requests = 0
        self.finished: list[Request] = []
        self.num_aborted = 0
        self.num_given_back = 0

    def step(self) -> bool:
        """Maybe admit or abort a request, then step; return whether the scheduler did any work."""
        if len(self._live) < MAX_LIVE and self._rng.random() < ADMIT_PROBABILITY:
            self._admit()
        if self._live and self._rng.random() < ABORT_PROBABILITY:
            self._abort()
        return self._step()

    def drain(self) -> None:
        """Finish all requests and launched forward passes, then check that no page is held."""
        stats = self._worker.scheduler.stats

        def is_idle() -> bool:
            self._restart_given_back()
            return not self._live and not stats().num_locked_pages and not self._engine.launches

        self._worker.run_until(is_idle, IDLE_TIMEOUT_S)
        self.check()
        assert (stats().num_running, stats().num_queued, stats().num_leased_pages) == (0, 0, 0)
        assert stats().num_free_pages + stats().num_cached_pages == stats().num_total_pages

    def check(self) -> None:
        assert self._worker.scheduler.check_integrity() == ""

    def _step(self) -> bool:
        worked = self._worker.step()
        self._restart_given_back()
        return worked

    def _tokens(self, num_tokens: int) -> list[int]:
        return self._rng.choices(range(self._vocab_size), k=num_tokens)

    def _admit(self) -> None:
        rng = self._rng
        prompt_ids = rng.choice(self._prefixes) + self._tokens(rng.randint(1, MAX_SUFFIX))
        sampling = SamplingParams(rng.randint(1, MAX_OUTPUT), **rng.choice(self._samplings)(rng.getrandbits(32)))
        self._num_requests += 1
        request = Request(f"r{self._num_requests}", self._num_requests, prompt_ids, sampling)
        self._live[request.request_id] = request
        self._submit(request)

    def _abort(self) -> None:
        request = self._live.pop(self._rng.choice(list(self._live)))
        self._worker.abort(request.request_id, request.attempt)
        self.num_aborted += 1

    def _submit(self, request: Request) -> None:
        self._worker.submit(
            request.request_id,
            request.prompt_ids,
            request.sampling,
            attempt=request.attempt,
            output_ids=request.output_ids,
            arrival_ns=request.number,
        )

    def _restart_given_back(self) -> None:
        """Restart given-back requests from their tokens so far.

        Deferred, because a scheduler may still use the last attempt.
        """
        for request in self._given_back:
            if request.request_id in self._live:
                request.attempt += 1
                self._submit(request)
        self._given_back.clear()

    def _receive(self, message: WorkerMessage) -> None:
        if isinstance(message, Tokens):
            for event in message.events:
                if request := self._of(event.request_id, event.attempt):
                    self._take(request, event.index, event.token_ids)
        elif isinstance(message, FirstToken):
            if request := self._of(message.request_id, message.attempt):
                self._take(request, message.index, (message.token_id,))
                if message.finish_reason:
                    self._finish(request, message.finish_reason)
        elif isinstance(message, Finished):
            if request := self._of(message.request_id, message.attempt):
                assert message.num_output_tokens == len(request.output_ids)
                self._finish(request, message.finish_reason)
        elif isinstance(message, GaveBack):
            if request := self._of(message.request_id, message.attempt):
                self.num_given_back += 1
                self._given_back.append(request)
        elif isinstance(message, Failed | PrefillDeferred):
            assert self._of(message.request_id, message.attempt) is None, message

    def _of(self, request_id: str, attempt: int) -> Request | None:
        request = self._live.get(request_id)
        return request if request is not None and request.attempt == attempt else None

    def _take(self, request: Request, index: int, token_ids: Sequence[int]) -> None:
        """Take tokens; both schedulers report the first one. No token may be missing or contradicted."""
        assert index <= len(request.output_ids), f"{request.request_id} lacks a token before {index}"
        num_known = len(request.output_ids) - index
        assert list(token_ids[:num_known]) == request.output_ids[index : index + len(token_ids)]
        assert all(0 <= token_id < self._vocab_size for token_id in token_ids)
        request.output_ids += token_ids[num_known:]

    def _finish(self, request: Request, reason: str) -> None:
        sampling = request.sampling
        stops = [token_id in sampling.stop_token_ids for token_id in request.output_ids]
        assert not any(stops[:-1])
        assert reason == ("stop" if stops[-1] else "length")
        assert stops[-1] or len(request.output_ids) == sampling.max_tokens
        request.finish_reason = reason
        del self._live[request.request_id]
        self.finished.append(request)


def matches_solo_run(request: Request, engine: Engine, tie: float) -> bool:
    """Return whether a greedy request gets the same tokens alone on the engine with an empty pool.

    Args:
        tie: largest gap between the two highest log probabilities at which the tokens may differ. Later tokens are not
            compared.

    Returns:
        False if the tokens differ anywhere but at a tie.
    """
    alone: list[int] = []
    margins: list[float] = []

    def receive(message: WorkerMessage) -> None:
        pieces: list[Any] = []
        if isinstance(message, FirstToken):
            pieces = [(message.index, (message.token_id,), message.logprobs)]
        elif isinstance(message, Tokens):
            pieces = [(event.index, event.token_ids, event.logprobs) for event in message.events]
        for index, token_ids, logprobs in pieces:
            num_known = len(alone) - index
            alone.extend(token_ids[num_known:])
            margins.extend(entry.top[0].logprob - entry.top[1].logprob for entry in logprobs[num_known:])

    worker = LocalWorker(engine, PREFILL, DECODE, receive)
    sampling = SamplingParams(
        request.sampling.max_tokens, stop_token_ids=request.sampling.stop_token_ids, num_logprobs=2
    )
    worker.submit(request.request_id, request.prompt_ids, sampling)

    def is_idle() -> bool:
        # Finish a step launched before the last token was known, or the engine's next worker would find it.
        return bool(alone) and worker.scheduler.stats().num_running == 0 and not engine.launches

    worker.run_until(is_idle, IDLE_TIMEOUT_S)
    for ours, theirs, margin in zip(request.output_ids, alone, margins, strict=False):
        if ours != theirs:
            assert margin <= tie, f"{request.request_id}: {request.output_ids} instead of {alone}"
            return False
    assert len(request.output_ids) == len(alone)
    return True
