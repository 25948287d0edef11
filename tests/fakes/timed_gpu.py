"""A worker on a GPU in virtual time. Tables give the times of its steps."""

import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.both_worker.worker import make_both_scheduler
from tandem.decode_worker.config import DecodeConfig
from tandem.decode_worker.drafters.base import Drafter
from tandem.decode_worker.drafting import Drafting
from tandem.engine.base import EngineBase
from tandem.engine.batch import Batch
from tandem.engine.draft_costs import DraftCosts
from tandem.engine.draft_models.draft_maker import DraftMaker
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.engine.kvcache.pool import CpuKvPool
from tandem.engine.output import ForwardOutput
from tandem.engine.token_sequence import TokenSequence
from tandem.messages import Admit, FirstToken, Prefill, Tokens, WorkerMessage
from tandem.prefill_worker.config import PrefillConfig
from tandem.prompt_logprobs import PackedLogprobs
from tandem.sampling_params import SamplingParams, TokenLogprobs
from tandem.worker.events import FromRouter
from tests.fakes.clock import FakeClock
from tests.fakes.page_layout import OpaqueLayout
from tests.fakes.workers import ListOutbox

PAGE_SIZE, NUM_PAGES = 16, 1 << 16
# Tokens of a request count up from a multiple of this.
STRIDE = 1 << 20
STREAM, STREAM_PROMPT_LEN = "stream", 128
# Of other requests.
PROMPT_LEN, NUM_OUTPUTS = 2048, 32
# Host time of a turn of the scheduler at least, and the longest pause of an idle one.
TURN_S, MAX_REST_S = 5e-6, 1e-3
CHUNK_SIZE, MAX_BATCH_SIZE = 8192, 256
# Seconds of Llama-3.1-8B's steps on an H200 by rows, without and with drafts, without contexts.
PLAIN_S = {1: 3.80e-3, 8: 3.90e-3, 16: 4.29e-3, 32: 4.42e-3, 64: 4.63e-3, 96: 4.97e-3, 128: 5.07e-3, 256: 7.5e-3}
DRAFTED_S = {2: 4.04e-3, 8: 4.10e-3, 16: 4.48e-3, 32: 4.65e-3, 64: 4.94e-3, 96: 5.44e-3, 128: 5.66e-3, 192: 7.38e-3}
DRAFTED_S[256] = 8.59e-3
# The same of the passes of an EAGLE-3 head, by sequences.
PASS_S = {1: 0.21e-3, 8: 0.22e-3, 32: 0.24e-3, 256: 0.6e-3}


@dataclass(frozen=True)
class Times:
    """Seconds beside PLAIN_S and DRAFTED_S.

    Attributes:
        drafted_share: times of steps with drafts over DRAFTED_S, which the worker measured at its start.
        kv_token_s: per attended token.
        prompt_token_s: per prompt token in a step.
        launch_s, prompt_launch_s: the host's, of a graph and of a step with prompts.
        row_s: the host's per row.
        search_s: the host's per search for drafts.
        drafting_s, drafting_row_s: the host's per drafting by a model, and per sequence of it.
    """

    drafted_share: float = 1.0
    kv_token_s: float = 1e-8
    prompt_token_s: float = 17e-6
    launch_s: float = 6e-4
    prompt_launch_s: float = 1.2e-2
    row_s: float = 8e-6
    search_s: float = 5e-6
    drafting_s: float = 5e-4
    drafting_row_s: float = 8e-6


class _Output(ForwardOutput):
    def __init__(self, gpu: "TimedGpu", sampled: list[int], end: float, duration_s: float, num_rows: int) -> None:
        self._gpu = gpu
        self._sampled = sampled
        self._end = end
        self._duration_s = duration_s
        self._num_rows = num_rows

    def done(self) -> bool:
        return self._gpu.clock.now >= self._end

    def token_ids(self) -> list[int]:
        self._gpu.clock.now = max(self._gpu.clock.now, self._end)
        return self._sampled

    def logprobs(self) -> list[TokenLogprobs | None]:
        return [None] * len(self._sampled)

    def prompt_logprobs(self) -> list[PackedLogprobs | None]:
        return [None] * self._num_rows

    def embeddings(self) -> list[bytes | None]:
        return [None] * self._num_rows

    def duration_s(self) -> float:
        self.token_ids()
        return self._duration_s


class TimedGpu(EngineBase):
    """The token at each position is the one before plus 1."""

    max_drafted_rows = 256

    def __init__(self, clock: FakeClock, times: Times, *, mixes: bool) -> None:
        super().__init__(CpuKvPool(OpaqueLayout(PAGE_SIZE, 1), NUM_PAGES, "timed"))
        self.clock = clock
        self.draft_costs = DraftCosts(PLAIN_S, DRAFTED_S, PASS_S)
        self._times = times
        self._mixes = mixes
        self._last_end = clock.now

    @property
    def is_asynchronous(self) -> bool:
        return True

    def mixes(self, num_decoded: int, num_prompt_tokens: int, num_prompts: int = 1) -> bool:
        return self._mixes

    def forward(self, batch: Batch, meanwhile: Callable[[], None] | None = None) -> ForwardOutput:
        times, began = self._times, self.clock.now
        num_rows, num_prompt_tokens = batch.num_decoded_tokens, batch.num_prompt_tokens()
        launch_s = times.prompt_launch_s if batch.prompts else times.launch_s
        self.clock.advance(launch_s + times.row_s * num_rows)
        seconds = times.prompt_token_s * num_prompt_tokens
        if batch.num_drafts:
            seconds += times.drafted_share * _next(DRAFTED_S, num_rows)
        else:
            seconds += _next(PLAIN_S, num_rows)
        seconds += times.kv_token_s * sum(sequence.device_len for sequence in batch.decoded)
        # A step without a graph runs beside its launch.
        start = max(self._last_end, began + times.launch_s)
        self._last_end = max(start + seconds, self.clock.now)
        sampled = []
        for s in batch.sequences:
            if s.needs_logits:
                end = s.token_ids[0] + s.device_len
                sampled += range(end - len(s.draft_ids), end + 1)
        return _Output(self, sampled, self._last_end, self._last_end - start, len(batch.sequences))


