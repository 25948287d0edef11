"""A step's tokens fit the prompts that are in it, not the head of the queue."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from tandem.both_worker.step_budget import FILLED, MIN_TOKENS, StepBudget
from tandem.both_worker.worker import make_both_scheduler
from tandem.decode_worker.config import DecodeConfig
from tandem.engine.batch import Batch
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.engine.mixed_graphs import MixedSizes
from tandem.engine.mixed_sizes import NUM_PROMPT_TOKENS
from tandem.engine.output import ForwardOutput
from tandem.linear_fit import LinearFit
from tandem.messages import Admit, Failed, FirstToken, Prefill, Tokens
from tandem.prefill_worker.budget import PromptRest, WholeChunks
from tandem.prefill_worker.config import PrefillConfig
from tandem.sampling_params import SamplingParams
from tandem.worker.events import FromRouter
from tandem.worker.forward_timer import ForwardTimer
from tests.fakes.clock import FakeClock
from tests.fakes.engine import FakeEngine, expected_tokens
from tests.fakes.workers import ListOutbox

OBJECTIVE_S = 0.025
CHUNK_SIZE, PAGE_SIZE, NUM_PAGES = 2048, 16, 2048
# Attention takes long, so that the prefix behind a chunk matters.
STEP_S, PROMPTS_S, TOKEN_S, ATTENDED_S = 0.004, 0.003, 1e-5, 2e-8
PREFIX = tuple((11 * i) % 900 for i in range(4000))


def chunk_s(size: int, num_cached: int) -> float:
    return TOKEN_S * size + ATTENDED_S * (size * num_cached + size * size / 2)


def learn(timer: ForwardTimer, clock: FakeClock) -> None:
    """Show the timer steps of MixingEngine, with up to 1,024 prompt tokens."""
    for number in range(256):
        size, num_cached = (0, 128, 256, 1024)[number % 4], number % 3 * 4000
        if size:
            timer.prompts_launched(clock.now, size, size * num_cached + size * size // 2)
            timer.prompts_ended(is_mixed=True)
        timer.step_launched(1, 0)
        clock.advance(STEP_S + (PROMPTS_S + chunk_s(size, num_cached) if size else 0.0))
        timer.step_ended()


class MixingEngine(FakeEngine):
    """Attributes: steps: (computed tokens, cached tokens) of each prompt, for each step with prompts."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(NUM_PAGES, PAGE_SIZE, min_mixed=1)
        self.pool.device = torch.device("cuda")
        self.steps: list[list[tuple[int, int]]] = []
        self._clock = clock

    def forward(self, batch: Batch, meanwhile: Callable[[], None] | None = None) -> ForwardOutput:
        prompts = [(s.extend_len, s.cached_len) for s in batch.prompts]
        seconds = STEP_S if batch.decoded else 0.0
        if prompts:
            seconds += PROMPTS_S + sum(chunk_s(*prompt) for prompt in prompts)
        if prompts and batch.decoded:
            self.steps.append(prompts)
        self._clock.advance(seconds)
        return super().forward(batch, meanwhile)


