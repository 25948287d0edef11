"""Overlap of decode steps with speculation: steps without drafts overlap, and drafts follow known tokens."""

import math
import random
from collections.abc import Iterator, Sequence

import pytest

from tandem.both_worker.local_worker import LocalWorker
from tandem.decode_worker.config import AUTO_SPECULATION, DecodeConfig
from tandem.decode_worker.drafting import Drafting
from tandem.decode_worker.overlap_price import OverlapPrice
from tandem.decode_worker.pacing import StepPace
from tandem.messages import Finished, FirstToken, ForwardTimes, Tokens, WorkerMessage
from tandem.prefill_worker.config import PrefillConfig
from tandem.sampling_params import SamplingParams
from tests.fakes.clock import FakeClock
from tests.fakes.engine import FakeEngine, expected_tokens
from tests.fakes.scripted_drafter import ScriptedDrafter, scripted
from tests.fakes.workers import WorkerPair

PROMPT = [5, 3, 8, 1, 7, 2]
MAX_TOKENS = 20
OUTPUT = expected_tokens(PROMPT, MAX_TOKENS)
# A row costs little beside the step.
TIMES = ForwardTimes(step_s=0.01, request_s=1e-4)
FEW_DRAFTS = 3
MAX_TURNS = 5000


def right(token_ids: Sequence[int], most: int) -> Sequence[int]:
    return OUTPUT[len(token_ids) - len(PROMPT) :][: min(most, FEW_DRAFTS)]


def wrong(token_ids: Sequence[int], most: int) -> Sequence[int]:
    return [1] * most


class Price(OverlapPrice):
    """A given price, whatever steps take on the test's clock, which stands still."""

    def __init__(self, lost_s: float) -> None:
        super().__init__(StepPace(FakeClock()))
        self._lost_s = lost_s

    @property
    def allows_drafts(self) -> bool:
        return True

    @property
    def limit_s(self) -> float:
        return math.inf

    def plain_s(self, num_requests: int) -> float | None:
        return TIMES.step_s

    def seconds(self, device_s: float) -> float:
        return device_s + self._lost_s


class Speculating:
    """A request on an asynchronous engine with drafts by a script and the policy of `auto`."""

    def __init__(self, *, lost_s: float = 0.0, speculation: str = AUTO_SPECULATION) -> None:
        self.pair = WorkerPair(
            prefill={"num_pages": 64}, asynchronous=True, config=DecodeConfig(speculation=speculation), page_size=4
        )
        scheduler = self.pair.d.scheduler
        assert isinstance(scheduler._drafting, Drafting)
        if scheduler._drafting._policy is not None:
            scheduler._drafting._drafter = ScriptedDrafter
            scheduler._drafting._policy._price = Price(lost_s)
        scheduler._timer.times = lambda: TIMES  # type: ignore[method-assign]
        # Steps in flight when one runs, and each step's rows.
        self.in_flight: list[int] = []
        run_next = self.pair.d.engine.run_next

        def run() -> None:
            self.in_flight.append(self.pair.d.engine.num_launched)
            run_next()

        self.pair.d.engine.run_next = run  # type: ignore[method-assign]
        self.pair.submit("a", PROMPT, max_tokens=MAX_TOKENS)
        self.pair.run()
        self.pair.check_idle()
        assert self.pair.output("a") == OUTPUT
        self.rows = [lens[0] for _, lens in self.pair.d.engine.batches]


@pytest.fixture
def script(request: pytest.FixtureRequest) -> Iterator[None]:
    with scripted(request.param, FEW_DRAFTS):
        yield


@pytest.mark.parametrize("script", [lambda token_ids, most: ()], indirect=True)
@pytest.mark.usefixtures("script")
def test_steps_overlap_while_nothing_is_proposed() -> None:
    speculating = Speculating()
    assert speculating.rows == [1] * (MAX_TOKENS - 1)
    assert speculating.in_flight == [2] * (MAX_TOKENS - 2) + [1]


@pytest.mark.parametrize("script", [right], indirect=True)
@pytest.mark.usefixtures("script")
def test_steps_with_drafts_follow_known_tokens() -> None:
    speculating = Speculating()
    # Nothing is in flight before the first step, nor when a step has drafts.
    assert speculating.rows == [4, 4, 4, 4, 3]
    assert speculating.in_flight == [1] * 5


