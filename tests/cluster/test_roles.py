"""Workers whose lean changes under load, by a plan of the test's."""

import os
import random
import signal
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import ray

from tandem.deploy import launcher
from tandem.deploy.cli.status_tables import print_status
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.supervise.role_planner import RolePlanner
from tandem.router.workers.leans import Lean, RouterDemand
from tests.cluster.conftest import Clusters, Oracle, ServedCluster, random_ids, wait_until

ONE_WAY: dict[str, Lean] = {"worker-0": "prefill", "worker-1": "decode"}
OTHER_WAY: dict[str, Lean] = {"worker-0": "decode", "worker-1": "prefill"}


class Planner(RolePlanner):
    """Attributes: planned: next plan; demands: latest demands of the routers."""

    planned: Mapping[str, Lean] = {}
    demands: Mapping[str, RouterDemand] = {}

    def plan(self, demands: Mapping[str, RouterDemand]) -> Mapping[str, Lean]:
        Planner.demands = demands
        return Planner.planned


@pytest.fixture
def planned(clusters: Clusters, tiny_config: ClusterConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedCluster]:
    monkeypatch.setattr(launcher, "RolePlanner", Planner)
    # Unique, so that no other test shares this planner's cluster.
    config = replace(tiny_config, num_prefill=0, num_decode=0, num_any=2, max_queued_requests=999)
    served = clusters.get(config)
    wait_until(lambda: all(len(w.linked_to) == 1 for w in served.client.server_info().workers), 20.0, "there are links")
    yield served
    served.wait_clean()


def leans(served: ServedCluster) -> dict[str, str]:
    return {w.worker_id: w.lean for w in served.client.server_info().workers if w.alive}


def turn(served: ServedCluster, plan: dict[str, Lean]) -> None:
    Planner.planned = plan
    wait_until(lambda: leans(served) == plan, 3.0, f"{plan} is told")


def test_leans_change_under_load_without_dropped_requests(
    planned: ServedCluster, tiny_oracle: Oracle, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(5)
    assert leans(planned) == {"worker-0": "none", "worker-1": "none"}
    prompts = [random_ids(rng, rng.randrange(30, 150)) for _ in range(16)]
    with ThreadPoolExecutor(4) as pool:
        pending = [pool.submit(planned.complete, prompt, max_tokens=40, ignore_eos=True) for prompt in prompts]
        for plan in (ONE_WAY, OTHER_WAY, ONE_WAY):
            turn(planned, plan)
        answers = [answer.result() for answer in pending]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.token_ids) == 40 and tiny_oracle.confirms(prompt, answer.token_ids)
        assert answer.last.handover.attempts == 1
    # Without other load, the worker that leans to decode decodes.
    for plan, decode_worker in ((ONE_WAY, "worker-1"), (OTHER_WAY, "worker-0")):
        turn(planned, plan)
        assert planned.complete(random_ids(rng, 40)).last.handover.decode_worker == decode_worker
    wait_until(lambda: Planner.demands and Planner.demands["router-0"].prompts == 18, 3.0, "all prompts are counted")
    print_status(planned.client.server_info())
    assert "both, mostly prefill" in " ".join(capsys.readouterr().out.split())
    with urllib.request.urlopen(f"http://{planned.cluster.addresses.http}/metrics") as response:
        metrics = response.read().decode()
    assert 'tandem_leaning_workers{lean="prefill"} 1.0' in metrics
    assert "tandem_lean_changes_total 8.0" in metrics


def test_restarted_router_gets_the_plan(planned: ServedCluster) -> None:
    turn(planned, ONE_WAY)
    pid = ray.get(planned.cluster.actor("router-0").__ray_call__.remote(lambda actor: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_told(planned), 30.0, "the plan is told anew")


def is_told(served: ServedCluster) -> bool:
    try:
        return leans(served) == ONE_WAY
    except Exception:  # The router is down.
        return False
