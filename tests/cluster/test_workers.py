"""`--workers`: linked workers that prefill and decode, as the router decides."""

import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tandem.deploy.config.cluster_config import ClusterConfig
from tests.cluster.conftest import Answer, Clusters, Oracle, ServedCluster, random_ids, wait_until

LENGTHS = (1, 15, 16, 17, 33, 47, 48, 49, 100, 150)


@pytest.fixture
def apart(clusters: Clusters, tiny_config: ClusterConfig) -> Iterator[ServedCluster]:
    """Two workers that each decode only the other's prompts."""
    served = clusters.get(replace(tiny_config, num_prefill=0, num_decode=0, num_any=2, placement="disaggregated"))
    yield served
    served.wait_clean()


def pair_of(answer: Answer) -> tuple[str, str]:
    return answer.last.handover.prefill_worker, answer.last.handover.decode_worker


def test_workers_hand_over_to_each_other(apart: ServedCluster, tiny_oracle: Oracle) -> None:
    rng = random.Random(1)
    wait_until(lambda: len(links(apart)) == 2, 20.0, "there are links both ways")
    prompts = [random_ids(rng, n) for n in LENGTHS] * 2
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(apart.complete, prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == tiny_oracle.generate(prompt, 24)
        assert (answer.last.handover.placement, answer.last.handover.placement_reason) == ("disaggregated", "only")
    assert {pair_of(answer) for answer in answers} == {("worker-0", "worker-1"), ("worker-1", "worker-0")}


def test_other_worker_does_both_while_one_restarts(apart: ServedCluster, tiny_oracle: Oracle) -> None:
    rng = random.Random(2)
    prompts = [random_ids(rng, rng.randrange(20, 150)) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        pending = [pool.submit(apart.complete, prompt, max_tokens=150, ignore_eos=True) for prompt in prompts]
        wait_until(lambda: apart.client.server_info().num_requests == 8, 10.0, "all are under way")
        apart.kill("worker-1", signal.SIGKILL)
        answers = [answer.result() for answer in pending]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.token_ids) == 150 and tiny_oracle.confirms(prompt, answer.token_ids)
    assert max(answer.last.handover.attempts for answer in answers) > 1
    assert ("worker-0", "worker-0") in map(pair_of, answers)
    wait_until(lambda: len(links(apart)) == 2, 40.0, "there are links both ways again")
    assert apart.complete(prompts[0]).last.handover.placement == "disaggregated"


def test_conversation_stays_with_its_pages(tiny_workers: ServedCluster, tiny_oracle: Oracle) -> None:
    """Idle workers do not hand over: the next turn ships nothing."""
    rng = random.Random(3)
    before = num_aggregated(tiny_workers)
    token_ids = random_ids(rng, 100)
    home = ""
    for turn in range(3):
        answer = tiny_workers.complete(token_ids, max_tokens=20, ignore_eos=True)
        handover = answer.last.handover
        assert answer.token_ids == tiny_oracle.generate(token_ids, 20, ignore_eos=True)
        assert (handover.placement, handover.pages_shipped) == ("aggregated", 0)
        assert handover.prefill_worker == (home := home or handover.prefill_worker)
        if turn:
            # The last token has no KV, and only full pages are cached.
            assert handover.prefill_cached_tokens == (len(token_ids) - 30 - 1) // 16 * 16
        token_ids += [*answer.token_ids, *random_ids(rng, 30)]
    assert handover.estimated_ttft_ms > 0
    assert num_aggregated(tiny_workers) == before + 3


def num_aggregated(served: ServedCluster) -> int:
    return sum(p.count for p in served.client.server_info().placements if p.placement == "aggregated")


def links(served: ServedCluster) -> list[tuple[str, str]]:
    workers = served.client.server_info().workers
    return [(w.worker_id, peer) for w in workers if w.alive for peer in w.linked_to if peer != w.worker_id]
