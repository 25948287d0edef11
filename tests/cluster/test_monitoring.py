"""The shipped deploy/monitoring/ files on a real Prometheus."""

import math
import random
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import pytest

from tandem.deploy.config.cluster_config import ClusterConfig
from tests.cluster.conftest import RESTART_S, Clusters, ServedCluster, random_ids, wait_until
from tests.cluster.prometheus import Prometheus
from tests.cluster.tiny_experts import save_tiny_experts
from tests.monitoring_files import DASHBOARDS, queries

MISSING = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (Debian's package prometheus)"),
    pytest.mark.timeout(300),
]

PROCESSES = {"router-0", "prefill-0", "prefill-1", "decode-0", "decode-1"}
# A scrape and each rule take a second.
NOTICE_S = 20.0


class Load:
    def __init__(self, served: ServedCluster, num_clients: int) -> None:
        self._served = served
        self._stopping = threading.Event()
        self.num_answers = 0
        self.errors: list[Exception] = []
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(num_clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        rng = random.Random(number)
        stem = random_ids(rng, 64)
        while not self._stopping.is_set():
            try:
                self._served.complete([*stem, *random_ids(rng, 20)], max_tokens=24, ignore_eos=True)
                self.num_answers += 1
            except Exception as error:
                self.errors.append(error)
                return

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture(scope="module")
def served(
    clusters: Clusters, tiny_config: ClusterConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedCluster]:
    # Some panels are for models with experts.
    model_dir = tmp_path_factory.mktemp("models") / "tiny-experts"
    save_tiny_experts(model_dir, "qwen3_moe")
    served = clusters.get(replace(tiny_config, model=str(model_dir), num_prefill=2, num_decode=2))
    yield served
    served.wait_clean()


@pytest.fixture(scope="module")
def load(served: ServedCluster) -> Iterator[Load]:
    load = Load(served, 3)
    yield load
    load.stop()
    assert not load.errors


@pytest.fixture(scope="module")
def prometheus(served: ServedCluster, load: Load, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), served.cluster.addresses.http)
    yield prometheus
    prometheus.close()


def test_every_process_is_scraped(prometheus: Prometheus, served: ServedCluster) -> None:
    wait_until(lambda: prometheus.values("up == 1", "process").keys() == PROCESSES, NOTICE_S, "all are scraped")
    assert set(prometheus.values("up", "model_name")) == {served.cluster.model_name}
    # Independent of ports.
    assert set(prometheus.values("tandem_build_info", "instance")) == PROCESSES


def test_exported_metrics_are_valid(served: ServedCluster) -> None:
    addresses = [worker.metrics_address for worker in served.client.server_info().workers]
    for address in (served.cluster.addresses.http, *addresses):
        with build_opener(ProxyHandler({})).open(f"http://{address}/metrics", timeout=5.0) as answer:
            checked = subprocess.run(
                ["promtool", "check", "metrics"], input=answer.read(), capture_output=True, timeout=30
            )
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_an_alert_fires_while_a_worker_is_dead(prometheus: Prometheus, served: ServedCluster, load: Load) -> None:
    wait_until(lambda: prometheus.values("up == 1", "process").keys() == PROCESSES, NOTICE_S, "all are scraped")
    alert = ("TandemWorkerDown", "decode-1")
    wait_until(lambda: not prometheus.firing(), NOTICE_S, "all is well")
    before = load.num_answers
    served.kill("decode-1")
    wait_until(lambda: alert in prometheus.firing(), NOTICE_S, "the alert fires")
    assert ("TandemWorkerDown", "decode-0") not in prometheus.firing()
    wait_until(lambda: alert not in prometheus.firing(), RESTART_S + NOTICE_S, "the alert resolves")
    wait_until(lambda: prometheus.values("up == 1", "process").keys() == PROCESSES, NOTICE_S, "all are scraped")
    restarts = prometheus.values("tandem_process_restarts_total", "process")
    assert restarts == dict.fromkeys(PROCESSES, 0.0) | {"decode-1": 1.0}
    assert load.num_answers > before


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_every_query_of_a_dashboard_returns_data(prometheus: Prometheus, load: Load, dashboard: Path) -> None:
    for title, expression in queries(dashboard):

        def has_data(expression: str = expression) -> bool:
            return any(not math.isnan(float(series["value"][1])) for series in prometheus.query(expression))

        wait_until(has_data, NOTICE_S, f"{title}: {expression}")
