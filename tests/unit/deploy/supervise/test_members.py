"""Plans of changes to a cluster of two workers, without processes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tandem.deploy.config.bounds import Bounds
from tandem.deploy.config.cluster_config import ClusterConfig, WorkerPlan
from tandem.deploy.host.ports import ClientAddresses, ClusterPorts
from tandem.deploy.supervise import members
from tandem.deploy.supervise.members import Basis, Members
from tandem.deploy.supervise.processes import Processes
from tandem.deploy.supervise.scaling import ScaleJob
from tandem.deploy.supervise.supervisor import Supervisor

CONFIG = ClusterConfig("m", num_prefill=0, num_decode=0, num_any=2, num_pages=8)
ROUTERS = ("router-0", "router-1")


class Cluster:
    """Attributes: refusal: why no worker can be planned; asked: names of the last plan."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        unused: Any = None
        self.refusal = ""
        self.processes = Processes(CONFIG, unused, unused, print, unused)
        self.processes.configure(dict.fromkeys(ROUTERS, CONFIG.router("m", "m", 9)), plans(2), None, None)
        self.supervisor = Supervisor({}, {}, lambda name: True)
        basis = Basis(CONFIG, Path("m"), "", ClusterPorts(ClientAddresses("", ""), {}), None)
        self.members = Members(basis, {}, unused, self.processes, self.supervisor, lambda: None)
        monkeypatch.setattr(members, "plan", self._plan)
        monkeypatch.setattr(members, "has_room", lambda *_, **__: True)

    def _plan(self, config: ClusterConfig, *_: Any, **__: Any) -> tuple[Sequence[Any], Sequence[WorkerPlan]]:
        if self.refusal:
            raise ValueError(self.refusal)
        return (), list(plans(config.num_any).values())


def plans(count: int) -> dict[str, WorkerPlan]:
    names = [f"worker-{number}" for number in range(count)]
    return {name: CONFIG.worker(name, "both", CONFIG.engine("m"), 9) for name in names}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def test_a_fixed_number_is_kept_when_a_node_goes_and_no_other_worker_can_start(cluster: Cluster) -> None:
    cluster.refusal = "no memory"
    assert len(cluster.members.evacuate({"worker-1": 100.0})) == 1
    assert cluster.members.bounds == {"any": Bounds(2, 2)}
    # Both go by now.
    assert len(cluster.members.evacuate({"worker-0": 100.0, "worker-1": 100.0})) == 1
    assert cluster.members.bounds == {"any": Bounds(2, 2)}


def test_routers_are_scaled_while_workers_are_missing(cluster: Cluster) -> None:
    cluster.refusal = "no memory"
    cluster.members.evacuate({"worker-1": 100.0})
    cluster.members.remove_workers(["worker-1"])
    cluster.refusal = ""
    assert cluster.members.plan_scaling(ScaleJob({"router": 2})).take_turn()
    assert cluster.members.bounds == {"any": Bounds(2, 2)} and cluster.members.names("any") == ["worker-0"]


def test_with_others_in_their_place_nothing_is_missing(cluster: Cluster) -> None:
    assert len(cluster.members.evacuate({"worker-1": 100.0})) == 1
    assert cluster.members.bounds == {} and cluster.members.names("any") == ["worker-0", "worker-1", "worker-2"]


def test_a_new_number_does_not_count_workers_that_await_their_room(cluster: Cluster) -> None:
    cluster.members.reserve(["worker-2", "worker-3"])
    cluster.refusal = "no memory"
    with pytest.raises(ValueError, match="no memory"):
        cluster.members.plan_scaling(ScaleJob({"any": 5}))
    assert len(cluster.members.names("any")) == 4, "they await it still"
    cluster.refusal = ""
    change = cluster.members.plan_scaling(ScaleJob({"router": 2}))
    cluster.members.release(["worker-2", "worker-3"])
    assert change.take_turn(), "nothing is to be started"
    assert cluster.members.names("any") == ["worker-0", "worker-1"]


@pytest.mark.parametrize(("low", "may_be_empty"), [(0, True), (1, False)])
def test_later_routers_know_whether_a_request_may_start_the_first_worker(
    cluster: Cluster, low: int, may_be_empty: bool
) -> None:
    change = cluster.members.plan_scaling(ScaleJob({"any": Bounds(low, 4)}))
    assert change.take_turn()
    assert cluster.members.bounds == {"any": Bounds(low, 4)}
    assert {config.starts_from_zero for config in cluster.processes.router_configs.values()} == {may_be_empty}
