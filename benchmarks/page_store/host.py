"""Host time of a worker's turns while prompts beside running streams are loaded from the store, without a model.

Schedulers, tier and store are real; the engine computes nothing, and copies move nothing. Both take a GPU's time on a
clock that counts CPU time of the worker's thread and skips its waits. Copies do not delay forward passes.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

import numpy as np

from benchmarks.host_workers import InstantOutput
from benchmarks.rows import Row
from tandem.both_worker.worker import make_both_scheduler
from tandem.decode_worker.config import DecodeConfig
from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.base import EngineBase
from tandem.engine.batch import Batch
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.engine.kvcache.pool import CpuKvPool
from tandem.engine.output import ForwardOutput
from tandem.garbage import collect_seldom, freeze_objects
from tandem.messages import PROTOCOL_VERSION, Admit, FirstToken, PageFormat, Prefill, Tokens, WorkerMessage
from tandem.pagestore.client.base import RegionCopies, RegionCopy
from tandem.pagestore.client.compute_time import expected_compute_s
from tandem.pagestore.client.events import FromStore, StoreOpened
from tandem.pagestore.client.tier import StoreTier
from tandem.pagestore.client.tiered_scheduler import TieredScheduler
from tandem.pagestore.messages import StoreClientMessage, StoreHello, StoreWelcome
from tandem.pagestore.server.page_store import PageStore
from tandem.prefill_worker.config import PrefillConfig
from tandem.sampling_params import SamplingParams
from tandem.worker.base import Scheduler
from tandem.worker.engine_thread import IDLE_TURN_S, Outgoing, StepOutbox
from tandem.worker.events import Event, FromRouter

_PAGE_SIZE = 16
# Of Llama-3.1-8B on an H100: pages of 2 MiB at 50 GB/s, a decode step of 64 streams, and its prompt tokens.
_PAGE_S, _STEP_S, _TOKEN_S = 42e-6, 7e-3, 4e-5
# From a worker's message to the store's answer.
_ANSWER_S = 1e-3
_FORMAT = PageFormat("model", 2**21, "layout")
_SESSION, _WORKER = "session", "worker"
_VOCAB_SIZE = 32_000
_OUTPUT_TOKENS = 4
# Until a document is computed, and all streams run, in seconds.
_DOCUMENT_S, _LEAD_S = 1.0, 2.0
MAX_IDLE_MS = 2.0


@dataclass(frozen=True, slots=True)
class HostSizes:
    """
    Attributes:
        prefix_tokens: of each document.
        rate: arrivals of documents per second.
        small_pool_pages, large_pool_pages: pools that need the store, and that hold all documents.
    """

    num_streams: int = 64
    stream_tokens: int = 2048
    num_documents: int = 16
    prefix_tokens: int = 8192
    question_tokens: int = 64
    rate: float = 8.0
    seconds: float = 10.0
    small_pool_pages: int = 64 * 132 + 3 * 520
    large_pool_pages: int = 64 * 132 + 20 * 520


class _Clock:
    """Seconds that the thread has computed or waited."""

    def __init__(self) -> None:
        self._waited = -time.thread_time()

    def now(self) -> float:
        return self._waited + time.thread_time()

    def wait_until(self, moment: float) -> None:
        self._waited += max(0.0, moment - self.now())

    def forget_since(self, moment: float) -> None:
        """Take the time since `moment` out: others have computed then."""
        self._waited -= self.now() - moment


class _TimedOutput(InstantOutput):
    def __init__(self, clock: _Clock, began: float, seconds: float, num_rows: int, num_sequences: int) -> None:
        super().__init__(num_rows, num_sequences)
        self._clock, self._seconds = clock, seconds
        self.end = began + seconds

    def done(self) -> bool:
        return self._clock.now() >= self.end

    def token_ids(self) -> list[int]:
        self._clock.wait_until(self.end)
        return super().token_ids()

    def duration_s(self) -> float:
        self._clock.wait_until(self.end)
        return self._seconds


class _TimedEngine(EngineBase):
    """Attributes: idle_s: time of the device before each forward pass."""

    def __init__(self, clock: _Clock, num_pages: int) -> None:
        super().__init__(
            CpuKvPool(KvHeadLayout(1, _PAGE_SIZE, 1, 1, "bfloat16"), num_pages, "page-store-host"), "model"
        )
        self._clock = clock
        self._free_at = 0.0
        self.idle_s: list[float] = []

    @property
    def is_asynchronous(self) -> bool:
        return True

    def mixes(self, num_decoded: int, num_prompt_tokens: int, num_prompts: int = 1) -> bool:
        return True

    def forward(self, batch: Batch, meanwhile: Callable[[], None] | None = None) -> ForwardOutput:
        now = self._clock.now()
        self.idle_s.append(max(0.0, now - self._free_at))
        began = max(now, self._free_at)
        seconds = _STEP_S + _TOKEN_S * batch.num_prompt_tokens()
        self._free_at = began + seconds
        self.counters.count(batch)
        num_rows = len(batch.sequences) if batch.mode == "decode" else len(batch.sampled_rows())
        return _TimedOutput(self._clock, began, seconds, num_rows, len(batch.sequences))


class _TimedCopy:
    def __init__(self, clock: _Clock, end: float, seconds: float) -> None:
        self._clock, self._end, self.seconds = clock, end, seconds

    def done(self) -> bool:
        return self._clock.now() >= self._end


class _TimedCopies(RegionCopies):
    def __init__(self, clock: _Clock) -> None:
        self._clock = clock
        self._free_at = [0.0, 0.0]

    def copy_out(self, page_ids: Sequence[int], slots: Sequence[int]) -> RegionCopy:
        return self._copy(0, len(slots))

    def copy_in(self, slots: Sequence[int], page_ids: Sequence[int]) -> RegionCopy:
        return self._copy(1, len(slots))

    def _copy(self, direction: int, num_pages: int) -> RegionCopy:
        seconds = _PAGE_S * num_pages
        self._free_at[direction] = max(self._clock.now(), self._free_at[direction]) + seconds
        return _TimedCopy(self._clock, self._free_at[direction], seconds)

    def close(self) -> None: ...


@dataclass(slots=True)
class Measured:
    """
    Attributes:
        turns_s: CPU time of turns.
        idle_s: time of the device before each forward pass.
        gaps_s: between the messages with the streams' tokens.
        num_loaded: prompt tokens from the store.
    """

    turns_s: list[float] = field(default_factory=list)
    idle_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    num_loaded: int = 0


class _Worker:
    def __init__(self, num_pages: int, num_slots: int) -> None:
        """Args: num_slots: 0: there is no store."""
        self.clock = _Clock()
        self.engine = _TimedEngine(self.clock, num_pages)
        cache = CacheManager(num_pages, _PAGE_SIZE)
        self._outbox = StepOutbox(self._deliver)
        self._events: deque[tuple[float, Event]] = deque()
        self._store: PageStore | None = None
        self._to_store: list[StoreClientMessage] = []
        self._tokens_at = 0.0
        self.measured = Measured()
        tier = None
        if num_slots:
            self._store = PageStore(num_slots, time.monotonic)
            tier = StoreTier(
                cache,
                self.engine.launches,
                _TimedCopies(self.clock),
                _FORMAT,
                self._outbox.to_store,
                self.clock.now,
                lambda num_cached, num_new: expected_compute_s(self._stats, num_cached, num_new),
            )
        self.scheduler: Scheduler = make_both_scheduler(
            _WORKER,
            self.engine,
            cache,
            self._outbox,
            PrefillConfig(),
            DecodeConfig(max_batch_size=128),
            clock=self.clock.now,
            tier=tier,
        )
        if tier is not None:
            self.scheduler = TieredScheduler(self.scheduler, tier)
        self._stats = self.scheduler.stats()
        self._changes_due = 0.0
        if self._store is not None:
            hello = StoreHello(PROTOCOL_VERSION, _WORKER, "life", 1, _FORMAT)
            self._store.open_session(_SESSION, hello, lambda: False)
            self._answer()

    def begin(self) -> Measured:
        """Begin a measurement; the result fills while the worker runs."""
        self.engine.idle_s = []
        self.measured = Measured(idle_s=self.engine.idle_s)
        return self.measured

    def submit(self, request_id: str, prompt: tuple[int, ...], max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens, stop_token_ids=(0,))
        now = self.clock.now()
        self._events.append((now, FromRouter(Admit(request_id, 0, prompt, (), sampling, 3600.0))))
        self._events.append((now, FromRouter(Prefill(request_id, 0, prompt, (), sampling, _WORKER))))

    def run_until(self, moment: float) -> None:
        while self.clock.now() < moment:
            self._turn(moment)

    def _turn(self, moment: float) -> None:
        began = time.thread_time()
        scheduler = self.scheduler
        while self._events and self._events[0][0] <= self.clock.now():
            scheduler.receive(self._events.popleft()[1])
        worked = scheduler.step()
        self._stats = scheduler.stats()
        if self.clock.now() >= self._changes_due and any(changes := scheduler.take_cache_changes()):
            self._changes_due = self.clock.now() + 0.1
            self._outbox.pass_on_changes(changes)
        self._outbox.flush()
        self.measured.turns_s.append(time.thread_time() - began)
        self._answer()
        if not worked:
            now = self.clock.now()
            due = [now + IDLE_TURN_S, moment, scheduler.next_deadline() or moment]
            due += [self._events[0][0]] if self._events else []
            self.clock.wait_until(min(due))

    def _answer(self) -> None:
        if self._store is None:
            return
        began = self.clock.now()
        to_store, self._to_store = self._to_store, []
        for message in to_store:
            self._store.receive(_SESSION, message)
        self._store.poll()
        for answer in self._store.take_outgoing().get(_SESSION, ()):
            event: Event = FromStore(self._store.epoch, answer)
            if isinstance(answer, StoreWelcome):
                event = StoreOpened(answer.epoch, answer.num_slots)
            self._events.append((began + _ANSWER_S, event))
        self.clock.forget_since(began)

    def _deliver(self, outgoing: Outgoing) -> None:
        for messages in outgoing.to_store.values():
            self._to_store += messages
        for message in outgoing.to_router:
            self._note(message)

    def _note(self, message: WorkerMessage) -> None:
        if isinstance(message, Tokens):
            now = self.clock.now()
            self.measured.gaps_s.append(now - self._tokens_at)
            self._tokens_at = now
        elif isinstance(message, FirstToken):
            self.measured.num_loaded += message.loaded.host


def measure(sizes: HostSizes, num_pages: int, num_slots: int) -> Measured:
    """Ask for each document once, and again beside running streams."""
    rng = random.Random(0)

    def prompt(num_tokens: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(256, _VOCAB_SIZE), k=num_tokens))

    worker = _Worker(num_pages, num_slots)
    clock = worker.clock
    documents = [prompt(sizes.prefix_tokens) for _ in range(sizes.num_documents)]
    for number, document in enumerate(documents):
        worker.submit(f"document-{number}", document, 1)
        worker.run_until(clock.now() + _DOCUMENT_S)
    for number in range(sizes.num_streams):
        # As if they had begun at different times.
        num_tokens = 1 + number * sizes.stream_tokens // 2 // sizes.num_streams
        worker.submit(f"stream-{number}", prompt(num_tokens), sizes.stream_tokens)
    worker.run_until(clock.now() + _LEAD_S)
    # As a worker does.
    collect_seldom()
    freeze_objects()
    measured = worker.begin()
    begin = moment = clock.now()
    number = 0
    while (moment := moment + rng.expovariate(sizes.rate)) < begin + sizes.seconds:
        worker.run_until(moment)
        question = prompt(sizes.question_tokens)
        worker.submit(f"question-{number}", documents[number % len(documents)] + question, _OUTPUT_TOKENS)
        number += 1
    worker.run_until(begin + sizes.seconds)
    return measured


def measure_host(sizes: HostSizes) -> list[Row]:
    """Measure in processes of their own: garbage collection depends on all objects of a process."""
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        pool = processes.submit(measure, sizes, sizes.large_pool_pages, 0)
        store = processes.submit(measure, sizes, sizes.small_pool_pages, 2 * sizes.large_pool_pages)
        return [
            *_rows("prompts in the pool", pool.result(), sizes, None),
            *_rows("prompts in the store", store.result(), sizes, MAX_IDLE_MS),
        ]


def _rows(name: str, measured: Measured, sizes: HostSizes, max_idle_ms: float | None) -> Iterator[Row]:
    for what, values in (("turn", measured.turns_s), ("gap", measured.gaps_s), ("GPU idle", measured.idle_s)):
        for share in (0.5, 0.99, 0.999):
            high = max_idle_ms if (what, share) == ("GPU idle", 0.99) else None
            yield Row(f"{what} p{share * 100:g}, {name}", float(np.quantile(values, share)) * 1e3, "ms", high=high)
    yield Row(f"  loaded, {name}", measured.num_loaded / sizes.seconds, "tokens/s")
