"""Workers of several ranks on CPUs: streams have transformers' tokens, also when a rank dies or stands still."""

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.processes import ProcessId
from tests.cluster.conftest import CHUNK_SIZE, Clusters, Oracle, ServedCluster, random_ids, save_tiny_model, wait_until
from tests.cluster.faults import LiveStream, QuickConfig, thaw, wait_whole
from tests.cluster.tiny_experts import ClearOracle, save_tiny_experts

PAGE_SIZE = 16
MAX_TOKENS = 24
NUM_STREAMS = 6
# Beyond the routers' limit for a worker that stands still.
STOP_S = 2.0


def config_for(base: ClusterConfig, **settings: Any) -> ClusterConfig:
    of_all: dict[str, Any] = {
        "model": base.model,
        "dtype": "float32",
        "num_pages": 160,
        "chunk_size": CHUNK_SIZE,
        "num_threads": 1,
        "grpc_port": 0,
        "http_port": 0,
    }
    return QuickConfig(**(of_all | settings))


def serve_turns(served: ServedCluster, oracle: Oracle, page_size: int) -> None:
    """Sends prompts of several chunks at once, then one behind a cached prefix, and checks all tokens."""
    rng = random.Random(4)
    stem = random_ids(rng, 6 * PAGE_SIZE + 5)
    prompts = [stem, random_ids(rng, 1), random_ids(rng, 17), random_ids(rng, 150), stem + random_ids(rng, 40)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: served.complete(prompt, max_tokens=MAX_TOKENS), prompts))
    prompts.append(stem + random_ids(rng, 9))
    prompts.append(prompts[3] + answers[3].token_ids + random_ids(rng, 7))
    # Outputs that end with their first token have no decode worker.
    answers += [served.complete(prompt, max_tokens=MAX_TOKENS, ignore_eos=True) for prompt in prompts[-2:]]
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert answer.token_ids == oracle.generate(prompt, MAX_TOKENS, ignore_eos=number >= len(prompts) - 2)
    handover = answers[-2].last.handover
    cached = len(stem) // page_size * page_size
    assert handover.prefill_cached_tokens >= cached and handover.decode_cached_tokens >= cached
    served.wait_clean()


def follower_of(served: ServedCluster, worker_id: str) -> ProcessId:
    worker = served.worker(worker_id)
    assert worker is not None
    return ProcessId.of(worker.follower_pids[-1])


def strike_and_finish(
    served: ServedCluster, oracle: Oracle, victim: str, signum: signal.Signals, *, hits_follower: bool
) -> None:
    """Signals a rank while streams run. Every stream gets its tokens; a killed worker is replaced as a whole."""
    wait_whole(served)
    worker = served.worker(victim)
    assert worker is not None
    rng = random.Random(f"{victim} {signum} {hits_follower}")
    streams = [
        LiveStream(served, random_ids(rng, rng.randint(20, 300)), max_tokens=rng.randint(40, 120), ignore_eos=True)
        for _ in range(NUM_STREAMS)
    ]
    streams[0].wait_tokens(2 if victim.startswith("prefill") else 20)
    ranks = [ProcessId.of(pid) for pid in (worker.pid, *worker.follower_pids)]
    struck = ranks[-1 if hits_follower else 0].pid
    os.kill(struck, signum)
    if signum is signal.SIGSTOP:
        reason = f"no {victim.partition('-')[0]} worker is connected"
        wait_until(lambda: served.client.server_info().not_ready_reason == reason, 10.0, "the router knows")
        thaw([struck])
    else:
        wait_until(lambda: not any(rank.is_alive() for rank in ranks), 10.0, "all ranks have ended")
    wait_whole(served)
    for stream in streams:
        answer = stream.finish()
        assert len(answer.token_ids) == stream.sampling["max_tokens"]
        assert oracle.confirms(stream.prompt_ids, answer.token_ids)
    again = served.worker(victim)
    assert again is not None and (again.pid == worker.pid) == (signum is signal.SIGSTOP)
    served.wait_clean()


def test_ranks_of_unequal_degrees_hand_over(
    clusters: Clusters, tiny_config: ClusterConfig, tiny_oracle: Oracle
) -> None:
    """And a dead follower is a dead worker."""
    served = clusters.get(config_for(tiny_config, prefill_tp=2))
    wait_whole(served)
    serve_turns(served, tiny_oracle, PAGE_SIZE)
    prefill, decode = served.worker("prefill-0"), served.worker("decode-0")
    assert prefill is not None and decode is not None
    assert (len(prefill.follower_pids), len(decode.follower_pids)) == (1, 0)
    strike_and_finish(served, tiny_oracle, "prefill-0", signal.SIGKILL, hits_follower=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("hits_follower", [True, False])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_streams_outlive_any_rank(
    clusters: Clusters,
    tiny_config: ClusterConfig,
    tiny_oracle: Oracle,
    victim: str,
    signum: signal.Signals,
    hits_follower: bool,
) -> None:
    served = clusters.get(config_for(tiny_config, tp=2))
    strike_and_finish(served, tiny_oracle, victim, signum, hits_follower=hits_follower)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page_size", [1, PAGE_SIZE])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("decode_tp", [1, 2, 4])
@pytest.mark.parametrize("prefill_tp", [1, 2, 4])
def test_every_pair_of_degrees_hands_over(
    clusters: Clusters, tmp_path: Path, prefill_tp: int, decode_tp: int, num_kv_heads: int, page_size: int
) -> None:
    save_tiny_model(tmp_path, num_key_value_heads=num_kv_heads)
    config = ClusterConfig(model=str(tmp_path))
    of_pages = {"page_size": page_size, "num_pages": 160 * PAGE_SIZE // page_size}
    served = clusters.get(config_for(config, prefill_tp=prefill_tp, decode_tp=decode_tp, **of_pages))
    wait_whole(served)
    serve_turns(served, Oracle(tmp_path), page_size)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("num_workers", "degrees"), [(1, {"tp": 2}), (0, {"prefill_tp": 2}), (0, {"decode_tp": 4})])
@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "deepseek_v3"])
def test_experts_and_latents_on_several_ranks(
    clusters: Clusters, tmp_path: Path, family: str, num_workers: int, degrees: dict[str, int]
) -> None:
    save_tiny_experts(tmp_path, family)
    num_split = 0 if num_workers else 1
    counts = {"num_any": num_workers, "num_prefill": num_split, "num_decode": num_split}
    served = clusters.get(config_for(ClusterConfig(model=str(tmp_path)), **counts, **degrees))
    serve_turns(served, ClearOracle(tmp_path), PAGE_SIZE)
