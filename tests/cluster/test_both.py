"""Role `both`: one worker prefills and decodes; no page is shipped."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tandem.v1 import inference_pb2 as pb
from tests.cluster.conftest import Oracle, ServedCluster, random_ids

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 100, 150, 200)


def test_greedy_matches_transformers(tiny_both: ServedCluster, tiny_oracle: Oracle) -> None:
    rng = random.Random(1)
    stem = random_ids(rng, 90)
    prompts = [random_ids(rng, n) for n in LENGTHS] + [stem + random_ids(rng, n) for n in (10, 30, 50)]
    expected = [tiny_oracle.generate(prompt, 24) for prompt in prompts]
    for prompt, output_ids in zip(prompts, expected, strict=True):
        assert tiny_both.complete(prompt).token_ids == output_ids
    with ThreadPoolExecutor(6) as pool:
        for answer, output_ids in zip(pool.map(tiny_both.complete, prompts), expected, strict=True):
            assert answer.token_ids == output_ids
            assert answer.text == tiny_oracle.decode(output_ids)


def test_no_page_is_shipped(tiny_both: ServedCluster) -> None:
    prompt_ids = random_ids(random.Random(2), 100)
    before = tiny_both.integrity()["both-0"].stats
    last = tiny_both.complete(prompt_ids, max_tokens=10, ignore_eos=True).last
    assert last.finish_reason == pb.FINISH_REASON_LENGTH
    assert last.handover.prefill_worker == last.handover.decode_worker == "both-0"
    assert (last.handover.pages_computed, last.handover.pages_shipped) == (7, 0)
    again = tiny_both.complete(prompt_ids, max_tokens=10, ignore_eos=True).last
    assert (again.handover.prefill_cached_tokens, again.usage.cached_tokens) == (96, 96)
    after = tiny_both.integrity()["both-0"].stats
    assert after.prompt_tokens_computed == before.prompt_tokens_computed + 100 + 4
    assert after.output_tokens_computed == before.output_tokens_computed + 9 + 9
    assert not after.shipped


def test_first_token_may_end_the_output(tiny_both: ServedCluster, tiny_oracle: Oracle) -> None:
    prompt_ids = random_ids(random.Random(3), 20)
    answer = tiny_both.complete(prompt_ids, max_tokens=1, ignore_eos=True)
    assert answer.token_ids == tiny_oracle.generate(prompt_ids, 1, ignore_eos=True)
    assert answer.last.finish_reason == pb.FINISH_REASON_LENGTH


def test_cancellations_leave_nothing_behind(tiny_both: ServedCluster) -> None:
    def cancel(number: int) -> None:
        rng = random.Random(number)
        prompt_ids = random_ids(rng, rng.randint(1, 300))
        responses = tiny_both.client.generate(tiny_both.request(prompt_ids, max_tokens=200, ignore_eos=True))
        for _ in range(rng.randint(1, 10)):
            next(responses)
        responses.close()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(cancel, range(20)))
    tiny_both.wait_clean()


def test_requests_beyond_the_pool_are_served(tiny_both: ServedCluster, tiny_oracle: Oracle) -> None:
    """Neither prefill nor decode may starve the other."""
    rng = random.Random(4)
    prompts = [random_ids(rng, rng.randint(20, 150)) for _ in range(10)]
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda p: tiny_both.complete(p, max_tokens=300, ignore_eos=True), prompts))
    for prompt_ids, answer in zip(prompts, answers, strict=True):
        assert len(answer.token_ids) == 300
        assert tiny_oracle.confirms(prompt_ids, answer.token_ids)
    print("attempts", [answer.last.handover.attempts for answer in answers])
    assert max(answer.last.handover.attempts for answer in answers) > 1


def test_embeddings_beside_decoding(tiny_both: ServedCluster, tiny_oracle: Oracle) -> None:
    rng = random.Random(7)
    prompts = [random_ids(rng, length) for length in LENGTHS]
    streams = [random_ids(rng, rng.randint(1, 200)) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(tiny_both.complete, prompt) for prompt in streams]
        responses = tiny_both.client.embed(prompts, timeout_s=60.0)
        for prompt, answer in zip(streams, answers, strict=True):
            assert answer.result().token_ids == tiny_oracle.generate(prompt, 24)
    for prompt, response in zip(prompts, responses, strict=True):
        assert list(response.values) == pytest.approx(tiny_oracle.embedding(prompt), abs=1e-4)
