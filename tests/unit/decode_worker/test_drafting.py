"""Drafts of a step: their number, their pages and their counts."""

import time
from collections.abc import Iterator, Sequence

import pytest

from tandem.decode_worker.config import DecodeConfig
from tandem.decode_worker.draft_depth import DraftDepth
from tandem.decode_worker.draft_policy import DraftPolicy
from tandem.decode_worker.drafting import Drafting, StepDrafts
from tandem.decode_worker.job import DecodeJob
from tandem.decode_worker.model_drafting import ModelDrafting
from tandem.decode_worker.scheduler import DecodeScheduler
from tandem.engine.base import EngineBase
from tandem.engine.draft_models.draft_maker import DraftMaker
from tandem.engine.grammar_compilers import CompiledGrammar
from tandem.engine.grammar_drafts import DraftMatcher
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.engine.token_sequence import TokenSequence
from tandem.messages import Drafted
from tandem.sampling_params import SamplingParams
from tandem.worker.forward_timer import ForwardTimer
from tests.fakes.clock import FakeClock
from tests.fakes.engine import FakeEngine
from tests.fakes.scripted_drafter import scripted
from tests.fakes.workers import ListOutbox

PAGE_SIZE = 4
MAX_DRAFTS = 6
DRAFTS = [11, 12, 13, 14, 15, 16]
GREEDY = SamplingParams(100)


@pytest.fixture(scope="module")
def engine() -> EngineBase:
    return FakeEngine(1, PAGE_SIZE)


class Jobs:
    def __init__(self, source: str, engine: EngineBase, num_pages: int) -> None:
        self.cache = CacheManager(num_pages, PAGE_SIZE)
        self.drafting: StepDrafts = Drafting(source, engine, self.cache)
        self.running: list[DecodeJob] = []

    def add(self, num_tokens: int, sampling: SamplingParams = GREEDY, num_outputs: int = 1) -> DecodeJob:
        """Adds a job of so many tokens, with pages for just these."""
        number = len(self.running)
        token_ids = [100 * number + i for i in range(num_tokens)]
        handle = self.cache.acquire_pages(token_ids, num_tokens, max_cached_len=0)
        assert handle is not None
        sequence = TokenSequence(
            token_ids, num_tokens - num_outputs, handle.page_ids, cached_len=num_tokens - 1, sampling=sampling
        )
        job = DecodeJob(f"r{number}", 0, number, 0, sequence, handle, 0, [], [], 0, 0, 0)
        self.running.append(job)
        return job

    def draft(self, *, may_grow: bool = True) -> list[Sequence[int]]:
        self.drafting.draft(self.running, self.running, may_grow=may_grow)
        return [job.sequence.draft_ids for job in self.running]


@pytest.fixture
def source() -> Iterator[str]:
    with scripted(lambda token_ids, most: DRAFTS[:most], MAX_DRAFTS) as path:
        yield path


def test_the_last_token_of_an_output_needs_no_draft(source: str, engine: EngineBase) -> None:
    jobs = Jobs(source, engine, 20)
    for num_outputs in (1, 3, 4, 5):
        jobs.add(9, SamplingParams(5), num_outputs)
    assert [len(drafts) for drafts in jobs.draft()] == [3, 1, 0, 0]


def test_a_drafter_that_proposes_too_many_passes_no_limit(engine: EngineBase) -> None:
    with scripted(lambda token_ids, most: DRAFTS, MAX_DRAFTS) as path:
        jobs = Jobs(path, engine, 20)
        jobs.add(9, SamplingParams(5), 2)
        assert [len(drafts) for drafts in jobs.draft()] == [2]


def test_drafts_end_before_a_stop_token(source: str, engine: EngineBase) -> None:
    jobs = Jobs(source, engine, 20)
    jobs.add(5, SamplingParams(100, stop_token_ids=(14, 12)))
    jobs.add(5, SamplingParams(100, stop_token_ids=(11,)))
    assert jobs.draft() == [[11], ()]


def test_drafts_take_free_pages_beyond_the_reserve_and_keep_them(source: str, engine: EngineBase) -> None:
    # Each of the two running requests leaves a page for its next token.
    jobs = Jobs(source, engine, 2 + 2 + 1)
    first, second = jobs.add(3), jobs.add(4)
    assert jobs.draft() == [DRAFTS[:5], ()]
    assert [len(job.handle.page_ids) for job in jobs.running] == [2, 1]
    # The first has a page for its next tokens, so only the second needs one in reserve.
    assert jobs.drafting.num_reserved(jobs.running) == 1
    jobs.running.remove(second)
    first.sequence.draft_ids = ()
    assert jobs.draft() == [DRAFTS] and jobs.drafting.num_reserved(jobs.running) == 0
    assert (len(first.handle.page_ids), jobs.cache.num_free_pages) == (3, 1)


