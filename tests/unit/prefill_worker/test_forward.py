"""Results of a completed forward pass for its jobs."""

from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.engine.token_sequence import TokenSequence
from tandem.messages import Prefill
from tandem.prefill_worker.forward import PromptChunks
from tandem.prefill_worker.job import PrefillJob
from tandem.sampling_params import SamplingParams
from tests.fakes.engine import FakeEngine, expected_tokens

NUM_PAGES, PAGE_SIZE = 16, 4


def new_job(cache: CacheManager, request_id: str, prompt: list[int], max_tokens: int = 5) -> PrefillJob:
    handle = cache.acquire_pages(prompt, len(prompt), max_cached_len=0)
    assert handle is not None
    sampling = SamplingParams(max_tokens)
    sequence = TokenSequence(prompt, len(prompt), handle.page_ids, sampling=sampling)
    return PrefillJob(Prefill(request_id, 0, tuple(prompt), (), sampling, "d"), sequence, handle, 1)


def launch(engine: FakeEngine, *jobs: tuple[PrefillJob, int]) -> PromptChunks:
    """Args: jobs: jobs with their number of tokens to compute."""
    chunks = PromptChunks(jobs, lambda chunks: None, lambda chunks: None)
    engine.launch(prompts=chunks)
    return chunks


def test_jobs_get_results_in_order_except_ended_ones() -> None:
    engine, cache = FakeEngine(NUM_PAGES, PAGE_SIZE), CacheManager(NUM_PAGES, PAGE_SIZE)
    prompts = {name: [number, 50, 51, 52, 53] for number, name in enumerate("abcd")}
    a, b, c, d = (new_job(cache, name, prompt) for name, prompt in prompts.items())
    launched = launch(engine, (a, 5), (b, 5), (c, 5), (d, 2))
    b.handle = None
    told = launched.collect()
    assert next(told) is a
    assert a.first_token == expected_tokens(prompts["a"], 1)[0]
    assert [job.first_token for job in (b, c, d)] == [None] * 3
    # The caller may end a later job.
    c.handle = None
    assert list(told) == [d]
    assert [job.first_token for job in (b, c, d)] == [None] * 3


def test_first_tokens_of_a_forward_share_their_time() -> None:
    engine, cache = FakeEngine(NUM_PAGES, PAGE_SIZE), CacheManager(NUM_PAGES, PAGE_SIZE)
    jobs = [new_job(cache, name, [number, 7]) for number, name in enumerate("ab")]
    told = list(launch(engine, *((job, 2) for job in jobs)).collect())
    assert told == jobs
    assert jobs[0].first_token_time_ns == jobs[1].first_token_time_ns > 0


def test_handed_over_job_continues_after_the_forward() -> None:
    engine, cache = FakeEngine(NUM_PAGES, PAGE_SIZE), CacheManager(NUM_PAGES, PAGE_SIZE)
    whole, last, begun = new_job(cache, "a", [1, 2]), new_job(cache, "b", [3, 4], 1), new_job(cache, "c", [5, 6])
    assert launch(engine, (whole, 2), (last, 2), (begun, 1)).handed_over == [whole]
