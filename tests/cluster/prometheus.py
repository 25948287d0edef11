"""A real Prometheus with the shipped configuration."""

import json
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import ProxyHandler, build_opener

from tests.cluster.conftest import wait_until

SHIPPED = Path(__file__).parents[2] / "deploy/monitoring/prometheus"
START_S = 30.0


class Prometheus:
    """Scrapes every second and fires alerts without delay."""

    def __init__(self, directory: Path, sd_address: str) -> None:
        """Args: sd_address: a router's HTTP "host:port"."""
        shutil.copytree(SHIPPED, directory, dirs_exist_ok=True)
        config = directory / "prometheus.yml"
        text = config.read_text()
        for old, new in (
            ("127.0.0.1:8000", sd_address),
            ("scrape_interval: 5s", "scrape_interval: 1s"),
            ("scrape_timeout: 4s", "scrape_timeout: 1s"),
            ("evaluation_interval: 15s", "evaluation_interval: 1s"),
            ("refresh_interval: 5s", "refresh_interval: 1s"),
        ):
            assert old in text
            text = text.replace(old, new)
        config.write_text(text)
        alerts = directory / "rules/alerts.yml"
        alerts.write_text(re.sub(r"( for:) \w+", r"\1 1s", alerts.read_text()))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.log = directory / "log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={config}",
                    f"--storage.tsdb.path={directory / 'data'}",
                    f"--web.listen-address={self.address}",
                ],
                stdout=log,
                stderr=log,
            )
        wait_until(self._is_ready, START_S, f"Prometheus is ready; {self.log}")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=START_S)

    def ask(self, path: str, **arguments: str) -> Any:
        """Raises HTTPError on refusal."""
        url = f"http://{self.address}/api/v1/{path}?{urlencode(arguments)}"
        with build_opener(ProxyHandler({})).open(url, timeout=10.0) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        return self.ask("query", query=expression)["result"]

    def values(self, expression: str, label: str) -> dict[str, float]:
        return {series["metric"].get(label, ""): float(series["value"][1]) for series in self.query(expression)}

    def firing(self) -> set[tuple[str, str]]:
        """Return (alert, worker or process) pairs."""
        alerts = [alert for alert in self.ask("alerts")["alerts"] if alert["state"] == "firing"]
        return {
            (alert["labels"]["alertname"], alert["labels"].get("worker") or alert["labels"].get("process", ""))
            for alert in alerts
        }

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()
        try:
            with build_opener(ProxyHandler({})).open(f"http://{self.address}/-/ready", timeout=2.0) as answer:
                return answer.status == 200
        except OSError:
            return False