def test_drafts_evict_nothing(source: str, engine: EngineBase) -> None:
    jobs = Jobs(source, engine, 6)
    cached = [7, 7, 7, 7] * 5
    handle = jobs.cache.acquire_pages(cached, len(cached), max_cached_len=0)
    assert handle is not None
    jobs.cache.cache_pages(handle, cached, len(cached))
    jobs.cache.release_pages(handle)
    jobs.add(2)
    assert (jobs.cache.num_free_pages, jobs.cache.num_cached_pages) == (0, 5)
    # As many as the page has room for.
    assert jobs.draft() == [DRAFTS[:2]]
    assert jobs.cache.num_cached_pages == 5


def test_drafts_take_no_pages_while_leases_wait(source: str, engine: EngineBase) -> None:
    jobs = Jobs(source, engine, 20)
    jobs.add(3)
    assert jobs.draft(may_grow=False) == [DRAFTS[:1]]


def test_a_model_without_grammars_drafts_nothing_within_one(source: str, engine: EngineBase) -> None:
    jobs = Jobs(source, engine, 20)
    job = jobs.add(3, SamplingParams(9, grammar="start: /a+/", stop_token_ids=(1,)))
    job.sequence.constraint = engine.constraint("start: /a+/")
    assert jobs.draft() == [()]


class CountedPolicy(DraftPolicy):
    """Counts renewals, and takes no drafts to pay."""

    num_renewed = 0

    def renewed(self, *, has_drafts: bool) -> None:
        self.num_renewed += 1

    def choose(
        self, proposals: Sequence[tuple[float, int]], num_requests: int, num_context: int, *, num_unknown: int = 0
    ) -> list[int]:
        return [0] * len(proposals)


class AllPay(CountedPolicy):
    """Takes all drafts."""

    def choose(
        self, proposals: Sequence[tuple[float, int]], num_requests: int, num_context: int, *, num_unknown: int = 0
    ) -> list[int]:
        return [num_drafts for _, num_drafts in proposals]


class Deepest(DraftDepth):
    def choose(self, requests: Sequence[tuple[float, int]], num_requests: int, num_context: int) -> int:
        return max((most for _, most in requests), default=0)


class Maker(DraftMaker):
    """Attributes: num_asked: sequences of each call."""

    def __init__(self) -> None:
        self.num_asked: list[int] = []

    def make(self, sequences: Sequence[TokenSequence], num_drafts: Sequence[int]) -> list[list[int]]:
        self.num_asked.append(len(sequences))
        return [DRAFTS[:count] for count in num_drafts]


@pytest.mark.parametrize("by_model", [False, True], ids=["lookup", "model"])
def test_requests_whose_grammar_takes_no_drafts_cost_no_time(source: str, by_model: bool) -> None:
    """Their steps overlap, and no draft is made in vain, while the grammar is compiled and once it has failed."""
    engine, timer = FakeEngine(1, PAGE_SIZE), ForwardTimer("cpu", FakeClock())
    engine.draft_maker = maker = Maker()
    compiled = CompiledGrammar("")
    engine.draft_matcher = lambda grammar, client="": DraftMatcher(  # type: ignore[method-assign]
        compiled, (), 1, lambda grammar: None
    )
    jobs, policy = Jobs(source, engine, 20), AllPay(timer, 0.0)
    jobs.drafting = (
        ModelDrafting("mtp", engine, jobs.cache, Deepest(timer, 0.0), FakeClock())
        if by_model
        else Drafting(source, engine, jobs.cache, policy)
    )
    free, bound = jobs.add(3), jobs.add(3)
    bound.sequence.constraint = engine.constraint("start: /a+/")
    # The first draft shows that a matcher is needed.
    for _ in range(2):
        assert [len(drafts) for drafts in jobs.draft()] == [4 if by_model else MAX_DRAFTS, 0]
    assert not by_model or maker.num_asked == [2, 1]
    assert jobs.drafting.awaits_tokens([free]) and not jobs.drafting.awaits_tokens([bound])
    compiled.matcher.set_exception(ValueError("a bad grammar"))
    for _ in range(2):
        jobs.draft()
    assert not by_model or maker.num_asked == [2, 1, 2, 1]
    assert not jobs.drafting.awaits_tokens([bound])


