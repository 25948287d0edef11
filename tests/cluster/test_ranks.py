"""Workers of several ranks on CPUs: streams have transformers' tokens, also when a rank dies or stands still."""

import signal
from pathlib import Path

import pytest

from tandem.deploy.config.cluster_config import ClusterConfig
from tests.cluster.conftest import Clusters, Oracle, save_tiny_model
from tests.cluster.faults import wait_whole
from tests.cluster.rank_drill import PAGE_SIZE, config_for, serve_turns, strike_and_finish
from tests.cluster.tiny_experts import ClearOracle, save_tiny_experts


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