class Worker:
    """A both worker with links, but no peer.

    Attributes:
        gaps: times between the tokens of the stream that it decodes.
    """

    def __init__(self) -> None:
        self.clock, self.outbox = FakeClock(0.0), ListOutbox()
        self.engine, cache = (
            MixingEngine(self.clock),
            CacheManager(NUM_PAGES, PAGE_SIZE, max_request_pages=NUM_PAGES // 2),
        )
        self.scheduler = make_both_scheduler(
            "both",
            self.engine,
            cache,
            self.outbox,
            PrefillConfig(CHUNK_SIZE),
            DecodeConfig(),
            itl_objective_s=OBJECTIVE_S,
            has_links=True,
            clock=self.clock,
        )
        self.gaps: list[float] = []
        self.tokens: dict[str, list[int]] = {}
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._last_token_at: float | None = None

    def submit(self, name: str, prompt: Sequence[int], max_tokens: int = 2, decode_worker: str = "both") -> None:
        sampling = SamplingParams(max_tokens)
        self.tokens[name], self._prompts[name] = [], tuple(prompt)
        self.scheduler.receive(FromRouter(Admit(name, 0, self._prompts[name], (), sampling, 1e9)))
        self.scheduler.receive(FromRouter(Prefill(name, 0, self._prompts[name], (), sampling, decode_worker)))

    def step(self) -> bool:
        worked = self.scheduler.step()
        messages, self.outbox.router = self.outbox.router, []
        for message in messages:
            if isinstance(message, FirstToken | Failed):
                self.outbox.router.append(message)
            if isinstance(message, Tokens):
                self._take(message)
        return worked

    def _take(self, message: Tokens) -> None:
        for event in message.events:
            self.tokens[event.request_id] += event.token_ids
            if event.request_id == "stream":
                if self._last_token_at is not None:
                    self.gaps.append(self.clock.now - self._last_token_at)
                self._last_token_at = self.clock.now

    def restart_gaps(self) -> None:
        self.gaps.clear()
        self._last_token_at = None

    def finish(self, *names: str) -> None:
        while any(len(self.tokens[name]) < 2 for name in names):
            assert self.step()
            assert self.scheduler.check_integrity() == ""
        for name in names:
            assert self.tokens[name] == expected_tokens(self._prompts[name], 2)


@pytest.fixture
def worker() -> Worker:
    """A worker that has cached PREFIX, decodes a stream and knows its forward times."""
    worker = Worker()
    worker.submit("prefix", PREFIX)
    worker.finish("prefix")
    worker.submit("stream", [1, 2, 3], 1000)
    while len(worker.tokens["stream"]) < 4:
        worker.step()
    learn(worker.scheduler._timer, worker.clock)
    worker.engine.steps.clear()
    worker.restart_gaps()
    return worker


LEFT_S = FILLED * OBJECTIVE_S - STEP_S - PROMPTS_S


def test_prompt_behind_a_refused_one_gets_the_tokens_for_its_own_prefix(worker: Worker) -> None:
    # The head of the queue is bound for a worker without a link.
    worker.submit("refused", range(3000), decode_worker="absent")
    worker.submit("b", [*PREFIX, *range(500, 900)])
    worker.finish("b")
    assert [m.request_id for m in worker.outbox.of(Failed)] == ["refused"]
    assert worker.engine.steps[0] == [(pytest.approx(LEFT_S / 9.2e-5, rel=0.1), len(PREFIX))]
    assert max(worker.gaps) <= OBJECTIVE_S


def test_prompt_behind_a_short_rest_gets_the_tokens_for_its_own_prefix(worker: Worker) -> None:
    worker.submit("a", range(800, 900))
    worker.submit("b", [*PREFIX, *range(500, 900)])
    worker.finish("a", "b")
    (short, _), (size, num_cached) = worker.engine.steps[0]
    assert (short, num_cached) == (100, len(PREFIX))
    assert chunk_s(100, 0) + chunk_s(size, num_cached) == pytest.approx(LEFT_S, rel=0.1)
    assert max(worker.gaps) <= OBJECTIVE_S


def test_short_prompts_do_not_attend_to_each_other(worker: Worker) -> None:
    names = [f"p{i}" for i in range(7)]
    for number, name in enumerate(names):
        worker.submit(name, [700 + number, *range(1, 150)])
    worker.finish(*names)
    # One prompt would get 840 tokens.
    assert worker.engine.steps[0] == [(150, 0)] * 7
    assert max(worker.gaps) <= OBJECTIVE_S


def test_prompts_without_prefix_fill_a_step_begun_by_one_with_a_long_prefix(worker: Worker) -> None:
    worker.submit("a", [*PREFIX, *range(500, 550)])
    worker.submit("b", range(700, 900))
    worker.submit("c", range(600, 800))
    worker.finish("a", "b", "c")
    # By the first one's prefix, 170 tokens would fill the step.
    assert worker.engine.steps[0] == [(50, len(PREFIX)), (200, 0), (200, 0)]
    assert max(worker.gaps) <= OBJECTIVE_S


def budget_of(padding: MixedSizes | None = None) -> StepBudget:
    clock = FakeClock()
    timer = ForwardTimer("cuda", clock)
    learn(timer, clock)
    return StepBudget(0.05, CHUNK_SIZE, timer, padding)


def prompts(*rests: tuple[int, int]) -> Iterator[PromptRest]:
    return (PromptRest(*rest) for rest in rests)


def test_no_prompt_is_taken_without_room_for_it() -> None:
    taken = prompts((0, 100), (4000, 3000), (0, 10))
    sizes = budget_of().fit(taken)
    assert sizes[0] == 100 and 100 < sizes[1] < 3000
    assert list(taken) == [(0, 10)]
    whole = prompts((0, CHUNK_SIZE), (0, 10))
    assert WholeChunks(CHUNK_SIZE).fit(whole) == [CHUNK_SIZE]
    assert list(whole) == [(0, 10)]
    assert WholeChunks(100).fit(prompts((0, 30), (0, 80), (0, 5))) == [30, 70]


def test_minimum_is_shared_by_the_prompts_of_a_step() -> None:
    budget = budget_of()
    # The second prompt's prefix leaves no time, beyond the minimum for all prompts.
    assert budget.fit(prompts((0, 100), (10**7, 500))) == [100, MIN_TOKENS - 100]
    assert budget.fit(prompts((0, 200), (10**7, 500))) == [200, 0]


@pytest.mark.parametrize(
    ("rests", "expected"),
    [
        # The last prompt is computed to its end, with padding up to 768.
        ([(0, 500), (0, 80)], [500, 80]),
        # Behind this prefix there is no time for padding: the chunks are cut to 512.
        ([(3100, 500), (0, 20)], [500, 12]),
        # The first one's end is padded if another prompt's tokens do not fit the padding.
        ([(0, 540), (10**7, 500)], [540, 0]),
        ([(0, 10), (0, 20)], [10, 20]),
    ],
)
def test_padding_counts_all_prompts_of_a_step(rests: list[tuple[int, int]], expected: list[int]) -> None:
    assert budget_of(MixedSizes.grid((64,), NUM_PROMPT_TOKENS)).fit(prompts(*rests)) == expected


def test_a_step_without_prompts_solves_no_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = budget_of()
    num_solved = 0

    def solve(fit: LinearFit) -> None:
        nonlocal num_solved
        num_solved += 1

    monkeypatch.setattr(LinearFit, "factors", property(lambda fit: solve(fit) or (0.01,) * 6))
    assert budget.fit(prompts()) == [] and num_solved == 0
    assert budget.fit(prompts((0, 10))) == [10] and num_solved == 1
