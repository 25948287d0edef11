"""A model that drafts for itself is right behind every handover: its keys and values travel with the target's."""

import random
from dataclasses import replace
from typing import Any

import pytest

from tandem.deploy.config.cluster_config import ClusterConfig
from tests.cluster.conftest import Clusters, Oracle, ServedCluster, random_ids, wait_linked
from tests.cluster.faults import LiveStream, wait_whole
from tests.cluster.test_moves import busiest_worker, leaving, num_moved
from tests.cluster.test_speculation import drafted

MAX_TOKENS = 24
# Enough to be running when the worker leaves.
MOVED_TOKENS = 200
SAMPLING: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0}, {"temperature": 0.5, "frequency_penalty": 0.25})
# Rounding between batches may turn a draft.
MIN_ACCEPTED = 0.98


def own_drafts(config: ClusterConfig) -> ClusterConfig:
    return replace(config, num_both=0, speculation=f"draft:{config.model}")


def check_accepted(served: ServedCluster) -> None:
    num_drafted, num_accepted = drafted(served.integrity())
    assert num_accepted >= MIN_ACCEPTED * num_drafted and num_drafted > 0


def test_drafts_are_right_behind_handovers_prefixes_and_restarts(
    clusters: Clusters, tiny_config: ClusterConfig, tiny_oracle: Oracle
) -> None:
    served = clusters.get(own_drafts(replace(tiny_config, num_prefill=1, num_decode=1)))
    wait_whole(served)
    rng = random.Random(3)
    prompts = [random_ids(rng, rng.randint(3, 90)) for _ in range(4)]
    for _ in range(2):
        samplings = [SAMPLING[i % len(SAMPLING)] | {"seed": 2**40 + i} for i in range(len(prompts))]
        streams = [
            LiveStream(served, prompt, max_tokens=MAX_TOKENS, ignore_eos=True, **sampling)
            for prompt, sampling in zip(prompts, samplings, strict=True)
        ]
        answers = [stream.finish() for stream in streams]
        for prompt, sampling, answer in zip(prompts, samplings, answers, strict=True):
            assert len(answer.token_ids) == MAX_TOKENS
            assert tiny_oracle.confirms_sampled(prompt, answer.token_ids, **sampling), sampling
        check_accepted(served)
        # The next turn's prompts have cached prefixes on both workers.
        prompts = [[*p, *a.token_ids, *random_ids(rng, 5)] for p, a in zip(prompts, answers, strict=True)]
    stream = LiveStream(served, prompts[0], max_tokens=MAX_TOKENS, ignore_eos=True)
    assert stream.wait_tokens(3)
    served.kill("decode-0")
    answer = stream.finish()
    assert tiny_oracle.confirms_sampled(prompts[0], answer.token_ids)
    wait_whole(served)
    check_accepted(served)
    served.wait_clean()


@pytest.mark.slow
def test_drafts_are_right_behind_a_move(clusters: Clusters, tiny_config: ClusterConfig, tiny_oracle: Oracle) -> None:
    served = clusters.get(own_drafts(replace(tiny_config, num_prefill=0, num_decode=0, num_any=2)))
    wait_linked(served)
    rng = random.Random(4)
    requests = [(random_ids(rng, 40), SAMPLING[number % 2] | {"seed": number}) for number in range(6)]
    streams = [
        LiveStream(served, prompt, max_tokens=MOVED_TOKENS, ignore_eos=True, **sampling)
        for prompt, sampling in requests
    ]
    assert all(stream.wait_tokens(5) for stream in streams)
    with leaving(served, busiest_worker(served)):
        answers = [stream.finish() for stream in streams]
    assert num_moved(streams) > 0
    for (prompt, sampling), answer in zip(requests, answers, strict=True):
        assert tiny_oracle.confirms_sampled(prompt, answer.token_ids, **sampling), sampling
    check_accepted(served)
    served.wait_clean()
