"""A cluster whose number of workers and routers follows a plan of the test's."""

import random
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tandem.deploy import launcher
from tandem.deploy.cli.status_tables import print_status
from tandem.deploy.config.bounds import Bounds
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.supervise.size_planner import SizePlanner, SizeReport
from tests.cluster.conftest import Answer, Clusters, Oracle, ServedCluster, random_ids, wait_until

# Two seconds on an idle host.
START_S = 150.0
pytestmark = pytest.mark.timeout(400)
NUM_TOKENS = 120


class Planner(SizePlanner):
    """Wants what the test says, and a worker for a request without any.

    Attributes: wanted: targets of kinds.
    """

    wanted: Mapping[str, int] = {}

    def plan(self, report: SizeReport) -> Mapping[str, int]:
        self.reasons = dict.fromkeys(self.bounds, "load")
        if any(demand.num_unplaced for demand in report.demands.values()):
            Planner.wanted = {**Planner.wanted, "any": max(1, Planner.wanted["any"])}
        return Planner.wanted


@pytest.fixture
def elastic(clusters: Clusters, tiny_config: ClusterConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedCluster]:
    monkeypatch.setattr(launcher, "SizePlanner", Planner)
    Planner.wanted = {"any": 0, "router": 1}
    config = replace(
        tiny_config,
        num_prefill=0,
        num_decode=0,
        num_any=0,
        num_routers=1,
        bounds={"any": Bounds(0, 2), "router": Bounds(1, 2)},
    )
    served = clusters.get(config)
    yield served
    served.wait_clean()


def sizes(served: ServedCluster) -> dict[str, tuple[int, int, int]]:
    """Returns the numbers of ready, starting and leaving processes by kind."""
    return {s.kind: (s.ready, s.starting, s.leaving) for s in served.client.server_info().sizes}


def reach(served: ServedCluster, **wanted: int) -> None:
    Planner.wanted = {**Planner.wanted, **wanted}
    goal = {kind: (count, 0, 0) for kind, count in Planner.wanted.items()}
    wait_until(lambda: sizes(served) == goal, START_S, f"{wanted} is reached")


def test_workers_and_routers_come_and_go_and_no_request_is_lost(
    elastic: ServedCluster, tiny_oracle: Oracle, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(3)
    info = elastic.client.server_info()
    assert info.ready and not info.workers, "a request may wait for the first worker"
    prompts = [random_ids(rng, 20 + number) for number in range(8)]
    with ThreadPoolExecutor(len(prompts)) as pool:

        def send(prompt: list[int]) -> Future[Answer]:
            return pool.submit(stream, elastic, prompt)

        pending = [send(prompt) for prompt in prompts[:2]]
        wait_until(lambda: sizes(elastic)["any"] == (1, 0, 0), START_S, "the first worker has come for them")
        reach(elastic, any=2, router=2)
        assert [router.alive for router in elastic.client.server_info().routers] == [True, True]
        wait_until(lambda: all(w.linked_to for w in elastic.client.server_info().workers), 20.0, "there are links")
        pending += [send(prompt) for prompt in prompts[2:]]
        print_status(elastic.client.server_info())
        reach(elastic, any=1, router=1)
        answers = [answer.result() for answer in pending]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.token_ids) == NUM_TOKENS and tiny_oracle.confirms(prompt, answer.token_ids)
    assert [w.worker_id for w in elastic.client.server_info().workers] == ["worker-0"]
    shown = " ".join(capsys.readouterr().out.split())
    assert "elastic bounds wanted ready" in shown and "workers 0:2 2 2 0 0" in shown
    reach(elastic, any=0)
    assert elastic.client.server_info().ready


def stream(served: ServedCluster, prompt: list[int]) -> Answer:
    answer = Answer()
    request = served.request(prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
    for response in served.client.generate(request, timeout_s=2 * START_S):
        answer.add(response)
    return answer


def test_a_scale_by_hand_sets_other_bounds(elastic: ServedCluster) -> None:
    reach(elastic, any=0, router=1)
    assert finished(elastic, {"any": Bounds(1, 2)}) == ""
    wait_until(lambda: sizes(elastic)["any"] == (1, 0, 0), 5.0, "the routers are told")
    assert finished(elastic, {"any": 1}) == ""
    # A number does not follow the load.
    wait_until(lambda: "any" not in sizes(elastic), 5.0, "the routers are told")
    assert finished(elastic, {"router": 3}).startswith("num_routers is 3, but this cluster was started for 2")
    assert finished(elastic, {"any": Bounds(0, 2)}) == ""
    reach(elastic, any=0)


def finished(served: ServedCluster, counts: dict[Any, Any]) -> str:
    """Returns the error of a change."""
    job = served.cluster.scale(counts)
    wait_until(lambda: job.next_line(0.1) is None, START_S, "the change is over")
    return job.error
