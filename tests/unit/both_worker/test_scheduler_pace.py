"""Timing of mixed steps: late, to include new requests, but in time for the device."""

import random
import sys
from collections.abc import Callable

import pytest

from tandem.both_worker.worker import make_both_scheduler
from tandem.decode_worker.config import DecodeConfig
from tandem.engine.batch import Batch
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.engine.output import ForwardOutput
from tandem.messages import Abort, Admit, FirstToken, Prefill, Tokens
from tandem.prefill_worker.config import PrefillConfig
from tandem.prefill_worker.scheduler import POLL_S
from tandem.sampling_params import SamplingParams
from tandem.worker.events import FromRouter
from tests.fakes.clock import FakeClock
from tests.fakes.engine import FakeEngine, FakeForwardOutput, expected_tokens
from tests.fakes.workers import ListOutbox

STEP_S, TOKEN_S = 0.010, 0.001
CHUNK_SIZE = 16
# Mixed steps for the timer to learn from.
NUM_LEARNED_FROM = 24
MIXED_S = STEP_S + CHUNK_SIZE * TOKEN_S
GRAPH_LAUNCH_S, EAGER_LAUNCH_S = 0.0005, 0.018
PROMPT = tuple(range(30))
LONG_PROMPT = tuple((7 * i) % 900 for i in range(800))


class TimedEngine(FakeEngine):
    """A device that computes beside the host.

    Attributes:
        idle_s: idle time of the device before each forward pass.
        early_s: lead of each launch before the previous end.
        waited_s: the host's waits for forward passes.
    """

    def __init__(self, clock: FakeClock, launch_s: float) -> None:
        super().__init__(512, 4, asynchronous=True, min_mixed=1)
        self.idle_s: list[float] = []
        self.early_s: list[float] = []
        self.waited_s: list[float] = []
        self._clock = clock
        self._launch_s = launch_s
        self._ends: dict[FakeForwardOutput, float] = {}
        self._durations: dict[FakeForwardOutput, float] = {}
        self._last_end = clock.now

    def forward(self, batch: Batch, meanwhile: Callable[[], None] | None = None) -> ForwardOutput:
        began = max(self._clock.now, self._last_end)
        self.idle_s.append(began - self._last_end)
        self.early_s.append(self._last_end - self._clock.now)
        self.advance(self._launch_s if batch.mode == "mixed" else GRAPH_LAUNCH_S)
        output = super().forward(batch, meanwhile)
        assert isinstance(output, FakeForwardOutput)
        self._last_end = max(began + STEP_S + TOKEN_S * batch.num_prompt_tokens(), self._clock.now)
        self._ends[output], self._durations[output] = self._last_end, self._last_end - began
        return output

    def advance(self, seconds: float) -> None:
        self._clock.advance(seconds)
        while self._queue and self._ends[self._queue[0]] <= self._clock.now:
            self.run_next()

    def run_until(self, output: FakeForwardOutput) -> None:
        if not output.done():
            self.waited_s.append(self._ends[output] - self._clock.now)
            self.advance(self._ends[output] - self._clock.now)

    def duration_of(self, output: FakeForwardOutput) -> float:
        return self._durations[output]


class Worker:
    def __init__(self, launch_s: float) -> None:
        self.clock, self.outbox = FakeClock(), ListOutbox()
        self.engine = TimedEngine(self.clock, launch_s)
        cache = CacheManager(512, 4)
        prefill, decode = PrefillConfig(CHUNK_SIZE), DecodeConfig()
        self.scheduler = make_both_scheduler("both", self.engine, cache, self.outbox, prefill, decode, clock=self.clock)

    def submit(self, name: str, prompt: tuple[int, ...], max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens)
        self.scheduler.receive(FromRouter(Admit(name, 0, prompt, (), sampling, 1e9)))
        self.scheduler.receive(FromRouter(Prefill(name, 0, prompt, (), sampling, "both")))

    def turn(self) -> None:
        if not self.scheduler.step():
            due = self.scheduler.next_deadline()
            self.engine.advance(0.1 if due is None else max(1e-5, due - self.clock.now))

    def output(self, name: str) -> list[int]:
        events = [e for m in self.outbox.of(Tokens) for e in m.events if e.request_id == name]
        return [token_id for e in events for token_id in e.token_ids]


def serve(launch_s: float) -> tuple[Worker, slice]:
    """Decode one request beside a long prompt; return the prompt's forward passes after learning."""
    worker = Worker(launch_s)
    worker.submit("a", PROMPT[:8], 100)
    while len(worker.output("a")) < 5:
        worker.turn()
    num_before = len(worker.engine.batches)
    worker.submit("b", LONG_PROMPT, 3)
    while len(worker.output("b")) < 3:
        worker.turn()
    modes = [mode for mode, _ in worker.engine.batches]
    num_mixed = modes.count("mixed")
    assert num_mixed >= len(LONG_PROMPT) // CHUNK_SIZE
    while len(worker.output("a")) < 100:
        worker.turn()
    assert worker.output("a") == expected_tokens(PROMPT[:8], 100)
    assert worker.output("b") == expected_tokens(LONG_PROMPT, 3)
    # A step with its prompt follows the last one and waits for it.
    return worker, slice(num_before + NUM_LEARNED_FROM, num_before + num_mixed)


def test_mixed_steps_are_composed_just_before_the_running_one_ends() -> None:
    worker, mixed = serve(GRAPH_LAUNCH_S)
    assert worker.engine.idle_s[mixed] == [0.0] * len(worker.engine.idle_s[mixed])
    assert max(worker.engine.early_s[mixed]) < 0.1 * MIXED_S
    # The engine thread does not wait meanwhile, so handovers and messages continue.
    assert max(worker.engine.waited_s[-NUM_LEARNED_FROM:]) < 0.1 * MIXED_S


