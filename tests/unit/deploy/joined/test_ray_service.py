"""A Serve replica and the states of its fake cluster."""

from types import SimpleNamespace
from typing import Any

import pytest

from tandem.deploy.joined import ray_service
from tandem.deploy.joined.ray_service import ServedCluster
from tandem.deploy.joined.remote_cluster import GoneError
from tandem.deploy.joined.supervisor_actor import ENDED, SERVING, STOPPING


class Cluster:
    """Attributes: phases: one per look, None: no answer, at the end gone; num_asked: stop requests."""

    def __init__(self, *phases: str | None) -> None:
        self.phases = list(phases)
        self.num_asked = 0

    def look(self) -> Any:
        if not self.phases:
            raise GoneError
        phase = self.phases.pop(0)
        return phase and SimpleNamespace(phase=phase, error="")

    def stop(self, show: Any, *, limit_s: float) -> None:
        self.num_asked += 1


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_service, "_POLL_S", 0.0)


def replica(cluster: Cluster) -> Any:
    made: Any = object.__new__(ServedCluster)
    made._name, made._cluster, made._heard_at = "chat", cluster, ray_service.time.monotonic()
    return made


def test_a_drain_is_healthy_and_an_end_is_not() -> None:
    served = replica(Cluster(SERVING, None, STOPPING, STOPPING, ENDED))
    for _ in range(4):
        served.check_health()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="has ended"):
            served.check_health()


def test_a_long_silence_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    served = replica(Cluster(None, None))
    served.check_health()
    monkeypatch.setattr(ray_service, "SILENCE_LIMIT_S", -1.0)
    with pytest.raises(RuntimeError, match="does not answer"):
        served.check_health()


@pytest.mark.parametrize(("phases", "num_asked"), [([SERVING], 1), ([None], 1), ([STOPPING, STOPPING, ENDED], 0)])
def test_a_cluster_gets_one_stop_request(phases: list[str | None], num_asked: int) -> None:
    cluster = Cluster(*phases)
    served = replica(cluster)
    served.__del__()
    assert cluster.num_asked == num_asked
    served.__del__()
    assert cluster.num_asked == num_asked
