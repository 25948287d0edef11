"""Operations on clusters whose workers have followers: TLS, scaling, restarts, code that Ray brings."""

import random
from pathlib import Path

import pytest

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.processes import ProcessId
from tests.cluster.command import start, tandem
from tests.cluster.conftest import Clusters, Oracle, ServedCluster, random_ids, wait_until
from tests.cluster.faults import wait_whole
from tests.cluster.joinable_ray import TOKEN, joinable_ray
from tests.cluster.rank_drill import PAGE_SIZE, config_for, serve_turns
from tests.cluster.test_restart import Load, finish

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# A router, a decode worker, and a prefill worker of two ranks.
NUM_CPUS = 4


def ranks_of(served: ServedCluster, worker_id: str) -> list[ProcessId]:
    worker = served.worker(worker_id)
    assert worker is not None
    return [ProcessId.of(pid) for pid in (worker.pid, *worker.follower_pids)]


def test_lanes_of_all_ranks_go_through_tls(clusters: Clusters, tiny_config: ClusterConfig, tiny_oracle: Oracle) -> None:
    served = clusters.get(config_for(tiny_config, prefill_tp=2, internal_tls="on", transport="tcp"))
    wait_whole(served)
    serve_turns(served, tiny_oracle, PAGE_SIZE)


def test_workers_with_followers_join_leave_and_restart_under_load(
    clusters: Clusters, tiny_config: ClusterConfig, tiny_oracle: Oracle
) -> None:
    served = clusters.get(config_for(tiny_config, prefill_tp=2, drain_timeout_s=20.0))
    wait_whole(served)
    prompt = random_ids(random.Random(1), 100)
    with Load(served, tiny_oracle, served.client, 1) as load:
        finish(served.cluster.scale({"prefill": 2}))
        wait_until(lambda: served.worker("prefill-1"), 20.0, "the router knows the new worker")
        joined = ranks_of(served, "prefill-1")
        assert len(joined) == 2 and all(rank.is_alive() for rank in joined)
        before = ranks_of(served, "prefill-0")
        lines = finish(served.cluster.restart("prefill-0"))
        assert lines[-1] == "prefill-0: ready"
        wait_until(lambda: not any(rank.is_alive() for rank in before), 10.0, "the old ranks have ended")
        assert len(ranks_of(served, "prefill-0")) == 2
        assert served.complete(prompt, max_tokens=16).token_ids == tiny_oracle.generate(prompt, 16)
        finish(served.cluster.scale({"prefill": 1}))
        wait_until(lambda: not any(rank.is_alive() for rank in joined), 10.0, "all ranks have left")
    load.check()
    wait_whole(served)
    served.wait_clean()


def test_followers_run_the_code_that_ray_brings(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    with joinable_ray(NUM_CPUS) as joinable:
        pool = ("--threads", "1", "--num-pages", "64", "--prefill-tp", "2")
        where = ("--ray-address", joinable.address, "--placement-strategy", "pack", "--ship-code")
        server = start("--model", str(tiny_model_dir), *pool, *where, runtime_dir=tmp_path)
        try:
            assert tandem("generate", "--max-tokens", "4", "--address", server.address, "hello").returncode == 0
            followers = joinable.processes("ray::WorkerActor")
            assert len(followers) == 2
        finally:
            server.process.terminate()
        assert server.finish() == 0