def test_mixed_steps_launched_kernel_by_kernel_are_composed_early() -> None:
    worker, mixed = serve(EAGER_LAUNCH_S)
    assert worker.engine.idle_s[mixed] == [0.0] * len(worker.engine.idle_s[mixed])
    assert min(worker.engine.early_s[mixed]) >= EAGER_LAUNCH_S
    assert max(worker.engine.early_s[mixed]) < EAGER_LAUNCH_S + 0.25 * MIXED_S


def test_request_arriving_during_a_mixed_step_joins_the_next() -> None:
    worker = Worker(GRAPH_LAUNCH_S)
    worker.submit("a", PROMPT[:8], 60)
    worker.submit("b", LONG_PROMPT, 3)
    while [mode for mode, _ in worker.engine.batches].count("mixed") < NUM_LEARNED_FROM:
        worker.turn()
    # The prompt leaves, and another comes late in the running step.
    while worker.engine._last_end - worker.clock.now > 0.5 * STEP_S:
        worker.engine.advance(1e-4)
    num_before = len(worker.engine.batches)
    worker.scheduler.receive(FromRouter(Abort("b", 0)))
    prompt = tuple(range(500, 505))
    worker.submit("c", prompt, 3)
    while len(worker.engine.batches) == num_before:
        worker.turn()
    assert worker.engine.batches[num_before] == ("mixed", [1, 5])
    while len(worker.output("c")) < 3:
        worker.turn()
    assert worker.output("c") == expected_tokens(prompt, 3)


def test_prompt_waiting_for_pages_does_not_delay_decode_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not a multiple of the poll interval.
    monkeypatch.setattr(sys.modules[__name__], "STEP_S", 0.0104)
    worker = Worker(EAGER_LAUNCH_S)
    worker.submit("a", PROMPT[:8], 100)
    while len(worker.output("a")) < 20:
        worker.turn()
    # It does not fit beside the other, so no step has prompts, which would start earlier.
    worker.submit("b", tuple(range(2040)), 3)
    num_before = len(worker.engine.batches)
    while len(worker.output("a")) < 90:
        worker.turn()
    assert {mode for mode, _ in worker.engine.batches[num_before:]} == {"decode"}
    assert worker.engine.idle_s[num_before:] == [0.0] * (len(worker.engine.batches) - num_before)


@pytest.mark.parametrize("mixed", [True, False])
def test_nobody_polls_for_a_forward_pass_that_cannot_have_ended(monkeypatch: pytest.MonkeyPatch, mixed: bool) -> None:
    monkeypatch.setattr(TimedEngine, "mixes", lambda *args: mixed)
    worker = Worker(GRAPH_LAUNCH_S)
    worker.submit("a", PROMPT[:8], 200)
    worker.submit("b", LONG_PROMPT, 3)
    num_turns = []
    while len(worker.output("b")) < 3:
        num_before = len(worker.engine.batches)
        turns = 0
        while len(worker.engine.batches) == num_before:
            worker.turn()
            turns += 1
        num_turns.append(turns)
    # A poll each 0.2 ms would take 130 turns for a mixed step. The last tenth is polled.
    assert sum(num_turns[NUM_LEARNED_FROM:]) / len(num_turns[NUM_LEARNED_FROM:]) < 20
    assert worker.output("b") == expected_tokens(LONG_PROMPT, 3)


@pytest.mark.parametrize("mixed", [True, False])
def test_end_of_a_forward_pass_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch, mixed: bool) -> None:
    """A request whose prompt ends joins the next step, for which the device waits."""
    monkeypatch.setattr(TimedEngine, "mixes", lambda *args: mixed)
    worker, rng = Worker(GRAPH_LAUNCH_S), random.Random(4)
    worker.submit("a", PROMPT[:8], 400)
    worker.submit("b", LONG_PROMPT, 3)
    while len(worker.output("b")) < 3:
        worker.turn()
    num_before = len(worker.engine.batches)
    names = [f"s{i}" for i in range(40)]
    for name in names:
        worker.submit(name, tuple(rng.randrange(900) for _ in range(rng.randint(1, 2 * CHUNK_SIZE))), 2)
        while len(worker.output(name)) < 2:
            worker.turn()
    late = [idle_s for idle_s in worker.engine.idle_s[num_before:] if idle_s > 0.0]
    assert len(late) >= len(names) / 2
    # The poll interval, and the shortest turn.
    assert max(late) <= POLL_S + 2e-5


def test_prefill_is_polled_for_near_its_end_only() -> None:
    worker = Worker(GRAPH_LAUNCH_S)
    for number in range(20):
        worker.submit(f"a{number}", tuple(range(20 * number, 20 * number + 14)), 1)
        num_first, num_turns = len(worker.outbox.of(FirstToken)), 0
        while len(worker.outbox.of(FirstToken)) == num_first:
            worker.turn()
            num_turns += 1
        noticed = worker.clock.now - worker.engine._last_end
        assert noticed <= POLL_S + 2e-5
    # A pass takes 24 ms: 120 polls.
    assert num_turns < 30
    # A message is answered while the next pass runs.
    worker.submit("b", tuple(range(850, 864)), 1)
    worker.turn()
    assert not worker.scheduler.step()
    deadline = worker.scheduler.next_deadline()
    assert deadline is not None and deadline > worker.clock.now + 0.018
    worker.scheduler.receive(FromRouter(Abort("b", 0)))
    worker.submit("c", tuple(range(830, 840)), 1)
    worker.turn()
    assert worker.engine.num_launched == 2
