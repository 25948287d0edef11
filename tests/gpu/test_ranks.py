"""Workers of two ranks on one GPU."""

import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tandem.deploy.config.cluster_config import ClusterConfig
from tests.cluster.conftest import Clusters, Oracle, ServedCluster, random_ids, wait_until
from tests.cluster.faults import wait_whole
from tests.cluster.rank_drill import MAX_TOKENS, PAGE_SIZE, config_for, serve_turns, strike_and_finish
from tests.cluster.test_page_store import store_metrics

pytestmark = pytest.mark.timeout(300)
# Of logits; bfloat16 rounds each to 8 bits, and ranks round their parts.
MARGIN = 1.5


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    clusters = Clusters()
    yield clusters
    clusters.close()


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
def test_ranks_of_unequal_degrees_hand_over(
    clusters: Clusters, cuda_config: ClusterConfig, prefill_tp: int, decode_tp: int
) -> None:
    degrees = {"prefill_tp": prefill_tp, "decode_tp": decode_tp}
    served = clusters.get(config_for(cuda_config, device="cuda", workers_per_gpu=4, **degrees))
    wait_whole(served)
    serve_turns(served, Oracle(Path(cuda_config.model)), PAGE_SIZE)
    (shipped,) = served.integrity()["prefill-0"].stats.shipped
    assert shipped.transport == "nvlink" and shipped.num_pages > 0


@pytest.mark.parametrize("speculation", ["off", "ngram"])
def test_graphs_of_two_ranks_compute_greedy_tokens(
    clusters: Clusters, cuda_config: ClusterConfig, speculation: str
) -> None:
    """In bfloat16, and again from cached prefixes."""
    counts = {"num_prefill": 0, "num_decode": 0, "num_both": 1}
    settings = {"dtype": "bfloat16", "chunk_size": 256, "tp": 2, "workers_per_gpu": 2, "speculation": speculation}
    served = clusters.get(config_for(cuda_config, device="cuda", **counts, **settings))
    oracle, rng = Oracle(Path(cuda_config.model)), random.Random(5)
    prompts = [random_ids(rng, rng.randint(1, 200)) for _ in range(12)]
    # Their outputs have drafts.
    prompts += [(random_ids(rng, 5) * 20)[: rng.randint(20, 100)] for _ in range(4)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        for _ in range(2):
            answers = list(pool.map(lambda p: served.complete(p, max_tokens=60, ignore_eos=True), prompts))
            for prompt_ids, answer in zip(prompts, answers, strict=True):
                logits = oracle.logits([*prompt_ids, *answer.token_ids])[len(prompt_ids) - 1 : -1]
                chosen = logits[range(len(logits)), answer.token_ids]
                assert (logits.max(-1).values - chosen).max() < MARGIN
    num_accepted = sum(one.num_accepted for one in served.integrity()["both-0"].stats.drafted)
    assert (num_accepted > 0) == (speculation != "off")
    served.wait_clean()


def test_pages_of_ranks_come_back_from_the_store(clusters: Clusters, cuda_config: ClusterConfig) -> None:
    counts = {"num_prefill": 0, "num_decode": 0, "num_both": 1}
    settings = {"tp": 2, "workers_per_gpu": 2, "store_memory": "64MiB"}
    served = clusters.get(config_for(cuda_config, device="cuda", **counts, **settings))
    wait_whole(served)
    prompt_ids = random_ids(random.Random(7), 150)
    expected = Oracle(Path(cuda_config.model)).generate(prompt_ids, MAX_TOKENS)
    assert served.complete(prompt_ids, max_tokens=MAX_TOKENS).token_ids == expected
    num_pages = len(prompt_ids) // PAGE_SIZE
    wait_until(lambda: store_metrics(served).get("slots.ready", 0) >= num_pages, 20.0, "the pages are stored")
    served.kill("both-0")
    wait_whole(served)
    wait_until(lambda: store_metrics(served).get("sessions") == 1, 20.0, "its session is open")
    again = served.complete(prompt_ids, max_tokens=MAX_TOKENS)
    assert again.token_ids == expected and again.last.usage.host_tokens == num_pages * PAGE_SIZE
    served.wait_clean()


def kill_each_rank(served: ServedCluster, oracle: Oracle) -> None:
    for victim in ("prefill-0", "decode-0"):
        for hits_follower in (True, False):
            strike_and_finish(served, oracle, victim, signal.SIGKILL, hits_follower=hits_follower)


def served_by_four_ranks(clusters: Clusters, cuda_config: ClusterConfig) -> ServedCluster:
    return clusters.get(config_for(cuda_config, device="cuda", tp=2, workers_per_gpu=4))


def test_streams_outlive_each_rank(clusters: Clusters, cuda_config: ClusterConfig) -> None:
    kill_each_rank(served_by_four_ranks(clusters, cuda_config), Oracle(Path(cuda_config.model)))


@pytest.mark.parametrize("cycle", range(5))
def test_streams_outlive_twenty_kills(clusters: Clusters, cuda_config: ClusterConfig, cycle: int) -> None:
    kill_each_rank(served_by_four_ranks(clusters, cuda_config), Oracle(Path(cuda_config.model)))


@pytest.mark.parametrize("hits_follower", [True, False])
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_streams_outlive_stopped_ranks(
    clusters: Clusters, cuda_config: ClusterConfig, victim: str, hits_follower: bool
) -> None:
    served = served_by_four_ranks(clusters, cuda_config)
    oracle = Oracle(Path(cuda_config.model))
    strike_and_finish(served, oracle, victim, signal.SIGSTOP, hits_follower=hits_follower)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_on_gpus_of_their_own_end_together(clusters: Clusters, cuda_config: ClusterConfig) -> None:
    counts = {"num_prefill": 0, "num_decode": 0, "num_both": 1}
    served = clusters.get(config_for(cuda_config, device="cuda", tp=2, **counts))
    oracle = Oracle(Path(cuda_config.model))
    for hits_follower in (True, False, True, False):
        strike_and_finish(served, oracle, "both-0", signal.SIGKILL, hits_follower=hits_follower)