class TimedMaker(DraftMaker):
    """A head whose passes take PASS_S."""

    def __init__(self, clock: FakeClock, times: Times, guess: Callable[[int, int], list[int]]) -> None:
        """Args: guess: drafts behind a token, of a number."""
        self._clock = clock
        self._times = times
        self._guess = guess

    def make(self, sequences: Sequence[TokenSequence], num_drafts: Sequence[int]) -> list[list[int]]:
        self._clock.advance(self._times.drafting_s + self._times.drafting_row_s * len(sequences))
        self._clock.advance(max(num_drafts) * _next(PASS_S, len(sequences)))
        return [self._guess(s.token_ids[-1], count) for s, count in zip(sequences, num_drafts, strict=True)]


def _next(seconds: dict[int, float], num_rows: int) -> float:
    sizes = sorted(seconds)
    return seconds[sizes[min(bisect_left(sizes, num_rows), len(sizes) - 1)]]


class TimedWorker:
    """A worker of role both on a timed GPU, with streams of endless outputs.

    Attributes:
        acceptance: chance of a draft behind right ones.
        num_tokens: of the streams.
        gaps_s: times between messages with a stream's tokens.
    """

    def __init__(
        self, num_streams: int, speculation: str, acceptance: float, times: Times, *, mixes: bool, seed: int = 0
    ) -> None:
        self.acceptance = acceptance
        self._clock = FakeClock()
        self._times = times
        self._last: dict[str, float] = {}
        self._num_submitted = 0
        rng, clock = random.Random(seed), self._clock

        def guess(token_id: int, num_tokens: int) -> list[int]:
            return [token_id + 1 + i + (rng.random() >= self.acceptance) for i in range(num_tokens)]

        engine = TimedGpu(clock, times, mixes=mixes)
        engine.draft_maker = TimedMaker(clock, times, guess)
        self.scheduler = make_both_scheduler(
            "both",
            engine,
            CacheManager(NUM_PAGES, PAGE_SIZE),
            _TimedOutbox(self._sent),
            PrefillConfig(CHUNK_SIZE),
            DecodeConfig(MAX_BATCH_SIZE, speculation=speculation),
            clock=self._clock,
        )

        class Guesses(Drafter):
            def propose(self, token_ids: Sequence[int], max_tokens: int) -> Sequence[int]:
                clock.advance(times.search_s)
                return guess(token_ids[-1], max_tokens)

        drafting = self.scheduler._decode._drafting
        if isinstance(drafting, Drafting):
            drafting._drafter = Guesses
        self.forget()
        for number in range(num_streams):
            self._submit(f"{STREAM}{number}", STREAM_PROMPT_LEN, STRIDE - STREAM_PROMPT_LEN)

    def forget(self) -> None:
        self.num_tokens = 0
        self.gaps_s: list[float] = []

    def run(self, seconds: float, arrivals: Sequence[float] = ()) -> None:
        """Args: arrivals: of other prompts, in seconds from now."""
        began = self._clock.now
        end, waiting = began + seconds, sorted((began + arrival for arrival in arrivals), reverse=True)
        while (now := self._clock.now) < end:
            while waiting and waiting[-1] <= now:
                self._submit("other", PROMPT_LEN, NUM_OUTPUTS)
                waiting.pop()
            is_busy = self.scheduler.step()
            self._clock.advance(TURN_S)
            if not is_busy:
                due = self.scheduler.next_deadline()
                rest = min(now + MAX_REST_S, *waiting[-1:], *([] if due is None else [due]))
                self._clock.now = max(self._clock.now, rest)

    def _submit(self, kind: str, prompt_len: int, max_tokens: int) -> None:
        self._num_submitted = number = self._num_submitted + 1
        name, sampling = f"{kind}-{number}", SamplingParams(max_tokens)
        prompt = tuple(range(number * STRIDE, number * STRIDE + prompt_len))
        self.scheduler.receive(FromRouter(Admit(name, 0, prompt, (), sampling, 1e9, number)))
        self.scheduler.receive(FromRouter(Prefill(name, 0, prompt, (), sampling, "both", number)))

    def _sent(self, message: WorkerMessage) -> None:
        if isinstance(message, FirstToken):
            self._last[message.request_id] = self._clock.now
        elif isinstance(message, Tokens):
            self._clock.advance(self._times.row_s * len(message.events))
            for event in message.events:
                if event.request_id.startswith(STREAM):
                    self.num_tokens += len(event.token_ids)
                    self.gaps_s.append(self._clock.now - self._last[event.request_id])
                    self._last[event.request_id] = self._clock.now


class _TimedOutbox(ListOutbox):
    def __init__(self, on_message: Callable[[WorkerMessage], None]) -> None:
        super().__init__()
        self._on_message = on_message

    def to_router(self, message: WorkerMessage) -> None:
        self._on_message(message)