def test_counts_are_of_drafts_their_tokens_and_accepted_ones(source: str, engine: EngineBase) -> None:
    jobs = Jobs(source, engine, 20)
    for _ in range(2):
        job = jobs.add(3, SamplingParams(6))
    jobs.draft()
    job.sequence.num_pending = 1
    assert job.take_drafted([(11, None), (12, None), (99, None), (14, None), (5, None)]) == 2
    jobs.drafting.checked(job, 2)
    assert jobs.drafting.counts == (Drafted(source, 2, 8, 2, (0, 0, 1, 0, 0, 0, 0, 0)),)


def test_drafts_are_compared_with_new_tokens_alone(source: str, engine: EngineBase) -> None:
    jobs, policy = Jobs(source, engine, 20), CountedPolicy(ForwardTimer("cpu", FakeClock()), 0.0)
    jobs.drafting = Drafting(source, engine, jobs.cache, policy)
    job = jobs.add(3)
    for _ in range(2):
        # The second search of a step may come before a token is known.
        assert not jobs.drafting.awaits_tokens(jobs.running)
    assert policy.num_renewed == 0
    for token_id, num_renewed in ((DRAFTS[0], 0), (99, 1)):
        job.sequence.token_ids.append(token_id)
        assert not jobs.drafting.awaits_tokens(jobs.running)
        assert policy.num_renewed == num_renewed


@pytest.mark.parametrize(
    ("sampled", "output", "num_accepted"),
    [
        ([11, 12, 13, 9], [11, 12, 13, 9], 3),
        ([11, 12, 9, 8], [11, 12, 9], 2),
        ([9, 12, 13, 8], [9], 0),
        # No draft is a stop token.
        ([11, 50, 13, 9], [11, 50], 1),
    ],
)
def test_tokens_up_to_the_first_mismatch_count(
    sampled: list[int], output: list[int], num_accepted: int, source: str, engine: EngineBase
) -> None:
    job = Jobs(source, engine, 20).add(3, SamplingParams(100, stop_token_ids=(50,)))
    sequence = job.sequence
    sequence.draft_ids = DRAFTS[:3]
    sequence.extend(4)
    assert sequence.needs_logits and (sequence.device_len, sequence.length) == (6, 3)
    sequence.complete_extend()
    sequence.num_pending = 1
    assert job.take_drafted([(token_id, None) for token_id in sampled]) == num_accepted
    assert sequence.token_ids[3:] == job.unsent == output
    assert (job.num_drafted, job.num_accepted) == (3, num_accepted)
    assert sequence.cached_len == sequence.device_len == len(sequence.token_ids) - 1
    assert not sequence.draft_ids and job.finish_reason() == ("stop" if 50 in output else "")


def test_auto_drafts_nothing_where_the_engine_computes_no_drafts_and_others_are_refused() -> None:
    engine = FakeEngine(20, PAGE_SIZE)
    engine.max_drafts = 0

    def drafted(speculation: str) -> Sequence[Drafted]:
        cache = CacheManager(20, PAGE_SIZE)
        config = DecodeConfig(speculation=speculation)
        return DecodeScheduler(engine, cache, ListOutbox(), config, time.monotonic).own_stats().drafted

    assert drafted("auto") == drafted("off") == ()
    with pytest.raises(ValueError, match=r"^`speculation` ngram is for attention that computes several rows"):
        drafted("ngram")
    engine.max_drafts = 1
    assert drafted("auto") == drafted("ngram") == (Drafted("ngram", 0, 0, 0),)


def test_drafts_are_no_more_than_the_engine_computes(source: str) -> None:
    engine = FakeEngine(1, PAGE_SIZE)
    engine.max_drafts, engine.max_drafted_rows = 4, 3 + 6
    jobs = Jobs(source, engine, 40)
    for _ in range(3):
        jobs.add(9)
    assert jobs.drafting.awaits_tokens(jobs.running)
    assert [len(drafts) for drafts in jobs.draft()] == [4, 2, 0]
    # No step waits for tokens if it has no drafts anyway.
    engine.max_drafted_rows = 3
    assert not jobs.drafting.awaits_tokens(jobs.running)
    engine.max_drafts, engine.max_drafted_rows = 0, 9
    jobs = Jobs(source, engine, 40)
    jobs.add(9)
    assert jobs.draft() == [()] and not jobs.drafting.awaits_tokens(jobs.running)
