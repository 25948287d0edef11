"""Greedy decoding across the handover matches transformers."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tandem.v1 import inference_pb2 as pb
from tests.cluster.conftest import CHUNK_SIZE, EOS_TOKEN_IDS, Answer, Oracle, ServedCluster, random_ids

MAX_TOKENS = 24
PAGE_SIZE = 16
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129, 143, 144, 145, 199, 200)


@dataclass
class Case:
    prompt_ids: list[int]
    output_ids: list[int]


@pytest.fixture(scope="module")
def cases(tiny_oracle: Oracle) -> list[Case]:
    rng = random.Random(1)
    prompts = [random_ids(rng, n) for n in (*LENGTHS, *(rng.randint(1, 200) for _ in range(10)))]
    stem = random_ids(rng, 100)
    prompts += [stem[:n] + random_ids(rng, 40) for n in (8, 16, 33, 64, 64, 90, 96, 100)]
    return [Case(prompt, tiny_oracle.generate(prompt, MAX_TOKENS)) for prompt in prompts]


def check(case: Case, answer: Answer, oracle: Oracle) -> None:
    assert answer.token_ids == case.output_ids
    assert answer.text == oracle.decode(case.output_ids)
    ended = case.output_ids[-1] in EOS_TOKEN_IDS
    last = answer.last
    assert last.finish_reason == (pb.FINISH_REASON_STOP if ended else pb.FINISH_REASON_LENGTH)
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(case.prompt_ids), len(case.output_ids))
    assert last.usage.cached_tokens == last.handover.prefill_cached_tokens
    assert last.handover.attempts == 1


def test_sequential_requests(tiny_pd: ServedCluster, tiny_oracle: Oracle, cases: list[Case]) -> None:
    ends = [case.output_ids[-1] in EOS_TOKEN_IDS for case in cases]
    assert len(cases) > 40 and any(ends) and not all(ends)
    for case in cases:
        check(case, tiny_pd.complete(case.prompt_ids, max_tokens=MAX_TOKENS), tiny_oracle)


def test_eight_at_once(tiny_pd: ServedCluster, tiny_oracle: Oracle, cases: list[Case]) -> None:
    shuffled = random.Random(2).sample(cases, len(cases))
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda case: tiny_pd.complete(case.prompt_ids, max_tokens=MAX_TOKENS), shuffled)
        for case, answer in zip(shuffled, answers, strict=True):
            check(case, answer, tiny_oracle)


@pytest.mark.parametrize("num_tokens", [96, 97, 111, 112])
def test_repeated_prompt_is_cached_on_both_workers(
    tiny_pd: ServedCluster, tiny_oracle: Oracle, num_tokens: int
) -> None:
    prompt_ids = random_ids(random.Random(1000 + num_tokens), num_tokens)
    assert num_tokens > CHUNK_SIZE
    expected = tiny_oracle.generate(prompt_ids, 4, ignore_eos=True)
    num_pages, num_full = -(-num_tokens // PAGE_SIZE), num_tokens // PAGE_SIZE
    # At least one token is computed: at a page boundary, that recomputes the last page.
    num_cached = (num_tokens - 1) // PAGE_SIZE
    found = []
    for _ in range(2):
        answer = tiny_pd.complete(prompt_ids, max_tokens=4, ignore_eos=True)
        assert answer.token_ids == expected
        found.append(answer.last.handover)
    first, second = found
    assert (first.prefill_cached_tokens, first.decode_cached_tokens) == (0, 0)
    assert (first.pages_computed, first.pages_shipped) == (num_pages, num_pages)
    assert second.prefill_cached_tokens == num_cached * PAGE_SIZE
    assert second.pages_computed == num_pages - num_cached
    assert second.decode_cached_tokens == num_full * PAGE_SIZE
    assert second.pages_shipped == num_pages - num_full


def test_next_turn_ships_only_missing_pages(tiny_pd: ServedCluster, tiny_oracle: Oracle) -> None:
    rng = random.Random(3)
    prompt_ids = random_ids(rng, 70)
    output_ids = tiny_pd.complete(prompt_ids, max_tokens=40, ignore_eos=True).token_ids
    prompt_ids = prompt_ids + output_ids + random_ids(rng, 30)
    answer = tiny_pd.complete(prompt_ids, max_tokens=8, ignore_eos=True)
    assert answer.token_ids == tiny_oracle.generate(prompt_ids, 8, ignore_eos=True)
    handover = answer.last.handover
    assert handover.prefill_cached_tokens == 64
    # The last token has no KV: 109 tokens, six full pages.
    assert handover.decode_cached_tokens == 96
    assert handover.pages_shipped == 9 - 6


def test_shared_prefix_with_another_suffix(tiny_pd: ServedCluster, tiny_oracle: Oracle) -> None:
    rng = random.Random(4)
    stem = random_ids(rng, 80)
    for i in range(3):
        prompt_ids = stem + random_ids(rng, 37)
        answer = tiny_pd.complete(prompt_ids, max_tokens=8)
        assert answer.token_ids == tiny_oracle.generate(prompt_ids, 8)
        handover = answer.last.handover
        assert handover.prefill_cached_tokens == handover.decode_cached_tokens == (80 if i else 0)
        assert handover.pages_shipped == handover.pages_computed == (3 if i else 8)


def test_answer_streams_in_many_responses(tiny_pd: ServedCluster, tiny_oracle: Oracle, cases: list[Case]) -> None:
    case = max(cases, key=lambda case: len(case.output_ids))
    request = tiny_pd.request(case.prompt_ids, max_tokens=MAX_TOKENS)
    request.request_id = "mine"
    responses = list(tiny_pd.client.generate(request))
    # Tokens may share a response.
    assert len(responses) > 4
    assert {response.request_id for response in responses} == {"mine"}
    assert "".join(response.text for response in responses) == tiny_oracle.decode(case.output_ids)


@pytest.mark.parametrize("num_prompt", [1, 16, 100])
def test_max_tokens_1_ends_with_the_first_token(tiny_pd: ServedCluster, tiny_oracle: Oracle, num_prompt: int) -> None:
    prompt_ids = random_ids(random.Random(5), num_prompt)
    answer = tiny_pd.complete(prompt_ids, max_tokens=1, ignore_eos=True)
    assert answer.token_ids == tiny_oracle.generate(prompt_ids, 1, ignore_eos=True)
    assert answer.last.finish_reason == pb.FINISH_REASON_LENGTH
    assert answer.last.usage.completion_tokens == 1


def test_output_reaches_max_model_len(tiny_pd: ServedCluster, tiny_oracle: Oracle) -> None:
    prompt_ids = random_ids(random.Random(6), 480)
    answer = tiny_pd.complete(prompt_ids, max_tokens=32, ignore_eos=True)
    assert answer.token_ids == tiny_oracle.generate(prompt_ids, 32, ignore_eos=True)
    assert answer.last.finish_reason == pb.FINISH_REASON_LENGTH


def test_eos_can_be_ignored(tiny_pd: ServedCluster, tiny_oracle: Oracle, cases: list[Case]) -> None:
    case = next(c for c in cases if c.output_ids[-1] in EOS_TOKEN_IDS and len(c.output_ids) < MAX_TOKENS)
    answer = tiny_pd.complete(case.prompt_ids, max_tokens=MAX_TOKENS, ignore_eos=True)
    assert answer.token_ids == tiny_oracle.generate(case.prompt_ids, MAX_TOKENS, ignore_eos=True)
    assert len(answer.token_ids) == MAX_TOKENS
    assert answer.last.finish_reason == pb.FINISH_REASON_LENGTH


@pytest.mark.parametrize("position", [0, 1, 7])
def test_stop_token_ends_the_output_without_text(
    tiny_pd: ServedCluster, tiny_oracle: Oracle, cases: list[Case], position: int
) -> None:
    case = next(c for c in cases if len(c.output_ids) > 8 and len(set(c.output_ids[:8])) == 8)
    expected = case.output_ids[: position + 1]
    answer = tiny_pd.complete(case.prompt_ids, max_tokens=MAX_TOKENS, stop_token_ids=[expected[-1], 299])
    assert answer.token_ids == expected
    assert answer.text == tiny_oracle.decode(expected[:-1])
    assert answer.last.finish_reason == pb.FINISH_REASON_STOP
    assert answer.last.usage.completion_tokens == position + 1