@pytest.mark.parametrize("script", [wrong], indirect=True)
@pytest.mark.usefixtures("script")
def test_steps_overlap_again_once_drafts_are_wrong() -> None:
    speculating = Speculating(lost_s=0.3 * TIMES.step_s)
    assert speculating.rows[0] > 1 and speculating.rows[-5:] == [1] * 5
    assert speculating.in_flight[0] == 1 and speculating.in_flight[-5:] == [2] * 4 + [1]


@pytest.mark.parametrize("script", [right], indirect=True)
@pytest.mark.usefixtures("script")
def test_lost_overlap_may_cost_more_than_drafts_gain() -> None:
    speculating = Speculating(lost_s=5 * TIMES.step_s)
    assert speculating.rows == [1] * (MAX_TOKENS - 1)
    assert speculating.in_flight == [2] * (MAX_TOKENS - 2) + [1]


def test_without_a_policy_no_step_overlaps() -> None:
    with scripted(lambda token_ids, most: (), FEW_DRAFTS) as source:
        speculating = Speculating(speculation=source)
    assert speculating.in_flight == [1] * (MAX_TOKENS - 1)


@pytest.mark.parametrize("min_mixed", [1, 2**31], ids=["mixed steps", "apart"])
@pytest.mark.parametrize("seed", range(12))
def test_random_drafts_beside_prompts_change_no_token(seed: int, min_mixed: int) -> None:
    """On a worker of role both, whose steps overlap unless they have drafts."""
    rng = random.Random(seed)
    prompts = {f"r{number}": rng.choices(range(900), k=rng.randint(1, 20)) for number in range(10)}
    outputs = {name: expected_tokens(prompt, rng.randint(1, 30)) for name, prompt in prompts.items()}
    found: dict[str, list[int]] = {name: [] for name in prompts}
    ended: set[str] = set()

    def guess(token_ids: Sequence[int], most: int) -> Sequence[int]:
        drafts = expected_tokens(token_ids, rng.randint(0, most))
        return [draft if rng.random() < 0.8 else 7 for draft in drafts]

    def take(message: WorkerMessage) -> None:
        if isinstance(message, FirstToken):
            found[message.request_id].append(message.token_id)
            ended.update([message.request_id] if message.finish_reason else [])
        elif isinstance(message, Tokens):
            for event in message.events:
                output = found[event.request_id]
                output += event.token_ids[len(output) - event.index :]
        elif isinstance(message, Finished):
            ended.add(message.request_id)

    engine = FakeEngine(200, 4, asynchronous=True, min_mixed=min_mixed)
    worker = LocalWorker(engine, PrefillConfig(8), DecodeConfig(speculation=AUTO_SPECULATION), take)
    scheduler = worker.scheduler._decode
    assert isinstance(scheduler._drafting, Drafting)
    scheduler._drafting._drafter = ScriptedDrafter
    assert scheduler._drafting._policy is not None
    scheduler._drafting._policy._price = Price(0.0)
    scheduler._timer.times = lambda: TIMES  # type: ignore[method-assign]
    waiting = list(prompts)
    with scripted(guess, FEW_DRAFTS):
        for _ in range(MAX_TURNS):
            if len(ended) == len(prompts):
                break
            if waiting and rng.random() < 0.3:
                name = waiting.pop()
                sampling = SamplingParams(len(outputs[name]) + 5, stop_token_ids=(outputs[name][-1],))
                outputs[name] = outputs[name][: outputs[name].index(outputs[name][-1]) + 1]
                worker.submit(name, prompts[name], sampling)
            if engine.num_launched and rng.random() < 0.5:
                engine.run_next()
            worker.scheduler.step()
            assert worker.scheduler.check_integrity() == ""
    assert found == outputs
    # A step too many may be in flight.
    while engine.num_launched:
        engine.run_next()
    worker.scheduler.step()
    stats = worker.scheduler.stats()
    assert sum(one.num_accepted for one in stats.drafted) > 0
    assert (stats.num_running, stats.num_locked_pages) == (0, 0)
