"""A both worker without threads, sockets or router, for compiling ahead and measuring."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from tandem.both_worker.worker import make_both_scheduler
from tandem.decode_worker.config import DecodeConfig
from tandem.engine.base import EngineBase
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.messages import (
    Abort,
    Admit,
    Failed,
    Finished,
    FirstToken,
    GaveBack,
    Prefill,
    PrefillDeferred,
    Tokens,
    WorkerMessage,
)
from tandem.prefill_worker.config import PrefillConfig
from tandem.sampling_params import SamplingParams
from tandem.worker.base import Outbox
from tandem.worker.events import FromRouter

WORKER_ID = "local"
# Practically forever, in seconds.
ADMIT_DURATION_S = 1e6
# Maximum pause between two idle steps, in seconds.
MAX_REST_S = 1e-3


class _Outbox(Outbox):
    def __init__(self, on_message: Callable[[WorkerMessage], None]) -> None:
        self._on_message = on_message

    def to_router(self, message: WorkerMessage) -> None:
        self._on_message(message)

    def to_link(self, epoch: str, message: Any) -> None:
        raise AssertionError("there are no links")

    def close_link(self, epoch: str, reason: str) -> None:
        raise AssertionError("there are no links")

    def to_store(self, epoch: str, message: Any) -> None:
        raise AssertionError("there is no store")

    def flush(self) -> bool:
        return False


class LocalWorker:
    """Real schedulers and a real cache over one engine. The caller acts as the router.

    Attributes:
        scheduler: the scheduler, for its statistics and integrity check.
    """

    def __init__(
        self,
        engine: EngineBase,
        prefill: PrefillConfig,
        decode: DecodeConfig,
        on_message: Callable[[WorkerMessage], None],
        eviction: str = "lru",
    ) -> None:
        cache = CacheManager(engine.pool.num_pages, engine.pool.layout.page_size, eviction)
        self.scheduler = make_both_scheduler(WORKER_ID, engine, cache, _Outbox(on_message), prefill, decode)

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        attempt: int = 0,
        output_ids: Sequence[int] = (),
        arrival_ns: int = 0,
    ) -> None:
        prompt, output = tuple(prompt_ids), tuple(output_ids)
        admit = Admit(request_id, attempt, prompt, output, sampling, ADMIT_DURATION_S, arrival_ns)
        prefill = Prefill(request_id, attempt, prompt, output, sampling, WORKER_ID, arrival_ns)
        self.scheduler.receive(FromRouter(admit))
        self.scheduler.receive(FromRouter(prefill))

    def abort(self, request_id: str, attempt: int) -> None:
        self.scheduler.receive(FromRouter(Abort(request_id, attempt)))

    def step(self) -> bool:
        """Runs one step, and pauses briefly if it was idle. Returns whether there was work."""
        worked = self.scheduler.step()
        if not worked:
            due = self.scheduler.next_deadline()
            time.sleep(MAX_REST_S if due is None else min(MAX_REST_S, max(0.0, due - time.monotonic())))
        return worked

    def run_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Steps until `condition` holds. Raises TimeoutError after timeout_s."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {timeout_s:g} s: {self.scheduler.stats()}")
            self.step()


class Counts:
    """Counts results of requests that must all succeed.

    Attributes:
        num_first: requests with a first token.
    """

    def __init__(self) -> None:
        self.num_first = 0
        self.num_ended = 0
        self.num_decode_steps = 0

    def count(self, message: WorkerMessage) -> None:
        """Raises RuntimeError if the pool is too small for the requests."""
        if isinstance(message, FirstToken):
            self.num_first += 1
            self.num_ended += bool(message.finish_reason)
        elif isinstance(message, Finished):
            self.num_ended += 1
        elif isinstance(message, Tokens):
            self.num_decode_steps += 1
        elif isinstance(message, GaveBack | Failed | PrefillDeferred):
            raise RuntimeError(f"a request was not served: {message}; the pool is too small for all requests")
