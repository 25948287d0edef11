"""Sampling, log probabilities and stop strings, against transformers' logits."""

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tandem.v1 import inference_pb2 as pb
from tests.cluster.conftest import VOCAB_SIZE, Oracle, ServedCluster

# Exact in the client's single and the sampler's double precision.
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.5, "top_p": 0.75},
    {"temperature": 2.0, "top_k": 20, "min_p": 0.125},
    {"temperature": 1.0, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"repetition_penalty": 1.25},
    {"temperature": 1.0, "logit_bias": {7: 4.0, 9: -100.0}},
    {"temperature": 1.0, "allowed_token_ids": (250, 5, 7, 9, 130)},
    {"allowed_token_ids": (250, 5), "repetition_penalty": 1.25},
]


def random_ids(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


def test_sampled_tokens_depend_on_seed_and_position(tiny_pd: ServedCluster, tiny_oracle: Oracle) -> None:
    # Concurrent, to share batches.
    requests = [
        (seed, random_ids(seed, 20 + 10 * i), params) for i, params in enumerate(SAMPLING) for seed in (i, 2**63)
    ]

    def serve(seed: int, prompt_ids: list[int], params: dict[str, Any]) -> list[int]:
        return tiny_pd.complete(prompt_ids, max_tokens=12, ignore_eos=True, seed=seed, **params).token_ids

    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(lambda request: serve(*request), requests))
    for (seed, prompt_ids, params), token_ids in zip(requests, answers, strict=True):
        bias = tuple(sorted(params.get("logit_bias", {}).items()))
        assert len(token_ids) == 12
        assert tiny_oracle.confirms_sampled(prompt_ids, token_ids, seed=seed, **{**params, "logit_bias": bias}), params


def test_another_seed_gives_another_answer(tiny_pd: ServedCluster) -> None:
    answers = [tuple(tiny_pd.complete([1, 2, 3], temperature=1.0, ignore_eos=True).token_ids) for _ in range(3)]
    assert len(set(answers)) == 3


def test_logprobs_match_the_model(tiny_pd: ServedCluster, tiny_oracle: Oracle) -> None:
    prompt_ids = random_ids(20, 30)
    request = tiny_pd.request(prompt_ids, max_tokens=8, ignore_eos=True, temperature=2.0, logprobs=3)
    token_ids: list[int] = []
    logprobs: list[pb.TokenLogprobs] = []
    for response in tiny_pd.client.generate(request, timeout_s=30.0):
        assert len(response.logprobs) == len(response.token_ids)
        token_ids += response.token_ids
        logprobs += response.logprobs
    rows = tiny_oracle.logits(prompt_ids + token_ids)[len(prompt_ids) - 1 : -1].log_softmax(-1)
    for token_id, row, found in zip(token_ids, rows, logprobs, strict=True):
        assert found.logprob == pytest.approx(float(row[token_id]), abs=1e-3)
        top = row.topk(3)
        assert [t.token_id for t in found.top] == top.indices.tolist()
        assert [t.logprob for t in found.top] == pytest.approx(top.values.tolist(), abs=1e-3)


def test_named_tokens_are_listed_in_their_order(tiny_pd: ServedCluster, tiny_oracle: Oracle) -> None:
    """The first token's come over both workers, the others' over one."""
    prompt_ids, named = random_ids(21, 30), [200, 3, 90]
    asked = {"allowed_token_ids": [3, 4], "logprobs": 5, "logprob_token_ids": named}
    request = tiny_pd.request(prompt_ids, max_tokens=6, ignore_eos=True, temperature=1.0, **asked)
    responses = list(tiny_pd.client.generate(request, timeout_s=30.0))
    token_ids = [i for response in responses for i in response.token_ids]
    logprobs = [entry for response in responses for entry in response.logprobs]
    assert len(token_ids) == 6 and set(token_ids) <= {3, 4}
    rows = tiny_oracle.logits(prompt_ids + token_ids)[len(prompt_ids) - 1 : -1].log_softmax(-1)
    for row, found in zip(rows, logprobs, strict=True):
        assert [t.token_id for t in found.top] == named
        assert [t.logprob for t in found.top] == pytest.approx(row[named].tolist(), abs=1e-3)


def test_a_stop_string_ends_the_output(tiny_pd: ServedCluster) -> None:
    whole = tiny_pd.complete(random_ids(21, 40), max_tokens=200, ignore_eos=True)
    stop = whole.text[20:24]
    answer = tiny_pd.complete(random_ids(21, 40), max_tokens=200, ignore_eos=True, stop=[stop, "never in it"])
    assert answer.text == whole.text.partition(stop)[0]
    assert answer.last.finish_reason == pb.FINISH_REASON_STOP
    num_tokens = len(answer.token_ids)
    assert num_tokens < 200 and answer.token_ids == whole.token_ids[:num_tokens]
    assert answer.last.usage.completion_tokens == num_tokens


def test_prompt_logprobs_match_the_model(tiny_pd: ServedCluster, tiny_oracle: Oracle) -> None:
    # Several chunks. The first request caches the prompt.
    prompt_ids = random_ids(30, 130)
    rows = tiny_oracle.logits(prompt_ids).log_softmax(-1)
    expected = [float(rows[i - 1, prompt_ids[i]]) for i in range(1, len(prompt_ids))]
    for sampling in ({"prompt_logprobs": 2}, {}, {"prompt_logprobs": 2}):
        request = tiny_pd.request(prompt_ids, max_tokens=3, ignore_eos=True, **sampling)
        first, *others = tiny_pd.client.generate(request, timeout_s=30.0)
        scored = first.prompt_logprobs
        assert not any(response.HasField("prompt_logprobs") for response in others)
        if sampling:
            assert list(scored.logprobs) == pytest.approx(expected, abs=1e-4)
            top = rows[:-1].topk(2)
            assert list(scored.top_token_ids) == top.indices.flatten().tolist()
            assert list(scored.top_logprobs) == pytest.approx(top.values.flatten().tolist(), abs=1e-4)
            assert others[-1].handover.prefill_cached_tokens == 0
        else:
            assert not first.HasField("prompt_logprobs") and others[-1].handover.prefill_cached_tokens == 128
    tiny_pd.wait_clean()


def test_min_tokens(tiny_pd: ServedCluster) -> None:
    bias = {256: 100.0}
    assert tiny_pd.complete([1, 2, 3], max_tokens=9, logit_bias=bias).token_ids == [256]
    answer = tiny_pd.complete([1, 2, 3], max_tokens=9, min_tokens=5, logit_bias=bias)
    assert 256 not in answer.token_ids[:5] and answer.token_ids[5:] == [256]
